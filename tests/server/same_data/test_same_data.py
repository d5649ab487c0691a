"""Copies of data and mixed divisions are said once, with what to do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headwater
from headwater.common.messages import DataShare
from headwater.server.same_data.same_data import other_divisions, other_tasks, same_examples

COPY, OTHER = "0" * 16, "1" * 16


def share(part: int, num_parts: int, digest: str | None = None) -> DataShare:
    return DataShare(part=part, num_parts=num_parts, digest=digest)


def test_the_remedy_of_a_copy_depends_on_where_it_comes_from() -> None:
    same_part = {"a": share(0, 2, COPY), "b": share(0, 2, COPY), "c": share(1, 2, OTHER)}
    assert list(same_examples(same_part)) == [COPY]
    assert "a and b have the same examples" in same_examples(same_part)[COPY]
    assert "--part" in same_examples(same_part)[COPY]
    ignored = {name: share(part, 9, COPY) for part, name in enumerate("abcde")}
    assert "a, b, c and 2 more" in same_examples(ignored)[COPY]
    assert "train_examples use part" in same_examples(ignored)[COPY]
    assert not same_examples({"a": None, "b": None, "c": share(0, 1), "d": share(0, 1)})


def test_parts_of_another_division_are_named() -> None:
    mixed = {"a": share(0, 4), "b": share(1, 3), "c": share(0, 1), "d": share(2, 4)}
    (text,) = other_divisions(mixed).values()
    assert "a and d have parts of 4, and b of 3" in text
    assert "same --num-parts" in text
    assert not other_divisions({"a": share(0, 4), "b": share(1, 4), "c": share(0, 1), "d": None})


def test_another_code_of_the_task_is_named_with_its_devices() -> None:
    own, swapped = f"task.py:Mine {'a' * 64}", f"swapped.py:Mine {'b' * 64}"
    moved = f"other/task.py:Mine {'a' * 64}"  # the same file elsewhere
    (text,) = other_tasks({"a": own, "b": swapped, "c": moved}, own).values()
    assert text.startswith("b: the task there is swapped.py:Mine bbbbbbbbbbbb")
    assert "aaaaaaaaaaaa" in text
    assert not other_tasks({"a": own, "c": moved}, own)


class Whole:
    """A task that gives all its examples to each client."""

    def new_model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return TensorDataset(torch.arange(60.0).reshape(20, 3))

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return model(batch[0]).square().sum(), len(batch[0])


class Divided(Whole):
    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return TensorDataset(torch.arange(60.0).reshape(20, 3)[part::num_parts])


@pytest.mark.parametrize(("task", "number"), [(Whole, 1), (Divided, 0)])
def test_a_simulated_task_that_ignores_part_is_said_once(
    task: type[Whole], number: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    headwater.simulate(task, clients=4, rounds=3, seed=1, threads=1, progress=False)
    found = [one for one in caplog.messages if "have the same examples" in one]
    assert len(found) == number
