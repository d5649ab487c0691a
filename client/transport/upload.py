"""Uploads an answer over one stream: its head, then its vector from where the server asks."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable

from headwater.client.flower.node import Node
from headwater.client.node_features import NodeAnswer
from headwater.common.transport.limits import CHUNK_BYTES
from headwater.common.transport.wire_pb2 import Chunk, ClientFrame, Receipt, Reply

# The server keeps whole chunks alone. Where a link breaks every few seconds, a chunk that takes
# longer than that would be sent again and again. At 1 s or more for a chunk a stream sends no more
# frames than the server grants it in any case (``server.transport.rate_limit``).
FIRST_CHUNK_BYTES, LEAST_CHUNK_BYTES = 64 << 10, 16 << 10
SHORT_SECONDS, LONG_SECONDS = 1.0, 4.0

Write = Callable[[ClientFrame], Awaitable[None]]


class StreamBroken(Exception):
    """The stream broke during an upload; the answer is kept for the next stream."""


class Upload:
    """The upload of one answer over one stream."""

    def __init__(self, answer: NodeAnswer, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.answer = answer
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
        if len(vector):
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
