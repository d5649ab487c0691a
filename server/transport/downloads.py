"""Frames to the devices: welcomes, receipts, instructions, and the model in chunks.

Each chunk of the model is serialised once for all devices that read at about the same pace.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AsyncExitStack
from functools import lru_cache, partial

from headwater.common.flower.sent_model import ModelDifference
from headwater.common.transport.limits import CHUNK_BYTES, SMALL_IMAGE_BYTES
from headwater.common.transport.wire_pb2 import Chunk, Image, Instruction, ServerFrame
from headwater.server.transport.session import DeviceInstruction, DeviceSession, Stream

GRPC_FRAME_BYTES = 5
CACHED_CHUNKS = 4
# Chunks of models that may wait inside gRPC at once, over all devices; and those of devices that
# read slowly, which hold no other device up.
MAX_CHUNKS_IN_FLIGHT, MAX_SLOW_CHUNKS = 32, 256
SLOW_AFTER_SECONDS = 3.0


class Downloads:
    """Sends frames to the devices; all methods run in the servicer's event loop."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._images: dict[int, tuple[str, memoryview]] = {}
        """The models of the open instructions with their digests, by the identity of the memory."""
        self._frozen: tuple[str, memoryview] | None = None
        self._in_flight = asyncio.Semaphore(MAX_CHUNKS_IN_FLIGHT)
        self._slow = asyncio.Semaphore(MAX_SLOW_CHUNKS)
        self._frame = lru_cache(maxsize=CACHED_CHUNKS)(self._make_frame)

    def send(self, session: DeviceSession, frame: ServerFrame) -> None:
        """Put a frame into a session's outbox; does nothing if the session has no stream.

        A receipt is written before what is left of a model: an upload waits for its first one.
        """
        if session.stream is None:
            return
        if frame.WhichOneof("kind") == "receipt":
            session.receipts.append(frame)
            session.outbox.put_nowait(partial(self._write_receipts, session, session.stream))
        else:
            session.outbox.put_nowait(partial(self.write, session.stream, frame, session))

    async def _write_receipts(self, session: DeviceSession, stream: Stream) -> None:
        while session.receipts and session.stream is stream:
            await self.write(stream, session.receipts.popleft(), session)

    def send_instruction(
        self, session: DeviceSession, instruction: DeviceInstruction, *, is_known: bool = False
    ) -> None:
        """Put an instruction into a session's outbox, with its model if the device lacks it.

        A device to which it ``is_known`` has done its work, and needs no model for it.
        """
        if session.stream is not None:
            write = partial(self._write_instruction, session, instruction, session.stream, is_known)
            session.outbox.put_nowait(write)

    def lacks_model(self, session: DeviceSession, instruction: DeviceInstruction) -> bool:
        """Return whether the instruction needs a model that the device does not have."""
        image = self._image_of(instruction)
        return image is not None and session.image_id != image[0]

    def _image_of(self, instruction: DeviceInstruction) -> tuple[str, memoryview] | None:
        memory = instruction.image
        return None if memory is None else self._images.get(id(memory.obj))

    async def write(
        self, stream: Stream, frame: ServerFrame, session: DeviceSession | None = None
    ) -> None:
        """Write a frame and count its bytes; waits while the device reads slowly."""
        await self._write_bytes(stream, frame.SerializeToString(), session)

    async def _write_bytes(
        self, stream: Stream, data: bytes, session: DeviceSession | None
    ) -> None:
        num_bytes = len(data) + GRPC_FRAME_BYTES
        self.num_bytes += num_bytes
        if session is not None and session.record is not None:
            session.record.bytes_down += num_bytes
        await stream.write(data)

    async def set_models(
        self, instructions: Collection[DeviceInstruction], earlier: Iterable[DeviceInstruction]
    ) -> None:
        """Take over the models of these instructions, and the frozen part, if they have one.

        The models of ``earlier`` instructions that are still open are kept.
        """
        frozen = {one.frozen_id: one.frozen for one in instructions if one.frozen is not None}
        for part in frozen.items():
            self._frozen = part
        images = {id(one.image.obj): one.image for one in instructions if one.image is not None}
        if not images and not frozen:
            return
        self.clear_frames()
        if images:
            in_use = {id(one.image.obj) for one in earlier if one.image is not None}
            self._images = {key: one for key, one in self._images.items() if key in in_use}
        for key, image in images.items():
            digest = await asyncio.to_thread(lambda data: hashlib.sha256(data).hexdigest(), image)
            self._images[key] = (digest, image)

    def clear_frames(self) -> None:
        """Drop the serialised chunks, because the model may change."""
        self._frame.cache_clear()

    async def _write_instruction(
        self,
        session: DeviceSession,
        instruction: DeviceInstruction,
        stream: Stream,
        is_known: bool,
    ) -> None:
        """Write an instruction and what belongs to it, unless it was cancelled; time it."""
        if session.stream is not stream or not session.awaits(instruction):
            return
        begun = time.monotonic()
        try:
            await self._write_parts(session, instruction, stream, is_known=is_known)
        finally:
            session.seconds_down += time.monotonic() - begun
        if session.instruction is instruction and session.stage == "planned":
            session.stage = "computing"

    async def _write_parts(
        self,
        session: DeviceSession,
        instruction: DeviceInstruction,
        stream: Stream,
        *,
        is_known: bool,
    ) -> None:
        """Write the model if the device does not have it, or the frozen part; then the rest."""
        image_id, small_image = "", b""
        image = None if is_known else self._image_of(instruction)
        if instruction.image is not None and image is not None:
            image_id = image[0]
            is_held = session.image_id == image_id
            difference = None if is_held else await _difference(session, instruction)
            if session.stream is not stream or not session.awaits(instruction):
                return  # it was cancelled meanwhile, and its model may be gone
            if difference is not None and difference.image_id == image_id:
                session.image_id = ""
                if not await self._write_difference(session, instruction, stream, difference):
                    return
            elif not is_held:
                if len(instruction.image) < SMALL_IMAGE_BYTES:
                    small_image = self._frame(image_id, 0)
                else:
                    session.image_id = ""
                    if not await self._write_image(session, instruction, stream, image):
                        return
            session.image_id = image_id
        frozen = None if instruction.frozen is None else self._frozen
        if frozen and not await self._write_image(session, instruction, stream, frozen):
            return
        if session.awaits(instruction):
            message = Instruction(
                message_id=instruction.message_id,
                message_type=instruction.message_type,
                head_json=instruction.head_json,
                image_id=image_id,
                frozen_id=instruction.frozen_id,
                beside=instruction.vector,
            )
            # Two serialised messages in a row parse as one message with the fields of both.
            data = ServerFrame(instruction=message).SerializeToString() + small_image
            await self._write_bytes(stream, data, session)

    async def _write_image(
        self,
        session: DeviceSession,
        instruction: DeviceInstruction,
        stream: Stream,
        image: tuple[str, memoryview],
    ) -> bool:
        """Write the model or the frozen part; return False if the instruction was cancelled.

        The model may change once the round has closed.
        """
        image_id, memory = image
        head = Image(
            image_id=image_id,
            num_bytes=len(memory),
            sha256=bytes.fromhex(image_id),
            is_frozen=image is self._frozen,
        )
        frame = partial(self._frame, image_id)
        return await self._write_chunks(session, instruction, stream, head, frame)

    async def _write_difference(
        self,
        session: DeviceSession,
        instruction: DeviceInstruction,
        stream: Stream,
        difference: ModelDifference,
    ) -> bool:
        """Write a difference to the model that the device holds; return as ``_write_image``."""
        head = Image(
            image_id=difference.image_id,
            num_bytes=len(difference.data),
            sha256=bytes.fromhex(difference.image_id),
            difference=difference.method,
            base_id=difference.base_id,
        )

        def frame(offset: int) -> bytes:
            data = bytes(memoryview(difference.data)[offset : offset + CHUNK_BYTES])
            chunk = Chunk(transfer_id=difference.image_id, offset=offset, data=data)
            return ServerFrame(chunk=chunk).SerializeToString()

        return await self._write_chunks(session, instruction, stream, head, frame)

    async def _write_chunks(
        self,
        session: DeviceSession,
        instruction: DeviceInstruction,
        stream: Stream,
        head: Image,
        frame: Callable[[int], bytes],
    ) -> bool:
        """Write an announcement and its chunks; return as ``_write_image``."""
        await self.write(stream, ServerFrame(image=head), session)
        for offset in range(0, head.num_bytes, CHUNK_BYTES):
            await self._write_receipts(session, stream)
            if not session.awaits(instruction) or session.stream is not stream:
                return False
            await self._write_in_turn(session, stream, partial(frame, offset))
        return True

    async def _write_in_turn(
        self, session: DeviceSession, stream: Stream, frame: Callable[[], bytes]
    ) -> None:
        """Write a chunk when there is a place; one that takes long leaves it to other devices."""
        session.sending_since = None  # waiting for a place is not this device's fault
        async with AsyncExitStack() as at_end:
            async with self._in_flight:
                session.sending_since = time.monotonic()
                writing = asyncio.create_task(self._write_bytes(stream, frame(), session))
                at_end.callback(writing.cancel)
                await asyncio.wait({writing}, timeout=SLOW_AFTER_SECONDS)
                if self._slow.locked():  # memory for no more of them
                    await writing
            if not writing.done():
                await at_end.enter_async_context(self._slow)
            await writing

    def _make_frame(self, image_id: str, offset: int) -> bytes:
        images = [*self._images.values(), *([] if self._frozen is None else [self._frozen])]
        memory = next((memory for id_, memory in images if id_ == image_id), None)
        if memory is None:
            raise RuntimeError("the model changed while it was being sent")
        data = bytes(memory[offset : offset + CHUNK_BYTES])
        is_frozen = self._frozen is not None and memory is self._frozen[1]
        if len(memory) < SMALL_IMAGE_BYTES and not is_frozen:
            return ServerFrame(small_image=data).SerializeToString()
        chunk = Chunk(transfer_id=image_id, offset=offset, data=data)
        return ServerFrame(chunk=chunk).SerializeToString()


async def _difference(
    session: DeviceSession, instruction: DeviceInstruction
) -> ModelDifference | None:
    """Return what the device needs in place of the instruction's model, if it may be less."""
    if instruction.difference_from is None:
        return None
    return await asyncio.to_thread(instruction.difference_from, session.image_id)
