"""What a running client does now: connecting, waiting, computing, sending.

The connection's event loop writes it, and a display reads it from another thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headwater.client.operations.counters import Counters
from headwater.client.training.progress import TrainingProgress

WAITING = "waits for a plan"
COMPUTING = "computes"
STAGES = {
    "query.describe": "describes this device and measures its speed",
    "query.frozen": "keeps the frozen part of the model",
    "train": COMPUTING,
    "evaluate": "evaluates the model on held-out examples",
}


class Activity:
    """One client's current activity, and what it has done."""

    def __init__(self, counters: Counters, progress: TrainingProgress) -> None:
        self.counters = counters
        self.progress = progress
        self.stage = "starts"
        self.since = time.monotonic()
        self.num_bytes = 0
        """The size of the transfer that goes on; 0 if there is none."""
        self.num_moved = 0
        self.updates_sent = 0
        """Updates, masked or not, that the server has acknowledged."""
        self.sent_work = progress
        """What the last acknowledged update was made of."""
        self.on_sent: Callable[[], object] = _do_nothing
        """Called after each acknowledged update."""

    def enter(self, stage: str, *, num_bytes: int = 0) -> None:
        """Begin an activity, perhaps the transfer of so many bytes."""
        self.stage, self.num_bytes, self.num_moved = stage, num_bytes, 0
        self.since = time.monotonic()

    def begin(self, message_type: str) -> None:
        """Begin an instruction of the server."""
        self.enter(STAGES.get(message_type, "takes part in the secure session"))

    def sent(self, work: TrainingProgress | None = None) -> None:
        """Count an update of this work that has arrived; None: of the last plan."""
        self.updates_sent += 1
        self.sent_work = work or self.progress
        self.on_sent()


def _do_nothing() -> None:
    """Nobody shows the activity."""
