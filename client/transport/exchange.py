"""What a device is at: the model that came in, the instruction, and its answer on the way out.

It outlives the connection. The vector stays in the accumulator until the server has acknowledged
all of it; after a broken connection the upload goes on from the last byte that arrived. A plan that
supersedes another, or the news that its round is over, ends the work on it.

Nothing here cancels a task that may be writing: grpc.aio would end the whole stream with it. An
upload that is given up stops at its next chunk.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable

from headwater.client.flower.node import Node, NodeAnswer
from headwater.common.errors import (
    LateUpdate,
    ModelMismatch,
    ProtocolMismatch,
    UnexpectedUpdate,
    error_of,
    travelling,
)
from headwater.common.transport.limits import CHUNK_BYTES
from headwater.common.transport.wire_pb2 import (
    Chunk,
    ClientFrame,
    Fault,
    Image,
    Instruction,
    Receipt,
    Reply,
)

log = logging.getLogger(__name__)


class StreamBroken(Exception):
    """The stream broke in mid-upload; the answer is kept for the next one."""


class ModelBroken(Exception):
    """The model that arrived is not the one that was announced; another stream brings it anew."""


class Exchange:
    """One device's work: at most one model, one instruction and one upload at a time."""

    def __init__(self, node: Node, write: Callable[[ClientFrame], Awaitable[None]]) -> None:
        """Take the node, and how to write to its stream, which may raise ``StreamBroken``."""
        self.image_id = ""
        self.went_idle = asyncio.Event()
        """Set when an answer is with the server; who waits for it clears it."""
        self._node = node
        self._write = write
        self._incoming: _IncomingImage | None = None
        self._doing: asyncio.Task[None] | None = None
        self._working_on = ""
        self._is_asked_for_phase = False
        self._asked_here = ""
        self._answer: NodeAnswer | None = None
        self._upload: _Upload | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the last instruction is done, and its answer with the server."""
        return not self._working_on

    def connected(self) -> None:
        """Take note of a new connection: nothing was asked for on it so far."""
        self._asked_here = ""

    def disconnected(self) -> None:
        """Stop writing; the answer waits for the next connection."""
        if self._upload is not None:
            self._upload.give_up()

    async def begin_image(self, image: Image) -> None:
        """Make ready to receive a model, straight into the model's memory.

        Raises:
            ModelMismatch: it has another size.
        """
        await self.end()
        memory = self._node.trainer.image.buffer()
        if image.num_bytes != len(memory):
            raise ModelMismatch(
                f"the server's model has {image.num_bytes:,} bytes, this device's {len(memory):,}"
            )
        self.image_id = ""
        self._incoming = _IncomingImage(image, memory)

    def take_chunk(self, chunk: Chunk) -> None:
        """Take a chunk of the model.

        Raises:
            ProtocolMismatch: it is of no model that was announced, or out of order.
        """
        incoming = self._incoming
        if incoming is None or chunk.transfer_id != incoming.image_id:
            raise ProtocolMismatch("the server sent a chunk that belongs to nothing")
        incoming.add(chunk)

    async def take_instruction(self, instruction: Instruction, *, is_stopping: bool) -> None:
        """Begin the work, unless it is begun already; then send what is there of it.

        Raises:
            ProtocolMismatch: the model that it needs was not sent.
            ModelBroken: it is not the one that was announced.
        """
        self._asked_here = instruction.message_id
        if instruction.message_id == self._working_on:
            if self._answer is not None:
                self._begin_upload(self._answer)
            return
        await self.end()
        if instruction.image_id and instruction.image_id != self.image_id:
            incoming = self._incoming
            if incoming is None or incoming.image_id != instruction.image_id:
                raise ProtocolMismatch("the server sent a plan without its model")
            incoming.verify()
            self._node.link = self._node.link.received(incoming.num_bytes, incoming.seconds)
            self.image_id, self._incoming = incoming.image_id, None
        self._working_on = instruction.message_id
        self._is_asked_for_phase = instruction.message_type.startswith("query.")
        if not is_stopping:
            self._node.resume()
        self._doing = asyncio.create_task(self._do(instruction))

    async def take_small_image(self, image_id: str, data: bytes) -> None:
        """Take a model that comes in its instruction's own frame.

        Raises:
            ModelMismatch: it has another size.
            ProtocolMismatch: its name is not a digest.
        """
        try:
            sha256 = bytes.fromhex(image_id)
        except ValueError:
            raise ProtocolMismatch("the server sent a model without its digest") from None
        await self.begin_image(Image(image_id=image_id, num_bytes=len(data), sha256=sha256))
        self.take_chunk(Chunk(transfer_id=image_id, data=data))

    def take_receipt(self, receipt: Receipt) -> None:
        """Pass a receipt on to the upload that it is for."""
        if self._upload is not None and receipt.message_id == self._upload.answer.message_id:
            self._upload.receipts.put_nowait(receipt)

    def take_fault(self, fault: Fault) -> None:
        """Take note that the server refused an update."""
        error = error_of(fault.code, fault.text)
        # A secure session goes on as soon as enough have answered; the others' answers are late.
        is_needless = self._is_asked_for_phase and isinstance(error, LateUpdate | UnexpectedUpdate)
        level = logging.DEBUG if is_needless else logging.WARNING
        log.log(level, "the server refused the update: %s: %s", error.code, error)
        if fault.message_id == self._working_on:
            self._give_up()

    async def end(self) -> None:
        """Give up the work and wait for its end: the vector and the model are free again."""
        self._give_up()
        if self._doing is not None:
            await self._doing

    async def finish(self, grace_seconds: float) -> None:
        """Wait for the work to end and for its update to arrive, so long each."""
        if self._doing is not None:
            await asyncio.wait([self._doing], timeout=grace_seconds)
        if self._upload is not None and self._upload.task is not None:
            await asyncio.wait([self._upload.task], timeout=grace_seconds)

    async def _do(self, instruction: Instruction) -> None:
        beside: memoryview | bytes | None = instruction.beside or None
        if instruction.image_id:
            beside = self._node.trainer.image.buffer()
        answer = await asyncio.to_thread(
            self._node.answer,
            message_id=instruction.message_id,
            message_type=instruction.message_type,
            head_json=instruction.head_json,
            beside=beside,
        )
        if self._working_on != instruction.message_id:
            return  # given up meanwhile
        self._answer = answer
        if self._asked_here == instruction.message_id:
            self._begin_upload(answer)

    def _give_up(self) -> None:
        """Give up the work and the upload in progress: nobody waits for them any more."""
        self._working_on, self._answer = "", None
        if self._upload is not None:
            self._upload.give_up()
        if self._doing is not None and not self._doing.done():
            self._node.interrupt()

    def _begin_upload(self, answer: NodeAnswer) -> None:
        self._upload = upload = _Upload(answer)
        upload.task = asyncio.create_task(self._send_answer(upload))

    async def _send_answer(self, upload: _Upload) -> None:
        """Send a reply from where the server has it, or the error that stands for it."""
        answer = upload.answer
        try:
            if answer.error is None:
                await self._send_reply(upload)
            else:
                code, text = travelling(answer.error)
                log.warning("%s: %s", code, answer.error)
                fault = Fault(message_id=answer.message_id, code=code, text=text)
                await self._write(ClientFrame(fault=fault))
        except StreamBroken as error:
            log.debug("the stream broke in mid-upload: %s", error)
            return
        if not upload.is_given_up and self._working_on == answer.message_id:
            self._working_on, self._answer = "", None
            if len(answer.vector):
                self._node.handed_over()
            self.went_idle.set()

    async def _send_reply(self, upload: _Upload) -> None:
        """Send a reply's head and, from the offset that the server then names, its vector."""
        answer, vector = upload.answer, memoryview(upload.answer.vector)
        digest = await asyncio.to_thread(hashlib.sha256, vector)
        reply = Reply(
            message_id=answer.message_id,
            head_json=answer.head_json,
            num_bytes=len(vector),
            sha256=digest.digest(),
        )
        if upload.is_given_up:
            return
        await self._write(ClientFrame(reply=reply))
        receipt = await upload.receipts.get()
        if receipt is None:
            return
        begun, first_offset = time.monotonic(), receipt.next_offset
        for offset in range(first_offset, len(vector), CHUNK_BYTES):
            if upload.is_given_up:
                return
            data = bytes(vector[offset : offset + CHUNK_BYTES])
            chunk = Chunk(transfer_id=answer.message_id, offset=offset, data=data)
            await self._write(ClientFrame(chunk=chunk))
        while receipt is not None and not receipt.is_done:
            receipt = await upload.receipts.get()
        if receipt is not None:
            seconds = time.monotonic() - begun
            self._node.link = self._node.link.sent(len(vector) - first_offset, seconds)


class _Upload:
    """An answer on its way out, over one stream."""

    def __init__(self, answer: NodeAnswer) -> None:
        self.answer = answer
        self.task: asyncio.Task[None] | None = None
        self.receipts: asyncio.Queue[Receipt | None] = asyncio.Queue()
        self.is_given_up = False

    def give_up(self) -> None:
        """Stop at the next chunk."""
        self.is_given_up = True
        self.receipts.put_nowait(None)


class _IncomingImage:
    """A model on its way in."""

    def __init__(self, image: Image, memory: memoryview) -> None:
        self.image_id = image.image_id
        self.num_bytes = len(memory)
        self.seconds = 0.0  # from the announcement to the latest chunk
        self._sha256 = image.sha256
        self._memory = memory
        self._received = 0
        self._digest = hashlib.sha256()
        self._begun = time.monotonic()

    def add(self, chunk: Chunk) -> None:
        end = self._received + len(chunk.data)
        if chunk.offset != self._received or end > len(self._memory):
            raise ProtocolMismatch("the server sent a chunk of its model out of order")
        self._memory[self._received : end] = chunk.data
        self._digest.update(chunk.data)
        self._received = end
        self.seconds = time.monotonic() - self._begun

    def verify(self) -> None:
        """Check the whole model.

        Raises:
            ModelBroken: its digest is not the announced one.
        """
        if self._received != len(self._memory) or self._digest.digest() != self._sha256:
            raise ModelBroken("the model that arrived is not the one that was announced")
