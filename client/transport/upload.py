"""Uploads an answer over one stream: its head, then its vector from where the server asks."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable

from headwater.client.flower.node import Node, NodeAnswer
from headwater.common.transport.limits import CHUNK_BYTES
from headwater.common.transport.wire_pb2 import Chunk, ClientFrame, Receipt, Reply

Write = Callable[[ClientFrame], Awaitable[None]]


class StreamBroken(Exception):
    """The stream broke during an upload; the answer is kept for the next stream."""


class Upload:
    """The upload of one answer over one stream."""

    def __init__(self, answer: NodeAnswer) -> None:
        self.answer = answer
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
        start, first_offset = time.monotonic(), receipt.next_offset
        for offset in range(first_offset, len(vector), CHUNK_BYTES):
            if self.is_aborted:
                return
            data = bytes(vector[offset : offset + CHUNK_BYTES])
            chunk = Chunk(transfer_id=answer.message_id, offset=offset, data=data)
            await write(ClientFrame(chunk=chunk))
            node.activity.num_moved = offset + len(data)
        while receipt is not None and not receipt.is_done:
            receipt = await self.receipts.get()
        if receipt is not None:
            seconds = time.monotonic() - start
            node.link = node.link.sent(len(vector) - first_offset, seconds)
