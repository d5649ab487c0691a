"""The check sees more than the first client: a loss over pairs, where that has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headwater
from headwater.client.device.hardware import ThisMachine
from headwater.client.trainer.task_trial import MAX_SURVEY_BATCH
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.training.sampler import SamplerState
from headwater.common.additivity.single_examples import NUM_TRIED
from headwater.common.errors import TaskNotAdditive
from headwater.common.messages import Plan


class Cox:
    """Cox's partial likelihood: each event's risk set is the batch. Client 0 has no event."""

    first_with_events = 1

    def new_model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(part)
        events = torch.ones(8) if part >= self.first_with_events else torch.zeros(8)
        inputs, times = (torch.rand(*shape, generator=random) for shape in ((8, 3), (8,)))
        return TensorDataset(inputs, times, events)

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, times, events = batch
        risks = model(inputs).squeeze(1)
        later = times[None, :] >= times[:, None]
        sums = torch.logsumexp(risks[None, :].masked_fill(~later, -torch.inf), 1)
        return ((sums - risks) * events).sum(), len(times)


class SeldomEvents(Cox):
    """None of the examples that the check looks at has an event."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random, number = torch.Generator().manual_seed(part), 2 * MAX_SURVEY_BATCH
        inputs, times = (torch.rand(*shape, generator=random) for shape in ((number, 3), (number,)))
        events = torch.ones(number)
        events[:NUM_TRIED] = 0
        events[np.random.default_rng(0).permutation(number)[:MAX_SURVEY_BATCH]] = 0
        return TensorDataset(inputs, times, events)


class Sorted(Cox):
    """Clients' data are sorted: only those of the last half have events."""

    first_with_events = 5


def test_a_loss_over_pairs_is_refused_though_the_first_half_of_the_clients_has_none() -> None:
    with pytest.raises(TaskNotAdditive, match="every example is paired with every other"):
        headwater.simulate(
            Sorted, clients=10, rounds=1, accumulation_steps=2, micro_batch_size=4, progress=False
        )


def test_a_loss_over_pairs_is_refused_though_the_first_client_has_none() -> None:
    with pytest.raises(TaskNotAdditive, match="every example is paired with every other"):
        headwater.simulate(
            Cox, clients=3, rounds=1, accumulation_steps=2, micro_batch_size=4, progress=False
        )


def test_a_loss_of_zero_everywhere_is_looked_at_again_in_the_first_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    spec = f"{__file__}:SeldomEvents"
    trainer = Trainer(spec, batch_norm=None, check_task=True)
    identity = Identity(name="device", data=None, part=0, num_parts=1)
    trainer.examples(identity)
    assert "could not be told, and is looked at again in the first round" in caplog.text
    plan = Plan(round=1, run_seed=0, model_version=0, quota=128, micro_batch_size=16)
    with pytest.raises(TaskNotAdditive, match="every example is paired with every other"):
        trainer.train(identity, ThisMachine(), plan, SamplerState())
