"""Rows of many devices: memory is bounded, and a cohort has all its rows at once."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

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
