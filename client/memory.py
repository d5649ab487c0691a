"""What micro-batches take of the process's memory: measured, fitted to a line, and foreseen."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable

from common.line import Line


def _own_peak_bytes() -> int:
    with open("/proc/self/status") as status:
        rows = dict(line.split(":", 1) for line in status)
    return int(rows["VmHWM"].split()[0]) * 1024


# The peak is the process's in both; to read it for the thread alone waits for no other thread.
_RUSAGE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


class PeakMemory:
    """The process's peak resident memory since ``reset``.

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
            self._is_floored = self.peak_bytes() > 1.1 * _own_peak_bytes()

    def reset(self) -> None:
        if self._clear is not None:
            os.pwrite(self._clear, b"5", 0)

    def peak_bytes(self) -> int:
        if self._is_floored:
            return _own_peak_bytes()
        return resource.getrusage(_RUSAGE).ru_maxrss * 1024

    def __del__(self) -> None:
        if self._clear is not None:
            os.close(self._clear)


class ProcessMemory:
    """The memory of this process."""

    def __init__(self, limit_bytes: Callable[[], int | None] = lambda: None) -> None:
        self.line: Line | None = None
        self._limit_bytes = limit_bytes
        self._peak = PeakMemory()

    def limit_bytes(self) -> int | None:
        return self._limit_bytes()

    def fitting(self) -> int | None:
        return None

    def begin(self, num_examples: int) -> None:
        self._peak.reset()

    def end(self, num_examples: int) -> int:
        return self._peak.peak_bytes()
