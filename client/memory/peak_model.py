"""What micro-batches take of the process's memory: measured, fitted to a line, and foreseen.

The peak of the process is base + each x size. The probe lays the line (``client.training.probe``), and every
micro-batch after it corrects the line, upwards at once and downwards slowly: a kill by the kernel
cannot be caught, it can only be foreseen.

An allocator keeps much of what was freed (glibc up to hundreds of MB, for a transformer in
micro-batches of 256), so a small micro-batch behind a large one peaks as high as the large one did.
What a peak says of its own size it says only in so far as it rose above what was resident when its
micro-batch began. And what one size left free rarely suits another: a CNN in micro-batches of 30 to
84 examples by turns peaked at 525 MB, where 84 alone take 400. Close to the limit freed memory is
given back before the size changes, which takes a tenth of the time of a micro-batch.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from headwater.common.stats.linear_fit import Line
from headwater.common.system.heap import give_back, keep_mmap_threshold

# Of the limit; the planner fills 0.8 of it (plan.memory_fraction), and what was foreseen may be off
# by the half of the rest before the device takes less than it was asked for.
GUARD_SHARE = 0.9

# How much of what a line foresees too much is taken off it per micro-batch.
RELAXED = 1 / 16

# The kernel counts pages in batches of some dozens per core, huge pages come at 2 MiB each, and
# equal passes of a small model leave the allocator's heap up to so much larger or smaller.
NOISE_BYTES = 4 << 20

# Freed memory is given back at most so often: it takes 5 to 20 ms, and the pages come back by
# faults.
GIVE_BACK_EVERY_SECONDS = 1.0

LARGEST_SIZE = 2**31  # of a plan's micro-batch

# Autograd's saved activations are not all: their gradients and temporaries live a while too. Measured
# peaks grew by 1.3 (transformer of 2 blocks) to 2.2 (CNN) times what autograd keeps.
WORKING_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakModel:
    """What is known of the peaks: a line in the size, and what it was learned from."""

    line: Line
    # Autograd keeps so much for each example; no peak is lower.
    least_each: float
    # Nothing larger was ever measured: beyond it the line is an extrapolation.
    largest_size: int
    # Resident without freed memory when the line was laid, and beyond that since.
    rest_bytes: int
    surplus_bytes: float = 0.0

    @property
    def now(self) -> Line:
        """The line as it stands, with what the process holds beside since it was laid."""
        return Line(base=self.line.base + self.surplus_bytes, each=self.line.each)

    def learned(self, *, size: int, held_size: int, begun_bytes: int, peak_bytes: int) -> PeakModel:
        """Correct the line by one micro-batch's peak.

        A peak above the line is believed at once. Where the micro-batch itself took it, the slope
        is too low, or, at sizes below the largest, more is resident besides. Where as much was
        resident before, memory freed by a micro-batch of up to ``held_size`` explains some of it,
        and only the rest counts. Of what a peak is below the line a sixteenth is believed, and
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

    def rested(self, rest_bytes: int) -> PeakModel:
        """Take note of what is resident between micro-batches when freed memory is given back."""
        return replace(self, surplus_bytes=float(max(rest_bytes - self.rest_bytes, 0)))

    def relieved(self, each: float, rest_bytes: int) -> PeakModel:
        """Return the line where an example takes ``each`` by prediction, if that is less.

        The base is at least what is resident now. Nothing of any size was measured so: the next
        peaks decide.
        """
        if each >= self.line.each:
            return self
        line = Line(base=max(self.line.base, rest_bytes), each=each)
        return PeakModel(line=line, least_each=0.0, largest_size=1, rest_bytes=rest_bytes)

    def fitting(self, limit_bytes: float) -> int:
        """Return the largest size whose peak stays within the bytes; 0 where not even one does."""
        room = limit_bytes - self.now.base
        if room < self.line.each:
            return 0
        return int(min(room / self.line.each, LARGEST_SIZE)) if self.line.each else LARGEST_SIZE


class ProcessMemory:
    """The memory of this process."""

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
        self._largest_begun = 0  # since memory was given back
        self._last_size = 0  # since then too
        self._last_peak_bytes = 0
        self._give_back_at = 0.0
        self._relieved_to: float | None = None

    @property
    def line(self) -> Line | None:
        return None if self.known is None else self.known.now

    def limit_bytes(self) -> int | None:
        return self._limit_bytes()

    def fitting(self, num_examples: int) -> int | None:
        """See ``client.training.context.Memory``; ``GUARD_SHARE`` of the limit may be filled.

        Freed memory is given back to the machine, and what then is resident is looked at anew,
        before the answer is less than what was taken lately, and where another size would overstep
        if it could use nothing of what the last one left free.
        """
        known, limit_bytes = self.known, self._limit_bytes()
        if known is None or limit_bytes is None:
            return None
        most_bytes = limit_bytes * GUARD_SHARE
        size = known.fitting(most_bytes)
        is_less = size < self._largest_begun and self._seconds() >= self._give_back_at
        is_other = 0 < self._last_size != num_examples and (
            self._last_peak_bytes + known.now.each * num_examples > most_bytes
        )
        if is_less or is_other:
            give_back()
            self._largest_begun = self._last_size = 0  # nothing freed is held any more
            self._give_back_at = self._seconds() + GIVE_BACK_EVERY_SECONDS
            self.known = known = known.rested(resident_bytes())
            size = known.fitting(most_bytes)
        return size

    def begin(self, num_examples: int) -> None:
        self._peak.reset()
        self._begun_bytes = self._peak.peak_bytes()
        self._largest_begun = max(self._largest_begun, num_examples)

    def end(self, num_examples: int) -> int:
        peak_bytes = self._peak.peak_bytes()
        self._last_size, self._last_peak_bytes = num_examples, peak_bytes
        if self.known is not None:
            self.known = self.known.learned(
                size=num_examples,
                held_size=self._largest_begun,
                begun_bytes=self._begun_bytes,
                peak_bytes=peak_bytes,
            )
        return peak_bytes

    def use_checkpointing(self, bytes_per_example: float | None) -> None:
        """See ``client.training.context.Memory``."""
        keep_mmap_threshold()
        give_back()
        self._largest_begun = self._last_size = 0
        if self.known is None or bytes_per_example is None:
            return
        if bytes_per_example != self._relieved_to:
            self.known = self.known.relieved(bytes_per_example, resident_bytes())
            self._relieved_to = bytes_per_example


# The peak is the process's in both; to read it for the thread alone waits for no other thread.
_RUSAGE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
_RUSAGE_UNIT = 1 if sys.platform == "darwin" else 1024


class PeakMeter:
    """The process's peak resident memory since it was made, or since ``reset``.

    Linux resets its mark when 5 is written to /proc/self/clear_refs; elsewhere the mark is that of
    the process's whole life. A process inherits the mark of the one that launched it as a floor
    under what ``getrusage`` tells; where that floor is above its own, /proc is read instead, which
    takes longer.
    """

    def __init__(self) -> None:
        self._clear: int | None = None
        self._is_floored = False
        with contextlib.suppress(OSError):
            self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
            self.reset()
            self._is_floored = self.peak_bytes() > 1.1 * _status_bytes("VmHWM")

    def reset(self) -> None:
        """Let the peak be what is resident now."""
        if self._clear is not None:
            os.pwrite(self._clear, b"5", 0)

    def peak_bytes(self) -> int:
        """Return the peak since the last reset."""
        if self._is_floored:
            return _status_bytes("VmHWM")
        return resource.getrusage(_RUSAGE).ru_maxrss * _RUSAGE_UNIT

    def __del__(self) -> None:
        if self._clear is not None:
            os.close(self._clear)


def resident_bytes() -> int:
    """Return what the process holds in memory now."""
    try:
        return _status_bytes("VmRSS")
    except OSError:
        import psutil  # where that is not Linux: 1 MB of an idle device

        return psutil.Process().memory_info().rss


def is_allocation_failure(error: BaseException) -> bool:
    """Tell an allocation failure, which torch raises as a RuntimeError, from any other error.

    oneDNN, which computes convolutions, says no more than that it could not create something.
    """
    told = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and ("can't allocate memory" in told or told.startswith("could not create a "))
    )


def _status_bytes(name: str) -> int:
    with open("/proc/self/status") as status:
        rows = dict(line.split(":", 1) for line in status)
    return int(rows[name].split()[0]) * 1024
