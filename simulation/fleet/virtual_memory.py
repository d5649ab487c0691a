"""The virtual memory of a simulated device: a limit, and peaks linear in the micro-batch size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from headwater.client.memory.peak_model import PeakModel, guarded_bytes
from headwater.common.estimates.linear_fit import Line
from headwater.common.wording import bytes_text


class VirtualMemory:
    """Implements ``client.device.interfaces.Memory`` with a known line instead of measurements.

    ``bytes_per_example`` is None if none of the task's examples could be measured; then every
    micro-batch fits.
    """

    def __init__(self, *, limit_bytes: int, base_bytes: int) -> None:
        self.bytes_per_example: float | None = None
        self.uses_checkpointing = False
        self._limit_bytes = limit_bytes
        self.base_bytes = base_bytes
        self._failed_peak_bytes = 0
        self._cached_fitting: tuple[float | None, float | None] = (None, None)

    @property
    def line(self) -> Line | None:
        if self.bytes_per_example is None:
            return None
        return Line(base=float(self.base_bytes), each=self.bytes_per_example)

    def begin_round(self, bytes_per_example: float | None) -> None:
        """Reset to the state at a round's start, with this many bytes per example."""
        self.bytes_per_example, self.uses_checkpointing = bytes_per_example, False
        self._failed_peak_bytes = 0

    def limit_bytes(self) -> int | None:
        return self._limit_bytes

    def fitting(self, size: float) -> float | None:
        """See ``client.device.interfaces.Memory``; a real device's ``PeakModel`` decides."""
        each = self.bytes_per_example
        if each != self._cached_fitting[0]:  # read for each micro-batch, and it rarely changes
            self._cached_fitting = each, self._fitting()
        return self._cached_fitting[1]

    def _fitting(self) -> float | None:
        line = self.line
        if line is None:
            return None
        model = PeakModel(
            line=line, least_each=line.each, largest_size=1, rest_bytes=self.base_bytes
        )
        return model.fitting(guarded_bytes(self._limit_bytes, self.base_bytes))

    def begin(self, size: float) -> None:
        """Record that a micro-batch of this size begins.

        Raises:
            MemoryError: its peak would exceed the limit.
        """
        peak_bytes = self._peak_bytes(size)
        if peak_bytes > self._limit_bytes:
            self._failed_peak_bytes = max(self._failed_peak_bytes, peak_bytes)
            raise MemoryError(
                f"{size:g} examples take {bytes_text(peak_bytes)} of a simulated limit of "
                f"{bytes_text(self._limit_bytes)}"
            )

    def end(self, size: float) -> int:
        """Return the peak of the micro-batch, or of larger ones that failed before it."""
        peak_bytes = max(self._peak_bytes(size), self._failed_peak_bytes)
        self._failed_peak_bytes = 0
        return peak_bytes

    def expect(self, *, rest_bytes: int, peak_bytes: int) -> None:
        """Do nothing: a simulated device's bytes are those of its profile, not this process's."""

    @contextlib.contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Count so many bytes to what the device has in any case, while the block runs."""
        before, self.base_bytes = self.base_bytes, self.base_bytes + num_bytes
        self._cached_fitting = None, None
        try:
            yield
        finally:
            self.base_bytes, self._cached_fitting = before, (None, None)

    def use_checkpointing(self, bytes_per_example: float | None) -> None:
        self.uses_checkpointing = True
        if self.bytes_per_example is not None and bytes_per_example is not None:
            self.bytes_per_example = min(self.bytes_per_example, bytes_per_example)

    def _peak_bytes(self, size: float) -> int:
        return int(self.base_bytes + (self.bytes_per_example or 0.0) * size)
