"""Answers of simulated devices that are under way, in the order of the virtual clock.

Asynchronous rounds have plans of several models out at once. A device's update is computed when its
plan is sent, while the model is the one that the plan names; the answer waits here until the
virtual clock reaches the device's finish. So no older model is kept, and at most one vector for
each device at work: in RAM up to a limit, above it in an unlinked file.
"""

from __future__ import annotations

import heapq
import mmap
import tempfile
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headwater.common.compression.encoded_vector import Vector, whole
from headwater.common.messages import Update
from headwater.server.fleet import Dropout

RAM_BYTES = 1 << 30


class PendingAnswers:
    """The answers that have not arrived yet; those of the same second arrive as they were sent."""

    def __init__(self, *, ram_bytes: int = RAM_BYTES) -> None:
        self.now_seconds = 0.0
        """The virtual time of the last answer that arrived."""
        self._ram_bytes = ram_bytes
        self._held_bytes = 0
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
            answer = replace(answer, values_P=self._kept(answer.vector), encoded=None)
        heapq.heappush(self._heap, (sent_at + seconds, self._num_sent, answer))
        self._num_sent += 1

    def pop(self) -> Update | Dropout:
        """Return the next answer, and move the clock to its arrival."""
        self.now_seconds, _, answer = heapq.heappop(self._heap)
        if isinstance(answer, Update):
            self._held_bytes -= 4 * len(answer.values_P)
        return answer

    def _kept(self, vector: Vector) -> Tensor:
        """Return a copy of a vector, in a file's memory if the RAM for vectors is used up."""
        values_P = whole(vector)
        num_bytes = 4 * len(values_P)
        self._held_bytes += num_bytes
        if self._held_bytes <= self._ram_bytes or not num_bytes:
            return values_P.clone()
        with tempfile.TemporaryFile() as file:
            file.truncate(num_bytes)
            memory = mmap.mmap(file.fileno(), num_bytes)  # stays valid when the file is closed
        kept_P = torch.from_numpy(np.frombuffer(memory, dtype=np.float32))
        return kept_P.copy_(values_P)
