"""Counters of a running client: connections, updates and bytes, with or without a metrics port."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from headwater.common.errors import HeadwaterError
from headwater.common.messages import ReadyReport, UpdateReport

# A fast laptop's window takes a tenth of a second, a Raspberry Pi's up to its deadline.
UPDATE_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


@dataclass(kw_only=True, slots=True)
class Counters:
    """Counts since the process started. Each has one writing thread; readers may lag a little."""

    is_connected: bool = False
    num_reconnects: int = 0
    """Connections after the first."""
    sent_bytes: int = 0
    received_bytes: int = 0
    num_updates: int = 0
    num_micro_batches: int = 0
    num_examples: int = 0
    peak_bytes: int = 0
    """Peak memory of the last update."""
    seconds: float = 0.0
    """Training time of all updates."""
    num_within: list[int] = field(default_factory=lambda: [0] * (len(UPDATE_SECONDS) + 1))
    """Updates per bucket of ``UPDATE_SECONDS``; the last entry counts the slower ones."""
    stops: Counter[str] = field(default_factory=Counter)
    has_plan: bool = False
    """Whether a server has planned something for this device."""
    refusal: HeadwaterError | None = None
    """Why the last answer did not count, here or by the server's word; None since an update."""
    _had_contact: bool = False

    def connected(self) -> None:
        """Count a connection that the server has welcomed."""
        self.num_reconnects += self._had_contact
        self._had_contact = self.is_connected = True

    def disconnected(self) -> None:
        """Note that the stream has ended."""
        self.is_connected = False

    def add_update(self, report: UpdateReport | ReadyReport) -> None:
        """Count an update.

        A masked update adds nothing else: the server's operator may be able to read this page, and
        the masks hide all other numbers from the server.
        """
        self.num_updates, self.refusal = self.num_updates + 1, None
        if isinstance(report, ReadyReport):
            return
        self.seconds += report.seconds
        self.num_within[bisect_left(UPDATE_SECONDS, report.seconds)] += 1
        self.peak_bytes = max((step.peak_bytes for step in report.steps), default=0)
        self.num_micro_batches += len(report.steps)
        self.num_examples += report.num_examples
        self.stops[report.reason] += 1
