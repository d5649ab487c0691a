"""Carries out one instruction after another: receives the model, runs the node, uploads the answer.

A plan that follows on another (``client.transport.upload``) is carried out while the answer before
is uploaded. All other instructions end the one in progress.

An exchange outlives the connection. The vector stays in the accumulator until the server has
acknowledged all of it; after a broken connection the upload continues after the last piece that
arrived. The training is interrupted if a newer plan arrives, or if the server says that the round
is over.

Nothing here cancels a task that may be writing, because grpc.aio would end the whole stream with
it. An aborted upload stops at its next chunk instead.
"""

from __future__ import annotations

import asyncio
import copy
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
from headwater.client.transport.upload import (
    Job,
    Jobs,
    StreamBroken,
    Upload,
    WaitingModel,
    Write,
)
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
    """One device's exchange: at most one model arrives, one plan trains, and one answer leaves."""

    def __init__(self, node: Node, write: Write) -> None:
        """``write`` writes to the current stream, and may raise ``StreamBroken``."""
        self.image_id = hashlib.sha256(node.trainer.image.buffer()).hexdigest()
        """The model in the trainer's memory; at first the one that the device itself has built,
        which a run that begins with it need not send. Empty while another one arrives."""
        self.became_idle = asyncio.Event()
        """Set when an answer has arrived at the server; the waiting task clears it."""
        self._node = node
        self._write = write
        self._activity = node.activity
        self._incoming: IncomingImage | IncomingDifference | None = None
        self._waiting: WaitingModel | None = None
        """The model of a following plan, until the trainer is free."""
        self._task: asyncio.Task[None] | None = None
        self._jobs = Jobs()
        self._upload: Upload | None = None
        self._has_been_empty = False
        self._is_offline = False
        """Whether the device sums further windows because it has no link."""

    @property
    def is_idle(self) -> bool:
        """Whether all instructions are done, and their answers have arrived at the server."""
        return not self._jobs

    def progress(self) -> Progress | None:
        """Return how far the plan in progress is; None without one, or if the server may not know.

        The pace of a masked or private plan would tell something of the data.
        """
        plan, job = self._activity.progress.plan, self._jobs.running
        if plan is None or job is None or self._activity.stage != COMPUTING:
            return None
        if plan.hides_pace:
            return None
        return Progress(message_id=job.message_id, num_steps=self._activity.progress.num_steps)

    def connected(self) -> None:
        """Note a new stream: it has carried no instruction yet."""
        self._jobs.note_stream()

    @property
    def is_offline(self) -> bool:
        """Whether the device goes on with its last plan although it has no link."""
        return self._is_offline

    def disconnected(self) -> None:
        """Stop the upload; the answer waits for the next stream.

        A link that goes without a word is noticed half a minute later, when an answer has been
        written that the server never got. Then windows are added to it as to one without a link.
        """
        self._jobs.note_stream()
        if self._upload is not None:
            self._upload.abort()
        job = self._jobs.first
        answer = None if job is None or job.has_receipt or len(self._jobs) > 1 else job.answer
        if job is not None and answer is not None and len(answer.vector):
            job.answer = None
            self._task = asyncio.create_task(self._settle(job, answer))

    async def begin_image(self, image: Image) -> None:
        """Prepare to receive a model, or its frozen part, directly into the trainer's memory.

        While the trainer works at a plan that may be followed, a model waits in other memory.

        Raises:
            ModelMismatch: the model has another size.
            ModelBroken, ProtocolMismatch: see ``_begin_difference``.
        """
        is_whole = not image.difference and not image.is_frozen
        may_follow = is_whole and self._jobs.may_be_followed
        if not may_follow:
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
        if may_follow and self._is_training:
            beside = memoryview(bytearray(len(memory)))
            self._incoming = IncomingImage(image, beside, digest, is_beside=True)
            return
        if not image.is_frozen:
            self.image_id, self._waiting = "", None
        self._incoming = IncomingImage(image, memory, digest)
        if may_follow:
            return  # the upload of the update before is shown
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
        if not self._jobs:
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

        One that follows on another starts when the trainer is free.

        Raises:
            ProtocolMismatch: the model that it needs was not sent.
            ModelBroken: the model is not the announced one.
        """
        self._note_received(instruction.message_id)
        job = self._jobs.find(instruction.message_id)
        if job is not None:
            job.is_on_stream, self._incoming = True, None
            if job is self._jobs.first and job.answer is not None:
                self._begin_upload(job.answer)
            elif job is self._jobs.first and self._is_offline:
                self._node.interrupt()  # what is summed by now is sent
            return
        plan = self._node.plan_in(instruction.head_json)
        follows = plan is not None and plan.after_round is not None
        follows &= self._jobs.may_be_followed and not self._has_aborted
        if not follows:
            await self.end()
            self._load_waiting()
        if instruction.image_id and instruction.image_id != self._newest_image_id:
            self._finish_image(instruction.image_id, is_frozen=False)
        if instruction.frozen_id:
            self._finish_image(instruction.frozen_id, is_frozen=True)
        self._incoming = None  # no chunk may change a model that the device works with
        may_be_followed = plan is not None and plan.overlaps and not plan.keeps_update
        self._jobs.add(Job(instruction=instruction, may_be_followed=may_be_followed))
        if not is_stopping and not follows:
            self._node.resume()
        self._begin_next()

    def _note_received(self, message_id: str) -> None:
        """Note that the server has the first answer, whose last receipt was lost with a stream.

        On a new stream it sends what it still waits for, the oldest first; this is another one.
        """
        first = self._jobs.first
        if first is None or first.answer is None or first.is_on_stream:
            return
        if first.message_id != message_id:
            self._jobs.drop_first()
            self._arrived(first)

    @property
    def _newest_image_id(self) -> str:
        return self.image_id if self._waiting is None else self._waiting.image_id

    @property
    def _is_training(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def _has_aborted(self) -> bool:
        """Whether the trainer has not yet ended an instruction that was aborted."""
        return self._is_training and self._jobs.running is None

    def _begin_next(self) -> None:
        """Carry out the next instruction, unless another one is being carried out."""
        job = self._jobs.next
        if job is None or self._jobs.running is not None or self._is_leaving(job):
            return
        self._load_waiting()
        job.has_begun = True
        if job is not self._jobs.first:
            log.info("trains on the next plan while the update before is sent")
        self._activity.begin(job.instruction.message_type)
        self._task = asyncio.create_task(self._carry_out(job))

    def _is_leaving(self, job: Job) -> bool:
        """Whether a following plan may not begin, as the device is to end its work."""
        return job is not self._jobs.first and self._node.trainer.stop_requested.is_set()

    def _load_waiting(self) -> None:
        """Move a model that waits into the trainer's memory, which is free."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._node.trainer.image.buffer()[:] = waiting.memory
            self.image_id = waiting.image_id

    def _finish_image(self, image_id: str, *, is_frozen: bool) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is None or (incoming.image_id, incoming.is_frozen) != (image_id, is_frozen):
            raise ProtocolMismatch("the server sent a plan without its model")
        incoming.verify()
        self._node.link = self._node.link.received(incoming.num_bytes, incoming.seconds)
        if isinstance(incoming, IncomingImage) and incoming.is_beside:
            self._waiting = WaitingModel(image_id=image_id, memory=incoming.memory)
        elif not is_frozen:
            self.image_id = image_id

    def take_receipt(self, receipt: Receipt) -> None:
        """Pass a receipt to the upload that it belongs to."""
        if self._upload is not None and receipt.message_id == self._upload.answer.message_id:
            self._upload.receipts.put_nowait(receipt)
        if (job := self._jobs.find(receipt.message_id)) is not None:
            job.has_receipt = True

    def take_fault(self, fault: Fault) -> None:
        """Stop the instruction whose answer the server refused."""
        error = error_of(fault.code, fault.text)
        # A secure session continues once enough members have answered; later answers are refused.
        job = self._jobs.find(fault.message_id)
        is_phase = job is not None and job.is_phase
        is_expected = is_phase and isinstance(error, LateUpdate | UnexpectedUpdate)
        level = logging.DEBUG if is_expected else logging.WARNING
        log.log(level, "the server refused the update: %s: %s", error.code, error)
        if not is_expected:
            self._node.counters.refusal = error
        if job is not None:
            self._abort_from(job)

    def forget(self) -> None:
        """Abort the instruction in progress, because the server does not remember it."""
        if self._jobs:
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
        """Wait for the node's answer, then for the uploads; each takes at most this long."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=grace_seconds)
        upload = None
        while self._upload is not upload:
            upload = self._upload
            if upload is not None and upload.task is not None:
                await asyncio.wait([upload.task], timeout=grace_seconds)

    async def _carry_out(self, job: Job) -> None:
        instruction = job.instruction
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
        if job in self._jobs:  # not aborted in the meantime
            await self._settle(job, answer)

    async def _settle(self, job: Job, answer: NodeAnswer) -> None:
        """Send an answer, or keep it for the next stream; without a link windows may be added."""
        if self._has_no_link(job) and len(self._jobs) == 1:
            answer = await self._go_on_offline(job, answer)
            if job not in self._jobs:
                return
        job.answer, job.work = answer, copy.copy(self._activity.progress)
        if answer.error is not None:
            self._drop_after(job)
        self._begin_next()
        if job is self._jobs.first and job.is_on_stream:
            self._begin_upload(answer)

    def _drop_after(self, job: Job) -> None:
        """Drop what follows on an instruction without an update: it would not count."""
        if (following := self._jobs.next) is not None and following is not job:
            self._jobs.drop_from(following)

    def _has_no_link(self, job: Job) -> bool:
        """Whether no stream has carried the instruction since the last one was lost."""
        return not job.is_on_stream

    async def _go_on_offline(self, job: Job, answer: NodeAnswer) -> NodeAnswer:
        """Let the node add to its answer until the link is back or the server gives up.

        Nothing of the answer's vector has been sent, as the server has asked for none of it: after
        that nothing is added, because it may have counted it.
        """
        further = self._node.no_link(job.instruction.head_json, answer)
        if further is None:
            return answer
        self._is_offline = True
        try:
            while job in self._jobs and self._has_no_link(job):
                found = await asyncio.to_thread(next, further, None)
                if found is None:
                    break
                answer = found
        finally:
            self._is_offline = False
        return answer

    def _abort(self) -> None:
        """Abort all instructions and the upload: the server no longer waits for them."""
        if (first := self._jobs.first) is not None:
            self._abort_from(first)
        elif self._upload is not None:
            self._upload.abort()

    def _abort_from(self, job: Job) -> None:
        """Abort an instruction, and the one that follows on it."""
        is_first, running = job is self._jobs.first, self._jobs.running
        self._jobs.drop_from(job)
        if is_first:
            self._activity.enter(WAITING)
            if self._upload is not None:
                self._upload.abort()
        if running is not None and running not in self._jobs and self._is_training:
            self._node.abort()

    def _begin_upload(self, answer: NodeAnswer) -> None:
        self._upload = upload = Upload(answer, is_shown=self._jobs.running is None)
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
        first = self._jobs.first
        if upload.is_aborted or first is None or first.message_id != answer.message_id:
            return
        self._jobs.drop_first()
        self._arrived(first)

    def _arrived(self, job: Job) -> None:
        """Note that an instruction's answer is at the server; send the next one if it is there."""
        first = self._jobs.first
        if first is None or first.answer is not None:
            self._activity.enter(WAITING)
        if job.answer is not None and len(job.answer.vector):
            self._node.delivered(has_next=first is not None)
            self._activity.sent(job.work)
        if first is None:
            self.became_idle.set()
        elif first.answer is not None and first.is_on_stream:
            self._begin_upload(first.answer)
