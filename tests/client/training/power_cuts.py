"""A client whose power fails in the middle of a window that it spools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwater.client.features import train_round
from headwater.client.training.context import TrainingContext
from headwater.client.training.sampler import ExampleOrder, SamplerPosition, Window
from headwater.client.training.spool import Spool
from headwater.common.messages import Plan, Update
from tests.tasks import TwoLayers, examples
from tests.training_contexts import training_context

RUN = 7


class PowerCut(BaseException):
    """Nothing catches it."""


class CutOff(TwoLayers):
    """Has a dropout layer and a metric; power fails at one of its micro-batches."""

    def __init__(self, *, cut_at: int | None = None) -> None:
        super().__init__()
        self.cut_at = cut_at

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5)), nn.Linear(8, 1))

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> Any:
        if self.cut_at is not None and len(self.seen) >= self.cut_at:
            raise PowerCut
        loss, weight = super().loss_sum(model, batch)
        return loss * 0.1, weight, {"tenths": 0.1 * weight}


def spool(folder: Path, **how: Any) -> Spool:
    return Spool(
        folder, name="pi", run_id=RUN, **{"every_seconds": 0.0, "max_share": math.inf, **how}
    )


def device(*, cut_at: int | None = None, kinds: Sequence[int] = (), **more: Any) -> TrainingContext:
    return training_context(CutOff(cut_at=cut_at), examples(24, kinds=kinds), **more)


def window_of(context: TrainingContext, quota: int) -> Window:
    order = ExampleOrder(0, "pi", quota)
    return Window(positions=tuple(range(quota)), place=SamplerPosition(), order=order)


def done(context: TrainingContext, chosen: Plan, kept: Spool | None = None) -> Update:
    return train_round(chosen, window_of(context, chosen.quota), context, kept)


def cut_off(folder: Path, chosen: Plan, *, at: int, **how: Any) -> None:
    """Simulate a power cut at micro-batch ``at``, from 0."""
    with pytest.raises(PowerCut):
        done(device(cut_at=at), chosen, spool(folder, **how))


def seen_by(context: TrainingContext) -> list[int]:
    assert isinstance(context.task, CutOff)
    return context.task.seen


def assert_same(found: Update, expected: Update) -> None:
    assert torch.equal(found.values_P, expected.values_P)
    timeless = {"steps", "seconds", "vitals"}
    assert found.report.model_dump(exclude=timeless) == expected.report.model_dump(exclude=timeless)
    for one, other in zip(found.report.steps, expected.report.steps, strict=True):
        assert replace(one, peak_bytes=0) == replace(other, peak_bytes=0)
