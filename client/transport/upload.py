"""Uploads answers over one stream, in the order of their instructions.

First comes an answer's head, then its vector from where the server asks. A server may send a plan
that follows on one whose update is not through yet (``--overlap``). Then its model waits in memory
of its own until the trainer is free, and its update until the one before has arrived.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headwater.client.flower.node import Node
from headwater.client.node_features import NodeAnswer
from headwater.client.training.progress import TrainingProgress
from headwater.common.errors import ProtocolMismatch
from headwater.common.transport.limits import CHUNK_BYTES
from headwater.common.transport.wire_pb2 import Chunk, ClientFrame, Instruction, Receipt, Reply

# The server keeps whole chunks alone. Where a link breaks every few seconds, a chunk that takes
# longer than that would be sent again and again. At 1 s or more for a chunk a stream sends no more
# frames than the server grants it in any case (``server.transport.rate_limit``).
FIRST_CHUNK_BYTES, LEAST_CHUNK_BYTES = 64 << 10, 16 << 10
SHORT_SECONDS, LONG_SECONDS = 1.0, 4.0

Write = Callable[[ClientFrame], Awaitable[None]]
MAX_JOBS = 2


class StreamBroken(Exception):
    """The stream broke during an upload; the answer is kept for the next stream."""


class Upload:
    """The upload of one answer over one stream."""

    def __init__(
        self,
        answer: NodeAnswer,
        *,
        is_shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``is_shown``: whether the upload is what the device does now, and not a training."""
        self.answer = answer
        self._is_shown = is_shown
        self._clock = clock
        self.task: asyncio.Task[None] | None = None
        self.receipts: asyncio.Queue[Receipt | None] = asyncio.Queue()
        self.is_aborted = False

    def abort(self) -> None:
        """Stop at the next chunk."""
        self.is_aborted = True
        self.receipts.put_nowait(None)

    async def send(self, write: Write, node: Node) -> None:
        """Send a reply's head and, from the offset that the server then requests, its vector.

        Raises:
            StreamBroken: what ``write`` raises.
        """
        answer, vector = self.answer, memoryview(self.answer.vector)
        digest = await asyncio.to_thread(hashlib.sha256, vector)
        reply = Reply(
            message_id=answer.message_id,
            head_json=answer.head_json,
            num_bytes=len(vector),
            sha256=digest.digest(),
        )
        if self.is_aborted:
            return
        if len(vector) and self._is_shown:
            node.activity.enter("sends the update", num_bytes=len(vector))
        await write(ClientFrame(reply=reply))
        receipt = await self.receipts.get()
        if receipt is None:
            return
        start, first_offset = self._clock(), receipt.next_offset
        offset, num_bytes, before = first_offset, FIRST_CHUNK_BYTES, start
        while offset < len(vector):
            if self.is_aborted:
                return
            data = bytes(vector[offset : offset + num_bytes])
            chunk = Chunk(transfer_id=answer.message_id, offset=offset, data=data)
            await write(ClientFrame(chunk=chunk))
            offset += len(data)
            if self._is_shown:
                node.activity.num_moved = offset
            now = self._clock()
            num_bytes, before = next_chunk_bytes(num_bytes, now - before), now
        while receipt is not None and not receipt.is_done:
            receipt = await self.receipts.get()
        if receipt is not None:
            seconds = self._clock() - start
            node.link = node.link.sent(len(vector) - first_offset, seconds)


def next_chunk_bytes(num_bytes: int, seconds: float) -> int:
    """Return the size of the next chunk, after one of ``num_bytes`` that took so many seconds.

    Twice as many after less than ``SHORT_SECONDS``, half as many after more than ``LONG_SECONDS``;
    from ``LEAST_CHUNK_BYTES`` to ``CHUNK_BYTES``.
    """
    if seconds < SHORT_SECONDS:
        return min(2 * num_bytes, CHUNK_BYTES)
    return max(num_bytes // 2, LEAST_CHUNK_BYTES) if seconds > LONG_SECONDS else num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingModel:
    """A model that has arrived, as verified."""

    image_id: str
    memory: memoryview


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """An instruction, and what has come of it so far."""

    instruction: Instruction
    may_be_followed: bool
    """Whether the next plan may begin while this one's update is sent."""
    is_on_stream: bool = True
    """Whether the current stream has carried it: else its answer may not be uploaded there."""
    has_begun: bool = False
    has_receipt: bool = False
    """Whether the server has asked for the answer's vector: before that, none of it is sent."""
    answer: NodeAnswer | None = None
    work: TrainingProgress | None = None
    """What was done of it when the answer was there; the next plan may be at work since."""

    @property
    def message_id(self) -> str:
        return self.instruction.message_id

    @property
    def is_phase(self) -> bool:
        """Whether it is a phase of a secure session."""
        return self.instruction.message_type.startswith("query.")


class Jobs:
    """A device's open instructions, the oldest first."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return job in self._jobs

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def first(self) -> Job | None:
        """The oldest one, whose answer is the next to be sent; None if there is none."""
        return self._jobs[0] if self._jobs else None

    @property
    def next(self) -> Job | None:
        """The one to carry out once the trainer is free; None if there is none."""
        return next((job for job in self._jobs if not job.has_begun), None)

    @property
    def running(self) -> Job | None:
        """The one that is being carried out; None if there is none."""
        return next((job for job in self._jobs if job.has_begun and job.answer is None), None)

    @property
    def may_be_followed(self) -> bool:
        """Whether a plan may come while the last one is in progress."""
        return bool(self._jobs) and self._jobs[-1].may_be_followed

    def find(self, message_id: str) -> Job | None:
        """Return the instruction of an id; None if it is not open."""
        return next((job for job in self._jobs if job.message_id == message_id), None)

    def note_stream(self) -> None:
        """Note that the stream was lost, or that there is a new one."""
        for job in self._jobs:
            job.is_on_stream = False

    def add(self, job: Job) -> None:
        """Add one after the others.

        Raises:
            ProtocolMismatch: there are two already.
        """
        if len(self._jobs) >= MAX_JOBS:
            raise ProtocolMismatch("the server sent a third plan before the first was answered")
        self._jobs.append(job)

    def drop_from(self, job: Job) -> None:
        """Drop an instruction, and the one that follows on it."""
        while job in self._jobs:
            self._jobs.pop()

    def drop_first(self) -> None:
        """Drop the oldest one, whose answer has arrived at the server."""
        self._jobs.popleft()
