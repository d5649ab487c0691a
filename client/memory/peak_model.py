"""Predicts the peak memory of micro-batches, and measures the peak of the process.

The peak is modelled as base + each x size. The probe fits the line
(``headwater.client.trainer.probe``), and every later micro-batch corrects it, upwards at once and
downwards slowly: a kill by the kernel cannot be caught, only predicted.

An allocator keeps much of the memory that was freed (glibc up to hundreds of MB, for a transformer
in micro-batches of 256), so a small micro-batch after a large one peaks as high as the large one.
A peak says something about its own size only by as much as it rose above the resident memory at its
micro-batch's start. Memory freed by one size rarely suits another: a CNN in micro-batches of 30 to
84 examples in turn peaked at 525 MB, where 84 alone take 400. Close to the limit freed memory is
therefore returned before the size changes, which takes a tenth of a micro-batch's time.

Pages of mapped files, such as a data set in a memory map, are no memory here: the kernel drops them
when memory is short. Code is mapped from files too, and is needed all the time: so that many bytes
of them count (``CODE_BYTES``).
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from headwater.common.estimates.linear_fit import Line
from headwater.common.system.heap import keep_mmap_threshold, release_freed_memory
from headwater.common.system.portability import optional_module

# Share of the limit that may be filled. The planner plans for 0.8 (plan.memory_fraction), so a
# prediction may be wrong by half of the rest before the device does less than its quota.
GUARD_SHARE = 0.9

# Of a large limit, a prediction's error is a share of what is left beside the parameters.
GUARD_BYTES = 64 << 20

# The share of an overestimate that is corrected per micro-batch.
RELAXED = 1 / 16

# The kernel counts pages in batches of some dozens per core, huge pages have 2 MiB each, and equal
# passes of a small model leave the allocator's heap larger or smaller by up to this.
NOISE_BYTES = 4 << 20

# Linux takes up to 40 us to reset its mark of the peak, a fifth of a micro-batch of a small model.
# Micro-batches of one size that begin within this time share one mark.
MARK_SECONDS = 0.01

# Freed memory is returned at most this often: it takes 5 to 20 ms, and the pages are faulted in
# again.
GIVE_BACK_EVERY_SECONDS = 1.0

LARGEST_SIZE = 2**31  # of a plan's micro-batch

# Code of Python, torch, gRPC, Flower and scikit-learn that is resident after a pass: 133 MB with
# torch 2.13 on x86-64.
CODE_BYTES = 160 << 20

# Besides the activations that autograd keeps, their gradients and temporaries live for a while:
# measured peaks grew by 1.3 (transformer of 2 blocks) to 2.2 (CNN) times what autograd keeps.
WORKING_FACTOR = 2.0


def guarded_bytes(limit_bytes: float, rest_bytes: float) -> float:
    """Return how much of a limit a predicted peak may fill; ``rest_bytes`` are there in any case.

    ``GUARD_SHARE`` of it; of a limit above 640 MiB all but ``GUARD_BYTES``, or all but a tenth of
    what is left beside ``rest_bytes`` if that is more.
    """
    beside = max(GUARD_BYTES, (1 - GUARD_SHARE) * (limit_bytes - rest_bytes))
    return max(limit_bytes * GUARD_SHARE, limit_bytes - beside)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakModel:
    """A line of peak bytes in the micro-batch size, and what it was learned from."""

    line: Line
    # What autograd keeps for each example; no peak is lower.
    least_each: float
    # The largest size measured; beyond it the line is an extrapolation.
    largest_size: float
    # Resident bytes without freed memory when the line was fitted, and the growth since.
    rest_bytes: int
    surplus_bytes: float = 0.0

    @property
    def now(self) -> Line:
        """The line with the memory that the process has gained since it was fitted."""
        return Line(base=self.line.base + self.surplus_bytes, each=self.line.each)

    def updated(
        self, *, size: float, held_size: float, begun_bytes: int, peak_bytes: int
    ) -> PeakModel:
        """Correct the line by one micro-batch's peak.

        A peak above the line corrects it at once. If the micro-batch itself caused the peak, the
        slope is too low; at sizes below the largest one, more is resident instead. If as much was
        resident before, memory freed by a micro-batch of up to ``held_size`` explains part of it,
        and only the rest counts. Of a peak below the line a sixteenth of the difference counts, and
        nothing within the noise.
        """
        miss = peak_bytes - self.now.at(size)
        if -NOISE_BYTES <= miss <= 0:
            return self
        if miss > 0 and peak_bytes <= begun_bytes + NOISE_BYTES:
            unexplained = max(peak_bytes - self.now.at(max(size, held_size)), 0.0)
            return replace(self, surplus_bytes=self.surplus_bytes + unexplained)
        if miss < 0:
            miss *= RELAXED
        if size < self.largest_size or (miss < 0 and self.surplus_bytes > 0):
            return replace(self, surplus_bytes=max(self.surplus_bytes + miss, 0.0))
        each = max(self.line.each + miss / size, self.least_each)
        return replace(self, line=replace(self.line, each=each), largest_size=size)

    def at_rest(self, rest_bytes: int) -> PeakModel:
        """Set the surplus from the resident bytes after freed memory was returned."""
        return replace(self, surplus_bytes=float(max(rest_bytes - self.rest_bytes, 0)))

    def with_checkpointing(self, each: float, rest_bytes: int) -> PeakModel:
        """Return the line for a predicted ``each`` bytes per example, if that is less.

        The base is at least what is resident now. No size was measured like this; the next peaks
        correct the line.
        """
        if each >= self.line.each:
            return self
        line = Line(base=max(self.line.base, rest_bytes), each=each)
        return PeakModel(line=line, least_each=0.0, largest_size=1, rest_bytes=rest_bytes)

    def fitting(self, limit_bytes: float) -> float:
        """Return the largest size whose peak stays within the limit; 0 if nothing fits."""
        room = max(limit_bytes - self.now.base, 0.0)
        return min(room / self.line.each, LARGEST_SIZE) if self.line.each else LARGEST_SIZE


class ProcessMemory:
    """The memory of this process; implements ``headwater.client.device.interfaces.Memory``."""

    def __init__(
        self,
        limit_bytes: Callable[[], int | None] = lambda: None,
        *,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self.known: PeakModel | None = None
        self._limit_bytes = limit_bytes
        self._seconds = seconds
        self._peak = PeakMeter()
        self._begun_bytes = 0
        self._marked_size = 0.0  # of the micro-batches that share the mark of the peak
        self._mark_again_at = 0.0
        self._largest_begun = 0.0  # since freed memory was returned
        self._last_size = 0.0  # since then too
        self._last_peak_bytes = 0
        self._give_back_at = 0.0
        self._held_bytes = 0
        self._checkpointed_bytes: float | None = None

    @property
    def line(self) -> Line | None:
        return None if self.known is None else self.known.now

    def limit_bytes(self) -> int | None:
        return self._limit_bytes()

    def fitting(self, size: float) -> float | None:
        """See ``Memory``; ``guarded_bytes`` of the limit may be filled.

        Freed memory is returned to the machine, and the resident bytes are read again, before the
        answer becomes smaller than a recent micro-batch, and when another size would exceed the
        limit if it could reuse nothing that the last one freed.
        """
        known = self.known
        if known is None or (limit_bytes := self._limit_bytes()) is None:
            return None
        room = guarded_bytes(limit_bytes, known.now.base)
        fitting = known.fitting(room)
        is_less = fitting < self._largest_begun and self._seconds() >= self._give_back_at
        is_other = 0 < self._last_size != size and (
            self._last_peak_bytes + known.now.each * size > room
        )
        if is_less or is_other:
            self._give_back()
            self._give_back_at = self._seconds() + GIVE_BACK_EVERY_SECONDS
            self.known = known = known.at_rest(resident_bytes() + self._held_bytes)
            fitting = known.fitting(guarded_bytes(limit_bytes, known.now.base))
        return fitting

    def begin(self, size: float) -> None:
        """See ``Memory``; the peak is that since an earlier one of this size, just before."""
        now = self._seconds()
        if size != self._marked_size or now >= self._mark_again_at:
            self._peak.reset()
            self._begun_bytes = self._peak.peak_bytes()
            self._marked_size, self._mark_again_at = size, now + MARK_SECONDS
        self._largest_begun = max(self._largest_begun, size)

    def end(self, size: float) -> int:
        peak_bytes = self._peak.peak_bytes()
        self._last_size, self._last_peak_bytes = size, peak_bytes
        if self.known is not None:
            self.known = self.known.updated(
                size=size,
                held_size=self._largest_begun,
                begun_bytes=self._begun_bytes,
                peak_bytes=peak_bytes,
            )
        return peak_bytes

    def expect(self, *, rest_bytes: int, peak_bytes: int) -> None:
        each = float(peak_bytes - rest_bytes)
        self.known = PeakModel(
            line=Line(base=float(rest_bytes), each=each),
            least_each=0.0,
            largest_size=1,
            rest_bytes=rest_bytes,
        )
        self._checkpointed_bytes = each

    @contextlib.contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """See ``Memory``. What is allocated of the bytes is not known: none is taken to be."""
        self._hold(num_bytes)
        before, given_back_at = self._held_bytes, self._give_back_at
        self._held_bytes = before + num_bytes
        try:
            yield
        finally:
            self._held_bytes = before
            self._hold(-num_bytes)
            if self._give_back_at != given_back_at and self.known is not None:
                self._give_back()  # the resident bytes were read while they were held
                self.known = self.known.at_rest(resident_bytes() + before)

    def _hold(self, num_bytes: int) -> None:
        if self.known is not None:
            surplus = max(self.known.surplus_bytes + num_bytes, 0.0)
            self.known = replace(self.known, surplus_bytes=surplus)

    def use_checkpointing(self, bytes_per_example: float | None) -> None:
        keep_mmap_threshold()
        self._give_back()
        if self.known is None or bytes_per_example is None:
            return
        if bytes_per_example != self._checkpointed_bytes:
            self.known = self.known.with_checkpointing(bytes_per_example, resident_bytes())
            self._checkpointed_bytes = bytes_per_example

    def _give_back(self) -> None:
        release_freed_memory()
        # No freed memory is held any more.
        self._largest_begun = self._last_size = self._marked_size = 0.0


# The peak is the process's in both; reading the thread's own waits for no other thread.
resource = optional_module("resource")
_RUSAGE = getattr(resource, "RUSAGE_THREAD", None) or getattr(resource, "RUSAGE_SELF", None)
PAGE_BYTES = mmap.PAGESIZE
_RUSAGE_UNIT = 1 if sys.platform == "darwin" else 1024


class PeakMeter:
    """Measures the process's peak resident memory since construction, or since ``reset``.

    Linux resets its mark when 5 is written to /proc/self/clear_refs; elsewhere the mark covers the
    process's whole life. A process inherits its parent's mark as a lower bound of ``getrusage``. If
    that bound is above its own peak, /proc is read instead, which takes longer. Windows has neither
    and gives the peak of the process's whole life.

    The kernel knows no peak without file pages. An example is read before it is computed with, so
    those that are resident when the peak is read are taken off.
    """

    def __init__(self) -> None:
        self._highest_bytes = self._droppable_bytes = 0
        self._can_reset = self._is_bounded = False
        with contextlib.suppress(OSError):
            _reset_peak()
            self._can_reset = True
            self._is_bounded = resource is None or self._highest() > 1.1 * status_bytes("VmHWM")

    def reset(self) -> None:
        """Set the peak to what is resident now."""
        if self._can_reset:
            _reset_peak()

    def peak_bytes(self) -> int:
        """Return the peak since the last reset."""
        highest = self._highest()
        if highest != self._highest_bytes:  # reading the file pages takes 8 us
            self._highest_bytes, self._droppable_bytes = highest, droppable_bytes()
        return highest - self._droppable_bytes

    def _highest(self) -> int:
        if self._is_bounded:
            return status_bytes("VmHWM")
        if resource is None:
            import psutil  # only on Windows: it costs an idle device 1 MB

            used = psutil.Process().memory_info()
            return int(getattr(used, "peak_wset", used.rss))
        return int(resource.getrusage(_RUSAGE).ru_maxrss) * _RUSAGE_UNIT


def _reset_peak() -> None:
    """Reset Linux's mark.

    The file is opened each time, for 5 us: a descriptor that is kept would belong to the parent's
    memory in a forked process, and a destructor would close it again after whoever closed it first.
    """
    with open("/proc/self/clear_refs", "wb", buffering=0) as file:
        file.write(b"5")


def resident_bytes() -> int:
    """Return the resident memory of the process, without file pages that can be dropped."""
    try:
        return status_bytes("VmRSS") - droppable_bytes()
    except OSError:
        import psutil  # only outside Linux: it costs an idle device 1 MB

        return psutil.Process().memory_info().rss


def droppable_bytes() -> int:
    """Return the resident file pages of the process beyond ``CODE_BYTES``; 0 outside Linux."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            shared = int(file.read().split()[2]) * PAGE_BYTES
        if shared <= CODE_BYTES:
            return 0
        return max(status_bytes("RssFile") - CODE_BYTES, 0)  # shared memory is not dropped
    except OSError:
        return 0


def status_bytes(name: str) -> int:
    """Return a size in /proc/self/status.

    Raises:
        OSError: the system is not Linux, or a sandbox or an old kernel that has no such row.
    """
    with open("/proc/self/status", encoding="utf-8") as status:
        rows = dict(line.split(":", 1) for line in status)
    if name not in rows:
        raise OSError(f"/proc/self/status has no row {name}")
    return int(rows[name].split()[0]) * 1024
