"""Carries out one instruction at a time: receives the model, runs the node, uploads the answer.

An exchange outlives the connection. The vector stays in the accumulator until the server has
acknowledged all of it; after a broken connection the upload continues after the last piece that
arrived. The training is interrupted if a newer plan arrives, or if the server says that the round
is over.

Nothing here cancels a task that may be writing, because grpc.aio would end the whole stream with
it. An aborted upload stops at its next chunk instead.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging

from headwater.client.flower.node import Node
from headwater.client.node_features import NodeAnswer
from headwater.client.operations.activity import COMPUTING, WAITING
from headwater.client.transport.incoming_image import (
    IncomingDifference,
    IncomingImage,
    ModelBroken,
)
from headwater.client.transport.upload import StreamBroken, Upload, Write
from headwater.common.errors import (
    EmptyUpdate,
    HeadwaterError,
    LateUpdate,
    ModelMismatch,
    ProtocolMismatch,
    UnexpectedUpdate,
    error_of,
    travelling,
)
from headwater.common.model.frozen_part import begin_digest
from headwater.common.transport.wire_pb2 import (
    Chunk,
    ClientFrame,
    Fault,
    Image,
    Instruction,
    Progress,
    Receipt,
)

log = logging.getLogger(__name__)


class Exchange:
    """One device's exchange: at most one model, one instruction and one upload at a time."""

    def __init__(self, node: Node, write: Write) -> None:
        """``write`` writes to the current stream, and may raise ``StreamBroken``."""
        self.image_id = ""
        self.became_idle = asyncio.Event()
        """Set when an answer has arrived at the server; the waiting task clears it."""
        self._node = node
        self._write = write
        self._activity = node.activity
        self._incoming: IncomingImage | IncomingDifference | None = None
        self._task: asyncio.Task[None] | None = None
        self._message_id = ""
        """The instruction in progress; empty if there is none."""
        self._message_id_on_stream = ""
        """The last instruction on the current stream: only its answer may be uploaded there."""
        self._is_phase = False
        self._answer: NodeAnswer | None = None
        self._upload: Upload | None = None
        self._has_been_empty = False
        self._is_offline = False
        """Whether the device sums further windows because it has no link."""

    @property
    def is_idle(self) -> bool:
        """Whether the last instruction is done, and its answer has arrived at the server."""
        return not self._message_id

    def progress(self) -> Progress | None:
        """Return how far the plan in progress is; None without one, or if the server may not know.

        The pace of a masked or private plan would tell something of the data.
        """
        plan = self._activity.progress.plan
        if plan is None or self._activity.stage != COMPUTING:
            return None
        if plan.hides_pace:
            return None
        return Progress(message_id=self._message_id, num_steps=self._activity.progress.num_steps)

    def connected(self) -> None:
        """Note a new stream: it has carried no instruction yet."""
        self._message_id_on_stream = ""

    @property
    def is_offline(self) -> bool:
        """Whether the device goes on with its last plan although it has no link."""
        return self._is_offline

    def disconnected(self) -> None:
        """Stop the upload; the answer waits for the next stream."""
        self._message_id_on_stream = ""
        if self._upload is not None:
            self._upload.abort()

    async def begin_image(self, image: Image) -> None:
        """Prepare to receive a model, or its frozen part, directly into the trainer's memory.

        Raises:
            ModelMismatch: the model has another size.
            ModelBroken, ProtocolMismatch: see ``_begin_difference``.
        """
        await self.end()
        model = self._node.trainer.image
        if image.difference:
            self._begin_difference(image)
            return
        part = "frozen part of the model" if image.is_frozen else "model"
        memory = model.frozen_buffer() if image.is_frozen else model.buffer()
        if image.num_bytes != len(memory):
            raise ModelMismatch(
                f"the server's {part} has {image.num_bytes:,} bytes, this device's {len(memory):,}"
            )
        digest = begin_digest(model.layout) if image.is_frozen else hashlib.sha256()
        if not image.is_frozen:
            self.image_id = ""
        self._incoming = IncomingImage(image, memory, digest)
        self._activity.enter(f"receives the {part}", num_bytes=len(memory))

    def _begin_difference(self, image: Image) -> None:
        """Prepare to receive a difference to the model that the device holds, or to zero.

        Raises:
            ModelBroken: the device holds another model.
            ProtocolMismatch: see ``IncomingDifference``.
        """
        held, self.image_id = self.image_id, ""  # until all of it has arrived it is no model
        if image.base_id and held != image.base_id:
            raise ModelBroken("the server sent a difference to a model that the device lacks")
        model = self._node.trainer.image
        incoming = IncomingDifference(image, model.buffer())
        if not image.base_id:
            model.values_P.zero_()
        self._incoming = incoming
        self._activity.enter("receives the model's difference", num_bytes=image.num_bytes)

    def take_chunk(self, chunk: Chunk) -> None:
        """Take a chunk of the model.

        Raises:
            ProtocolMismatch: no such model was announced, or the chunk is out of order.
        """
        incoming = self._incoming
        if incoming is None or chunk.transfer_id != incoming.image_id:
            raise ProtocolMismatch("the server sent a chunk of a model that it did not announce")
        incoming.add(chunk)
        self._activity.num_moved = chunk.offset + len(chunk.data)

    async def take_small_image(self, image_id: str, data: bytes) -> None:
        """Take a model that arrives in the same frame as its instruction.

        Raises:
            ModelMismatch: the model has another size.
            ProtocolMismatch: the model's id is not a digest.
        """
        try:
            sha256 = bytes.fromhex(image_id)
        except ValueError:
            raise ProtocolMismatch("the server sent a model without its digest") from None
        await self.begin_image(Image(image_id=image_id, num_bytes=len(data), sha256=sha256))
        self.take_chunk(Chunk(transfer_id=image_id, data=data))

    async def take_instruction(self, instruction: Instruction, *, is_stopping: bool) -> None:
        """Start an instruction. If it is already in progress, upload its answer once it is there.

        Raises:
            ProtocolMismatch: the model that it needs was not sent.
            ModelBroken: the model is not the announced one.
        """
        self._message_id_on_stream = instruction.message_id
        if instruction.message_id == self._message_id:
            if self._answer is not None:
                self._begin_upload(self._answer)
            elif self._is_offline:
                self._node.interrupt()  # what is summed by now is sent
            return
        await self.end()
        if instruction.image_id and instruction.image_id != self.image_id:
            self._finish_image(instruction.image_id, is_frozen=False)
            self.image_id = instruction.image_id
        if instruction.frozen_id:
            self._finish_image(instruction.frozen_id, is_frozen=True)
        self._incoming = None  # no chunk may change a model that the device works with
        self._message_id = instruction.message_id
        self._is_phase = instruction.message_type.startswith("query.")
        if not is_stopping:
            self._node.resume()
        self._activity.begin(instruction.message_type)
        self._task = asyncio.create_task(self._carry_out(instruction))

    def _finish_image(self, image_id: str, *, is_frozen: bool) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is None or (incoming.image_id, incoming.is_frozen) != (image_id, is_frozen):
            raise ProtocolMismatch("the server sent a plan without its model")
        incoming.verify()
        self._node.link = self._node.link.received(incoming.num_bytes, incoming.seconds)

    def take_receipt(self, receipt: Receipt) -> None:
        """Pass a receipt to the upload that it belongs to."""
        if self._upload is not None and receipt.message_id == self._upload.answer.message_id:
            self._upload.receipts.put_nowait(receipt)

    def take_fault(self, fault: Fault) -> None:
        """Stop the instruction whose answer the server refused."""
        error = error_of(fault.code, fault.text)
        # A secure session continues once enough members have answered; later answers are refused.
        is_expected = self._is_phase and isinstance(error, LateUpdate | UnexpectedUpdate)
        level = logging.DEBUG if is_expected else logging.WARNING
        log.log(level, "the server refused the update: %s: %s", error.code, error)
        if not is_expected:
            self._node.counters.refusal = error
        if fault.message_id == self._message_id:
            self._abort()

    def forget(self) -> None:
        """Abort the instruction in progress, because the server does not remember it."""
        if self._message_id:
            log.warning(
                "the server no longer waits for what this device was doing; a later round uses "
                "the same examples"
            )
            self._abort()

    async def end(self) -> None:
        """Abort the instruction and wait until the vector and the model are free again."""
        self._abort()
        if self._task is not None:
            await self._task

    async def finish(self, grace_seconds: float) -> None:
        """Wait for the node's answer, then for its upload; each takes at most this long."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=grace_seconds)
        if self._upload is not None and self._upload.task is not None:
            await asyncio.wait([self._upload.task], timeout=grace_seconds)

    async def _carry_out(self, instruction: Instruction) -> None:
        payload: memoryview | bytes | None = instruction.beside or None
        if instruction.image_id:
            payload = self._node.trainer.image.buffer()
        if instruction.frozen_id:
            payload = self._node.trainer.image.frozen_buffer()
        answer = await asyncio.to_thread(
            self._node.answer,
            message_id=instruction.message_id,
            message_type=instruction.message_type,
            head_json=instruction.head_json,
            payload=payload,
        )
        if self._message_id != instruction.message_id:
            return  # aborted in the meantime
        if self._has_no_link(instruction):
            answer = await self._go_on_offline(instruction, answer)
            if self._message_id != instruction.message_id:
                return
        self._answer = answer
        if self._message_id_on_stream == instruction.message_id:
            self._begin_upload(answer)

    def _has_no_link(self, instruction: Instruction) -> bool:
        """Whether no stream has carried the instruction since the last one was lost."""
        return self._message_id_on_stream != instruction.message_id

    async def _go_on_offline(self, instruction: Instruction, answer: NodeAnswer) -> NodeAnswer:
        """Let the node add to its answer until the link is back or the server gives up.

        Nothing of the answer has been sent: once its upload has begun, nothing is added, because
        the server may have counted it.
        """
        further = self._node.no_link(instruction.head_json, answer)
        if further is None:
            return answer
        self._is_offline = True
        try:
            while self._message_id == instruction.message_id and self._has_no_link(instruction):
                found = await asyncio.to_thread(next, further, None)
                if found is None:
                    break
                answer = found
        finally:
            self._is_offline = False
        return answer

    def _abort(self) -> None:
        """Abort the instruction and its upload: the server no longer waits for them."""
        if self._message_id:
            self._activity.enter(WAITING)
        self._message_id, self._answer = "", None
        if self._upload is not None:
            self._upload.abort()
        if self._task is not None and not self._task.done():
            self._node.abort()

    def _begin_upload(self, answer: NodeAnswer) -> None:
        self._upload = upload = Upload(answer)
        upload.task = asyncio.create_task(self._send_answer(upload))

    def _log(self, code: str, error: HeadwaterError) -> None:
        """Log why there is no update; the lack of usable examples once, as it may last for long.

        The app has logged a private error, with all that the server may not read.
        """
        if error.is_private:
            return
        if not isinstance(error, EmptyUpdate):
            log.warning("%s: %s", code, error)
        elif not self._has_been_empty:
            self._has_been_empty = True
            log.warning("%s: %s; %s (logged once)", code, error, error.remedy)
        else:
            log.info("%s: %s", code, error)

    async def _send_answer(self, upload: Upload) -> None:
        """Send an answer's reply, or its error."""
        answer = upload.answer
        try:
            if answer.error is None:
                await upload.send(self._write, self._node)
            else:
                code, text = travelling(answer.error)
                self._log(code, answer.error)
                fault = Fault(message_id=answer.message_id, code=code, text=text)
                await self._write(ClientFrame(fault=fault))
        except StreamBroken as error:
            log.debug("the stream broke during the upload: %s", error)
            return
        if not upload.is_aborted and self._message_id == answer.message_id:
            self._message_id, self._answer = "", None
            self._activity.enter(WAITING)
            if len(answer.vector):
                self._node.delivered()
                self._activity.sent()
            self.became_idle.set()
