"""Rows of many devices: memory is bounded, and a cohort has all its rows at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from headwater.common.data.batches import UnsupportedBatch
from headwater.simulation.vectorised.example_rows import ExampleRows
from tests.tasks import TwoLayers, examples


def inputs_of(rows: ExampleRows, part: int, data: TensorDataset) -> torch.Tensor:
    start = rows.starts.get(part)
    if start is None:
        start = rows.add(part, data)
    return rows.take(torch.arange(start, start + len(data)).numpy())[0]


def test_rows_of_too_many_devices_are_dropped_and_fetched_again() -> None:
    data = {part: examples(3, seed=part) for part in range(6)}
    rows = ExampleRows(TwoLayers(), most_held=4)
    for cohort in ((0, 1, 2), (2, 3, 4), (2, 3), (0, 5), (5, 0, 1, 2, 3, 4)):
        rows.make_room(cohort)
        for part in cohort:
            assert torch.equal(inputs_of(rows, part, data[part]), data[part].tensors[0])
        assert set(cohort) <= rows.starts.keys()
    rows.make_room((0,))
    assert len(rows.starts) == 6  # device 0 has its rows
    rows.make_room((0, 7))
    assert not rows.starts


def test_rows_of_too_many_bytes_are_dropped() -> None:
    rows = ExampleRows(TwoLayers(), limit_bytes=100)
    rows.add(0, examples(50, seed=0))
    rows.make_room((1,))
    assert not rows.starts


class Named(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.names = ["inputs", "targets", "kinds"]

    def collate(self, given: list[Any]) -> dict[str, Tensor]:
        found = dict(zip(("inputs", "targets", "kinds"), default_collate(given), strict=True))
        return {name: found[name] for name in self.names}


def test_tensors_of_a_dict_are_taken_by_name_on_each_device() -> None:
    task, data = Named(), examples(3, seed=1)
    rows = ExampleRows(task)
    rows.add(0, examples(3))
    task.names.reverse()
    start = rows.add(1, data)
    batch = rows.batch(rows.take(np.arange(start, start + 3)))
    for name, expected in zip(("inputs", "targets", "kinds"), data.tensors, strict=True):
        assert torch.equal(batch[name], expected)
    task.names.pop()
    with pytest.raises(UnsupportedBatch, match="different forms"):
        rows.add(2, examples(3))
