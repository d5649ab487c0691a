"""Runs of one process in several threads: each has the values that it has alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import headwater


class Dropped:
    """A model with dropout, whose initial parameters and masks come from torch's generator."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 3))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(part)
        inputs = torch.randn(8, 4, generator=random)
        return TensorDataset(inputs, torch.randint(3, (8,), generator=random))

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


def trained(seed: int) -> Tensor:
    run = headwater.simulate(
        Dropped,
        clients=4,
        rounds=8,
        accumulation_steps=2,
        micro_batch_size=4,
        seed=seed,
        threads=1,
        progress=False,
    )
    return nn.utils.parameters_to_vector(run.model.parameters()).detach()


def test_runs_in_threads_give_what_each_gives_alone_and_say_that_they_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alone = [trained(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(trained, range(4)))
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)
    assert "another run of this process is going on" in caplog.text
