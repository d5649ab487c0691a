"""Devices hold out their last examples, or whole groups, in every mode of the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headwater
from headwater.common.errors import HeadwaterError, SettingsError


class Windows:
    """The next value of pure noise: windows that overlap in all but one value, by nearest rows."""

    def new_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return TensorDataset(torch.arange(40.0) % 20)

    def columns(self, examples: TensorDataset) -> Mapping[str, Any]:
        return {"patient": [int(value) // 5 for value in examples.tensors[0]]}

    def loss_sum(
        self, model: nn.Module, batch: list[Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        (values,) = batch
        loss = (model(values[:, None] / 20) - 1).square().sum()
        return loss, len(values), {"value": values.sum(), "patient": (values // 5).sum()}


def simulated(**changes: Any) -> headwater.Run:
    given: dict[str, Any] = {"clients": 2, "rounds": 1, "fleet": "equal", "progress": False}
    settings = {"evaluation.held_out_fraction": 0.25, **changes.pop("settings", {})}
    return headwater.simulate(Windows, **given, **changes, settings=settings)


@pytest.mark.parametrize("compute", ["one-by-one", "vectorised", "fused"])
def test_the_last_examples_are_the_test_and_no_others_are_trained_on(compute: str) -> None:
    run = simulated(
        evaluate_on_devices=True, held_out="last", settings={"simulation.compute": compute}
    )
    (row,) = run.history
    assert row.metrics["held_out_value"] == pytest.approx(sum(range(10, 20)) / 10)
    assert row.num_examples == 2 * 30
    assert row.metrics["train_value"] == pytest.approx((sum(range(20)) + sum(range(10))) / 30)


def test_the_examples_of_one_group_are_all_on_one_side() -> None:
    (row,) = simulated(evaluate_on_devices=True, held_out="group:patient").history
    assert row.num_examples == 2 * 30  # each device holds out one of four groups of 10
    patients = row.metrics["held_out_patient"] * 2
    assert patients == pytest.approx(round(patients))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"held_out": "last"}, SettingsError, "with --evaluate-on-devices alone"),
        ({"evaluate_on_devices": True, "held_out": "first"}, SettingsError, "held_out"),
        ({"evaluate_on_devices": True, "held_out": "group:ward"}, HeadwaterError, "no column"),
    ],
)
def test_what_cannot_be_held_out_is_named(
    given: dict[str, Any], error: type[HeadwaterError], message: str
) -> None:
    with pytest.raises(error, match=message):
        simulated(**given)
