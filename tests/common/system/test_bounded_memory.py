"""Copies in RAM up to a limit, and beyond it in files."""

from __future__ import annotations

import mmap

import numpy as np
import torch

from headwater.common.system.bounded_memory import BoundedMemory, Bytes

DATA = np.arange(100, dtype=np.float32)


def is_in_file(copy: Bytes) -> bool:
    return copy.base is not None and isinstance(copy.base.obj, mmap.mmap)  # type: ignore[attr-defined]


def test_a_copy_beyond_the_limit_is_in_a_file_and_has_the_same_bytes() -> None:
    memory = BoundedMemory(2 * DATA.nbytes)
    copies = [memory.copy(DATA.data) for _ in range(4)]
    assert [is_in_file(copy) for copy in copies] == [False, False, True, True]
    assert all(copy.tobytes() == DATA.tobytes() for copy in copies)
    assert memory.ram_bytes == 2 * DATA.nbytes


def test_a_copy_that_nobody_refers_to_makes_room_for_another() -> None:
    memory = BoundedMemory(DATA.nbytes)
    first = memory.copy(DATA.data)
    values_P = torch.from_numpy(first.view(np.float32))
    del first
    assert is_in_file(memory.copy(DATA.data))  # the tensor refers to the first
    assert values_P.tolist() == DATA.tolist()
    del values_P
    assert not is_in_file(memory.copy(DATA.data))


def test_a_single_copy_may_be_larger_than_the_limit() -> None:
    memory = BoundedMemory(1)
    first = memory.copy(DATA.data)
    assert not is_in_file(first)
    assert is_in_file(memory.copy(DATA.data))


def test_a_copy_can_be_written_to_and_its_source_stays() -> None:
    memory, source = BoundedMemory(1), DATA.copy()
    for copy in (memory.copy(source.data), memory.copy(source.data)):
        copy[:] = 1
        assert source.tobytes() == DATA.tobytes() != copy.tobytes()
