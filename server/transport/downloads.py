"""Frames on their way out: the model in chunks, each serialised once for all that keep step."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable
from functools import lru_cache, partial

from headwater.common.transport.limits import CHUNK_BYTES, SMALL_IMAGE_BYTES
from headwater.common.transport.wire_pb2 import Chunk, Image, Instruction, ServerFrame
from headwater.server.transport.session import DeviceInstruction, DeviceSession, Stream

GRPC_FRAME_BYTES = 5
CACHED_FRAMES = 4
# Chunks of models that wait in gRPC for their devices to read them, over all devices.
FRAMES_AT_ONCE = 32


class Downloads:
    """What is sent to the devices; everything here runs in the intake's event loop."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._image: tuple[str, memoryview] | None = None
        self._sending = asyncio.Semaphore(FRAMES_AT_ONCE)
        self._frame = lru_cache(maxsize=CACHED_FRAMES)(self._make_frame)

    def send(self, session: DeviceSession, frame: ServerFrame) -> None:
        """Put a frame into a session's outbox; one without a stream is sent nothing."""
        if session.stream is not None:
            session.outbox.put_nowait(partial(self.write, session.stream, frame, session))

    def push(self, session: DeviceSession, ask: DeviceInstruction) -> None:
        """Put an instruction into a session's outbox, with its model if the device lacks it."""
        if session.stream is not None:
            session.outbox.put_nowait(partial(self._send_ask, session, ask, session.stream))

    async def write(
        self, stream: Stream, frame: ServerFrame, session: DeviceSession | None = None
    ) -> None:
        """Write a frame, and count it for its device; waits where that reads slowly."""
        await self._write_bytes(stream, frame.SerializeToString(), session)

    async def _write_bytes(
        self, stream: Stream, data: bytes, session: DeviceSession | None
    ) -> None:
        num_bytes = len(data) + GRPC_FRAME_BYTES
        self.num_bytes += num_bytes
        if session is not None and session.known is not None:
            session.known.bytes_down += num_bytes
        await stream.write(data)

    async def offer(self, asks: Iterable[DeviceInstruction]) -> None:
        """Take note of the model that goes with the asks, if any does."""
        self.forget_frames()
        images = {id(ask.image.obj): ask.image for ask in asks if ask.image is not None}
        for image in images.values():
            digest = await asyncio.to_thread(lambda data: hashlib.sha256(data).hexdigest(), image)
            self._image = (digest, image)

    def forget_frames(self) -> None:
        """Let go of the chunks that were serialised: the model may change."""
        self._frame.cache_clear()

    async def _send_ask(
        self, session: DeviceSession, ask: DeviceInstruction, stream: Stream
    ) -> None:
        """Send an instruction, behind its model if the device does not have it."""
        image_id, beside = "", b""
        if session.stream is not stream or session.ask is not ask:
            return
        if ask.image is not None and self._image is not None:
            image_id = self._image[0]
            if session.image_id != image_id:
                if len(ask.image) < SMALL_IMAGE_BYTES:
                    beside = self._frame(image_id, 0)
                elif not await self._send_image(session, ask, stream):
                    return
            session.image_id = image_id
        if session.ask is ask:
            instruction = Instruction(
                message_id=ask.message_id,
                message_type=ask.message_type,
                head_json=ask.head_json,
                image_id=image_id,
                beside=ask.beside,
            )
            # One serialised message behind another is both in one.
            data = ServerFrame(instruction=instruction).SerializeToString() + beside
            await self._write_bytes(stream, data, session)

    async def _send_image(
        self, session: DeviceSession, ask: DeviceInstruction, stream: Stream
    ) -> bool:
        """Send the model; False if its round closed meanwhile, and the model may have changed."""
        if self._image is None:
            return False
        image_id, memory = self._image
        session.image_id = ""
        head = Image(image_id=image_id, num_bytes=len(memory), sha256=bytes.fromhex(image_id))
        await self.write(stream, ServerFrame(image=head), session)
        for offset in range(0, len(memory), CHUNK_BYTES):
            if session.ask is not ask or session.stream is not stream:
                return False
            session.sending_since = None  # waiting for others is no fault of this device
            async with self._sending:
                session.sending_since = time.monotonic()
                await self._write_bytes(stream, self._frame(image_id, offset), session)
        return True

    def _make_frame(self, image_id: str, offset: int) -> bytes:
        if self._image is None or self._image[0] != image_id:
            raise RuntimeError("the model changed while it was being sent")
        data = bytes(self._image[1][offset : offset + CHUNK_BYTES])
        if len(self._image[1]) < SMALL_IMAGE_BYTES:
            return ServerFrame(small_image=data).SerializeToString()
        chunk = Chunk(transfer_id=image_id, offset=offset, data=data)
        return ServerFrame(chunk=chunk).SerializeToString()
