"""An allocation beyond a bound fails; the process's own bound is no limit of the machine."""

from __future__ import annotations

import sys

import pytest
import torch

from headwater.client.memory.allocation_bound import bound_in_force, bounded
from headwater.client.memory.limits import MemoryLimits
from headwater.client.memory.peak_model import resident_bytes

MIB = 2**20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts so on Linux alone")


@LINUX
def test_an_allocation_beyond_the_bound_fails_and_one_within_it_does_not() -> None:
    with bounded(resident_bytes() + 256 * MIB):
        torch.empty(64 * MIB, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(512 * MIB, dtype=torch.uint8)
    torch.empty(512 * MIB, dtype=torch.uint8)


@LINUX
def test_an_inner_bound_changes_nothing_and_the_outer_one_ends_with_its_block() -> None:
    with bounded(resident_bytes() + 256 * MIB):
        outer = bound_in_force()
        assert outer is not None
        with bounded(1):
            assert bound_in_force() == outer
        assert bound_in_force() == outer
    assert bound_in_force() is None


def test_the_bound_is_no_limit_of_the_machine() -> None:
    """Else it would count as one of virtual memory, under which training is slower."""
    with bounded(resident_bytes() + 256 * MIB):
        sources = {limit.source for limit in MemoryLimits().all()}
    assert sources == {limit.source for limit in MemoryLimits().all()}


def test_without_a_limit_nothing_is_bounded() -> None:
    with bounded(None):
        assert bound_in_force() is None
