"""Answers of simulated devices that are under way, in the order of the virtual clock.

Asynchronous rounds have plans of several models out at once. A device's update is computed when its
plan is sent, while the model is the one that the plan names; the answer waits here until the
virtual clock reaches the device's finish. So no older model is kept, and at most one vector for
each device at work: in RAM up to a limit, above it in an unlinked file.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import torch

from headwater.common.messages import Update
from headwater.common.sums.encoded_vector import whole
from headwater.common.system.bounded_memory import BoundedMemory
from headwater.server.fleet import Dropout

RAM_BYTES = 1 << 30


class PendingAnswers:
    """The answers that have not arrived yet; those of the same second arrive as they were sent."""

    def __init__(self, *, ram_bytes: int = RAM_BYTES) -> None:
        self.now_seconds = 0.0
        """The virtual time of the last answer that arrived."""
        self._memory = BoundedMemory(ram_bytes)
        self._num_sent = 0
        self._heap: list[tuple[float, int, Update | Dropout]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, answer: Update | Dropout, *, sent_at: float) -> None:
        """Add an answer to a plan that was sent at a time; its vector is copied.

        The device of a dropout is known to be gone at once.
        """
        seconds = 0.0
        if isinstance(answer, Update):
            seconds = answer.report.seconds
            kept = self._memory.copy(whole(answer.vector).numpy().data)
            values_P = torch.from_numpy(kept.view(np.float32))
            answer = replace(answer, values_P=values_P, encoded=None)
        heapq.heappush(self._heap, (sent_at + seconds, self._num_sent, answer))
        self._num_sent += 1

    def pop(self) -> Update | Dropout:
        """Return the next answer, and move the clock to its arrival."""
        self.now_seconds, _, answer = heapq.heappop(self._heap)
        return answer
