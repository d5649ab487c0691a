"""Rows of many devices side by side: what is held is bounded, and a cohort is there as a whole."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from headwater.simulation.compute.example_rows import Packed
from tests.tasks import TwoLayers, examples


def rows_of(packed: Packed, part: int, data: TensorDataset) -> torch.Tensor:
    start = packed.starts.get(part)
    if start is None:
        start = packed.add(part, data)
    return packed.take(torch.arange(start, start + len(data)).numpy())[0]


def test_of_more_devices_than_may_be_held_all_are_dropped_and_fetched_again() -> None:
    data = {part: examples(3, seed=part) for part in range(6)}
    packed = Packed(TwoLayers(), most_held=4)
    for cohort in ((0, 1, 2), (2, 3, 4), (2, 3), (0, 5), (5, 0, 1, 2, 3, 4)):
        packed.make_room(cohort)
        for part in cohort:
            assert torch.equal(rows_of(packed, part, data[part]), data[part].tensors[0])
        assert set(cohort) <= packed.starts.keys()
    packed.make_room((0,))
    assert len(packed.starts) == 6  # all that is asked for is there
    packed.make_room((0, 7))
    assert not packed.starts


def test_what_takes_too_many_bytes_is_dropped_as_well() -> None:
    packed = Packed(TwoLayers(), limit_bytes=100)
    packed.add(0, examples(50, seed=0))
    packed.make_room((1,))
    assert not packed.starts
