"""A client without a usable example is named once, and not in each round."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import headwater
from tests.python_tasks import Signs


class OneWithoutData(Signs):
    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        found = super().train_examples(data=data, part=part, num_parts=num_parts)
        inputs, *rest = found.tensors
        return TensorDataset(torch.full_like(inputs, torch.nan) if part else inputs, *rest)


def test_a_client_that_can_train_on_nothing_is_named_once_with_its_quota_and_a_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        run = headwater.simulate(
            OneWithoutData,
            clients=2,
            rounds=3,
            effective_batch_size=8,
            check=False,
            progress=False,
        )
    assert all("EmptyUpdate" in row.refused["1"] for row in run.history)
    [line] = [text for text in caplog.messages if "could train on none of" in text]
    assert line.startswith("round 1: 1 could train on none of")
    assert "--effective-batch-size" in line
