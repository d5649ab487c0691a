"""The peak memory of micro-batches: measured, learned and predicted."""

from __future__ import annotations

import math
import mmap
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.memory.peak_model import (
    CODE_BYTES,
    GIVE_BACK_EVERY_SECONDS,
    GUARD_BYTES,
    GUARD_SHARE,
    MARK_SECONDS,
    NOISE_BYTES,
    RELAXED,
    PeakMeter,
    PeakModel,
    ProcessMemory,
    resident_bytes,
    status_bytes,
)
from headwater.common.estimates.linear_fit import Line
from headwater.common.system.heap import release_freed_memory
from headwater.common.user_code.failures import is_allocation_failure

MIB = 2**20


def peaks(
    *, base: float = 300 * MIB, each: float = MIB, largest_size: int = 64, surplus: float = 0
) -> PeakModel:
    return PeakModel(
        line=Line(base=base, each=each),
        least_each=each / 2,
        largest_size=largest_size,
        rest_bytes=int(base),
        surplus_bytes=surplus,
    )


# Measured on this process.


def test_a_size_that_the_system_does_not_tell_is_a_system_error() -> None:
    """A sandbox or an old kernel lacks some, and a device there trains all the same."""
    with pytest.raises(OSError, match=r"/proc/self/status"):
        status_bytes("VmNothing")


def test_the_peak_is_the_largest_resident_memory_since_the_reset() -> None:
    size = 64 * MIB
    peak = PeakMeter()
    before = peak.peak_bytes()
    held = torch.ones(size // 4)
    del held
    assert before + size - NOISE_BYTES <= peak.peak_bytes() <= before + size + NOISE_BYTES
    release_freed_memory()  # what a heap keeps is held as well
    peak.reset()
    assert peak.peak_bytes() <= before + NOISE_BYTES


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="file pages are known on Linux")
def test_pages_of_a_mapped_file_are_neither_resident_memory_nor_a_peak(tmp_path: Path) -> None:
    size = 3 * CODE_BYTES
    with (tmp_path / "data.bin").open("w+b") as file:
        file.truncate(size)
        peak, before = PeakMeter(), resident_bytes()
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
            assert not any(data[:: mmap.PAGESIZE])
            if status_bytes("RssFile") < size:
                pytest.skip("the temporary folder is in memory")
            gained = max(resident_bytes(), peak.peak_bytes()) - before
    assert gained <= CODE_BYTES + NOISE_BYTES


def test_a_meter_keeps_no_descriptor_that_a_forked_process_would_inherit() -> None:
    before = os.listdir("/proc/self/fd")
    peak = PeakMeter()
    peak.reset()
    assert os.listdir("/proc/self/fd") == before


def test_the_peak_of_a_micro_batch_is_measured_from_begin_to_end() -> None:
    now = [1.0]
    memory = ProcessMemory(seconds=lambda: now[0])
    size = 64 * MIB
    memory.begin(1)
    memory.end(1)
    torch.ones(size // 4)
    before = resident_bytes()
    now[0] += MARK_SECONDS
    memory.begin(1)
    torch.ones(size // 8)
    assert memory.end(1) <= before + size // 2 + NOISE_BYTES


def test_short_micro_batches_of_one_size_share_a_mark_of_the_peak() -> None:
    memory = ProcessMemory(seconds=lambda: 1.0)
    release_freed_memory()  # of tests before: it would be used again, and no peak seen
    before, size = resident_bytes(), 64 * MIB
    memory.begin(1)
    torch.ones(size // 4)
    memory.end(1)
    release_freed_memory()
    memory.begin(1)
    assert memory.end(1) > before + size // 2
    memory.begin(2)
    assert memory.end(2) < before + size // 2, "another size has a mark of its own"


def test_freed_memory_is_returned_before_the_size_is_reduced() -> None:
    """Ten thousand pieces of 8 KiB below one that stays: the heap cannot shrink by itself."""
    limit = [2**50]
    memory = ProcessMemory(lambda: limit[0])
    memory.known = peaks(base=resident_bytes())
    memory.begin(64)
    pieces = [torch.ones(2048) for _ in range(10_000)]
    pin = torch.ones(2048)
    del pieces
    memory.end(64)
    held = resident_bytes()
    assert memory.fitting(1) is not None
    assert resident_bytes() >= held - NOISE_BYTES, "nothing is given back while there is room"
    limit[0] = 0
    assert (memory.fitting(1) or 0.0) < 1
    assert resident_bytes() <= held - 10_000 * 8192 * 3 // 4
    assert pin.numel()


def test_nothing_is_predicted_without_a_line_or_a_limit() -> None:
    memory = ProcessMemory(lambda: MIB)
    assert (memory.line, memory.fitting(1)) == (None, None)
    unbounded = ProcessMemory()
    unbounded.known = peaks()
    assert unbounded.fitting(1) is None


def test_a_lowered_limit_lowers_what_fits() -> None:
    limit = [600 * MIB]
    memory = ProcessMemory(lambda: limit[0])
    memory.known = peaks(base=300 * MIB, each=MIB)
    assert memory.fitting(1) == pytest.approx(600 * GUARD_SHARE - 300)
    limit[0] = 400 * MIB
    assert memory.fitting(1) == pytest.approx(400 * GUARD_SHARE - 300)
    limit[0] = 300 * MIB
    assert memory.fitting(1) == 0


def test_memory_is_returned_at_most_once_a_second() -> None:
    now = [100.0]
    memory = ProcessMemory(lambda: 300 * MIB, seconds=lambda: now[0])
    memory.known = peaks(base=299 * MIB, each=MIB)
    rests = []
    for now[0] in (100.0, 100.5, 100.0 + GIVE_BACK_EVERY_SECONDS):
        memory.known = replace(memory.known, surplus_bytes=-1.0)
        memory.begin(8)
        memory.fitting(1)
        rests.append(memory.known.surplus_bytes != -1.0)
    assert rests == [True, False, True]


def gave_back(memory: ProcessMemory, num_examples: int) -> bool:
    assert memory.known is not None
    memory.known = replace(memory.known, surplus_bytes=-1.0)
    memory.fitting(num_examples)
    return memory.known.surplus_bytes != -1.0


def limit_with_room(num_bytes: int) -> int:
    """Return the limit of which a prediction may fill so many bytes, most of them held already."""
    return int(min(num_bytes / GUARD_SHARE, num_bytes + GUARD_BYTES))


def test_close_to_the_limit_memory_is_returned_before_the_size_changes() -> None:
    held = resident_bytes()
    limit = [limit_with_room(held + 64 * MIB)]
    memory = ProcessMemory(lambda: limit[0])
    memory.known = peaks(base=held, each=MIB)
    assert not gave_back(memory, 48), "nothing was freed yet"
    memory.begin(48)
    memory.end(48)
    assert not gave_back(memory, 48), "the same size uses the same memory"
    assert not gave_back(memory, 32), "this much more is within the limit"
    limit[0] = limit_with_room(held + 60 * MIB)
    memory._last_peak_bytes = held + 48 * MIB
    assert gave_back(memory, 32)
    assert not gave_back(memory, 32), "there is nothing left to give back"


# Learned, as pure functions.


@given(
    st.integers(1, 512),
    st.integers(1, 512),
    st.integers(0, 2000 * MIB),
    st.floats(0, 300 * MIB),
)
def test_a_higher_peak_raises_the_prediction_at_once(
    size: int, largest: int, peak: int, surplus: float
) -> None:
    known = peaks(largest_size=largest, surplus=surplus)
    found = known.updated(size=size, held_size=size, begun_bytes=0, peak_bytes=peak)
    assert found.now.at(size) >= peak - 1
    assert found.line.each >= known.least_each
    assert found.surplus_bytes >= 0
    assert found.largest_size in (known.largest_size, size)


@given(st.integers(1, 512), st.integers(0, 64), st.integers(0, 2000 * MIB))
def test_a_lower_peak_lowers_the_prediction_slowly_and_never_below_the_peak(
    size: int, surplus: int, peak: int
) -> None:
    known = peaks(surplus=surplus * MIB)
    expected = known.now.at(size)
    found = known.updated(size=size, held_size=size, begun_bytes=peak, peak_bytes=peak)
    if peak < expected:
        assert peak - 1 <= found.now.at(size) <= expected
        assert expected - found.now.at(size) <= RELAXED * (expected - peak) + 1


def test_memory_freed_by_a_larger_micro_batch_raises_no_prediction() -> None:
    known = peaks(base=300 * MIB, each=MIB, largest_size=64)
    held = int(known.now.at(64))
    assert known.updated(size=1, held_size=64, begun_bytes=held, peak_bytes=held) == known


def test_only_resident_memory_that_no_micro_batch_explains_raises_the_base() -> None:
    known = peaks(base=300 * MIB, each=MIB, largest_size=64)
    held = int(known.now.at(64)) + 100 * MIB
    found = known.updated(size=1, held_size=64, begun_bytes=held, peak_bytes=held)
    assert found.surplus_bytes == pytest.approx(100 * MIB)


def test_one_high_peak_decays_by_a_sixteenth_per_micro_batch() -> None:
    known = peaks(largest_size=64)
    usual = int(known.now.at(32))
    found = known.updated(size=32, held_size=32, begun_bytes=usual, peak_bytes=usual + 500 * MIB)
    count = math.ceil(math.log(NOISE_BYTES / (500 * MIB)) / math.log(1 - RELAXED))
    for _ in range(count):
        found = found.updated(size=32, held_size=32, begun_bytes=usual, peak_bytes=usual)
    assert usual <= found.now.at(32) <= usual + NOISE_BYTES


def test_a_larger_size_corrects_the_slope_and_a_smaller_one_the_base() -> None:
    known = peaks(base=300 * MIB, each=MIB, largest_size=64)
    steeper = known.updated(size=128, held_size=128, begun_bytes=0, peak_bytes=556 * MIB)
    assert steeper.line == Line(base=300 * MIB, each=2 * MIB)
    fuller = known.updated(size=32, held_size=32, begun_bytes=0, peak_bytes=364 * MIB)
    assert (fuller.line, fuller.surplus_bytes) == (known.line, 32 * MIB)


def test_resident_memory_after_returning_freed_memory_replaces_the_surplus() -> None:
    known = peaks(base=300 * MIB, surplus=200 * MIB)
    assert known.at_rest(310 * MIB).surplus_bytes == 10 * MIB
    assert known.at_rest(290 * MIB).surplus_bytes == 0


def test_with_checkpointing_the_prediction_applies_until_a_peak_corrects_it() -> None:
    known = peaks(base=300 * MIB, each=4 * MIB, surplus=100 * MIB)
    relieved = known.with_checkpointing(MIB, rest_bytes=310 * MIB)
    assert relieved.now == Line(base=310 * MIB, each=MIB)
    peak = int(relieved.now.at(8)) + 80 * MIB
    learned = relieved.updated(size=8, held_size=8, begun_bytes=0, peak_bytes=peak)
    assert learned.now == Line(base=310 * MIB, each=11 * MIB)


def test_checkpointing_that_saves_nothing_changes_no_prediction() -> None:
    known = peaks(each=MIB)
    assert known.with_checkpointing(MIB, rest_bytes=0) == known


@dataclass
class Allocator:
    """A process whose C library keeps all freed memory until it is told to return it."""

    rest: int
    each: int
    fragments: float
    kept: int = 0

    def run(self, size: int, noise: float) -> tuple[int, int]:
        """Return what was resident at the begin, and the peak."""
        begun = self.rest + self.kept
        self.kept = max(self.kept, int(size * self.each * (1 + self.fragments * noise)))
        return begun, self.rest + self.kept


RUNS = st.lists(st.tuples(st.integers(1, 256), st.floats(0, 1)), min_size=1, max_size=60)


@given(RUNS)
def test_no_sequence_of_sizes_moves_a_correct_line(run: list[tuple[int, float]]) -> None:
    """Small micro-batches after large ones peak as high; one example does not look huge."""
    process = Allocator(rest=300 * MIB, each=MIB, fragments=0)
    known, held = peaks(base=300 * MIB, each=MIB, largest_size=1), 0
    for size, noise in run:
        begun, peak = process.run(size, noise)
        held = max(held, size)
        known = known.updated(size=size, held_size=held, begun_bytes=begun, peak_bytes=peak)
        assert known.now == Line(base=300 * MIB, each=MIB)


@given(RUNS, st.floats(0, 0.2), st.floats(0.5, 3))
def test_no_peak_exceeds_the_line_corrected_by_it(
    run: list[tuple[int, float]], fragments: float, believed: float
) -> None:
    process = Allocator(rest=300 * MIB, each=MIB, fragments=fragments)
    known, held = peaks(base=300 * MIB, each=believed * MIB, largest_size=64), 0
    for size, noise in run:
        begun, peak = process.run(size, noise)
        held = max(held, size)
        known = known.updated(size=size, held_size=held, begun_bytes=begun, peak_bytes=peak)
        assert known.now.at(held) >= peak - NOISE_BYTES
        assert known.line.each <= max(1 + fragments, believed) * MIB * (1 + 1e-9)


# Foreseen.


@given(
    st.floats(0, 1e12),
    st.floats(1, 1e9),
    st.floats(0, 2e12),
)
def test_fitting_is_the_largest_size_within_the_limit(
    base: float, each: float, room: float
) -> None:
    known = peaks(base=base, each=each)
    size = known.fitting(room)
    rounding = 1e-9 * (base + room + 1.0)
    assert size == 0 or size == 2**31 or known.now.at(size) <= room + rounding
    assert size == 2**31 or known.now.at(size) >= room - rounding


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_allocation_failures_are_recognised(error: Exception, is_one: bool) -> None:
    assert is_allocation_failure(error) is is_one
