"""Serves one device's stream: reads its frames and writes its outbox, until either side ends it.

The first frame is a hello, which ``server.transport.admission`` turns into a session or refuses.
Replies and their chunks go to ``server.transport.uploads``. Any violation ends the stream with a
named error, which is sent to the device if the stream still accepts a frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from headwater.common.errors import (
    ConnectionLost,
    HeadwaterError,
    ProtocolMismatch,
    TaskBundleRefused,
    error_of,
)
from headwater.common.transport.limits import HELLO_SECONDS
from headwater.common.transport.wire_pb2 import (
    ClientFrame,
    Fault,
    Hello,
    Leave,
    OtherTask,
    Progress,
    ServerFrame,
)
from headwater.server.transport.admission import Admission, OtherTaskNeeded
from headwater.server.transport.connections import Connections
from headwater.server.transport.downloads import GRPC_FRAME_BYTES
from headwater.server.transport.session import DeviceSession, Stream
from headwater.server.transport.uploads import fault_frame

log = logging.getLogger(__name__)

FAULT_SECONDS = 5.0  # time limit for sending the final error
WRITER_SECONDS = 0.25  # time limit for a write in progress to end
# Limit on frames that wait for one device; an honest device has a handful.
MAX_OUTBOX_FRAMES = 1000
MAX_FAULT_CODE, MAX_FAULT_TEXT = 100, 1000
BROKEN = (
    grpc.RpcError,
    grpc.aio.UsageError,
    grpc.aio.InternalError,
    asyncio.InvalidStateError,
)


class Streams:
    """Serves streams; all methods run in the servicer's event loop."""

    def __init__(self, connections: Connections, admission: Admission) -> None:
        self.num_bytes = 0
        """Bytes read so far."""
        self._connections = connections
        self._admission = admission
        self._writers: set[asyncio.Task[None]] = set()

    async def serve(self, stream: Stream) -> None:
        """Serve one stream from its first frame to its last."""
        session: DeviceSession | None = None
        hello = Hello()
        if not self._admission.has_attempts_left(stream):
            return  # silently: an honest device behind the same address retries
        try:
            hello = await self._read_hello(stream)
            session = self._admission.admit(stream, hello)
            writer = asyncio.create_task(self._write_all(session))
            self._writers.add(writer)  # asyncio itself holds only weak references to tasks
            writer.add_done_callback(self._writers.discard)
            try:
                await self._read_all(session, stream)
            finally:
                writer.cancel()
                await asyncio.wait([writer], timeout=WRITER_SECONDS)
        except HeadwaterError as error:
            if session is not None:
                self._connections.uploads.fail(session, error)  # no round waits for its return
            if session is not None and session.sending_since is not None:
                # A write is stuck: no fault and no status can be sent after it.
                self._admission.count_refusal(stream, error)
                raise asyncio.CancelledError from error
            await self._refuse(stream, error)
        except OtherTaskNeeded as needed:
            offered = OtherTask(name=needed.name, bundle=needed.bundle)
            await self._send_away(stream, offered, device=hello.name)
        except asyncio.CancelledError:
            if stream not in self._connections.closing:
                raise
            reason = self._connections.closing.pop(stream)
            if reason is not None:
                await self._refuse(stream, reason)
        except BROKEN as error:
            log.debug("stream lost: %s", error)
        finally:
            self._connections.closing.pop(stream, None)
            if session is not None and not session.has_answered:
                self._admission.note_unanswered(stream)
            if session is not None and session.stream is stream:
                self._detach(session)

    def _detach(self, session: DeviceSession) -> None:
        """Keep the session without its stream: the device may return."""
        session.stream, session.task, session.lost_at = None, None, time.monotonic()
        session.outbox, session.sending_since = asyncio.Queue(), None
        self._connections.uploads.pause(session)
        if session.record is not None:
            self._connections.device_records.note_disconnected(session.record)
        log.info("%s disconnected", session.name)

    async def _refuse(self, stream: Stream, error: HeadwaterError) -> None:
        """Count a refusal and send the error to the device."""
        self._admission.count_refusal(stream, error)
        with contextlib.suppress(TimeoutError, *BROKEN):
            async with asyncio.timeout(FAULT_SECONDS):
                await self._connections.downloads.write(stream, fault_frame(error))

    async def _send_away(self, stream: Stream, task: OtherTask, *, device: str) -> None:
        """Send a device away to load another task; record why it refuses one from here."""
        self._admission.note_unanswered(stream)
        answer: ClientFrame | None = None
        with contextlib.suppress(TimeoutError, ProtocolMismatch, *BROKEN):
            async with asyncio.timeout(FAULT_SECONDS):
                await self._connections.downloads.write(stream, ServerFrame(other_task=task))
                answer = await self._read(stream) if task.bundle else None
        if answer is None or answer.leave.code != TaskBundleRefused.__name__:
            return
        error = TaskBundleRefused(f"{device}: {answer.leave.text[:MAX_FAULT_TEXT]}")
        self._connections.uploads.refusals[error.code] += 1
        self._connections.device_records.note_refusal(device, error)
        log.warning("%s takes no part: %s: %s", device, error.code, error)

    async def _write_all(self, session: DeviceSession) -> None:
        """Write the outbox in order; write() waits while the device reads slowly."""
        outbox = session.outbox
        try:
            while True:
                write = await outbox.get()
                session.sending_since = time.monotonic()
                await write()
                session.sending_since = None
        except BROKEN:
            log.debug("%s: the stream broke while sending", session.name)

    async def _read(self, stream: Stream) -> ClientFrame | None:
        data = await stream.read()
        if data is grpc.aio.EOF:
            return None
        self.num_bytes += len(data) + GRPC_FRAME_BYTES
        try:
            return ClientFrame.FromString(data)
        except DecodeError:
            raise ProtocolMismatch("received a frame that is not of this protocol") from None

    async def _read_hello(self, stream: Stream) -> Hello:
        try:
            frame = await asyncio.wait_for(self._read(stream), HELLO_SECONDS)
        except TimeoutError:
            raise ProtocolMismatch(f"received no hello within {HELLO_SECONDS} s") from None
        if frame is None or frame.WhichOneof("kind") != "hello":
            raise ProtocolMismatch("the first frame of a stream must be a hello")
        return frame.hello

    async def _read_all(self, session: DeviceSession, stream: Stream) -> None:
        while await self._read_next(session, stream):
            pass

    async def _read_next(self, session: DeviceSession, stream: Stream) -> bool:
        """Take the next frame; return False at the stream's end.

        The frame is freed here: kept until the next one, a last chunk took a megabyte per device.
        """
        frame = await self._read(stream)
        if frame is None:
            return False
        session.heard_at = time.monotonic()
        if not session.frame_limit.take(session.heard_at, num_bytes=frame.ByteSize()):
            raise ProtocolMismatch(f"{session.name} sends too many frames, or bytes")
        if session.record is not None:
            session.record.bytes_up += frame.ByteSize() + GRPC_FRAME_BYTES
        if session.outbox.qsize() > MAX_OUTBOX_FRAMES:
            raise ProtocolMismatch(f"{session.name} does not read the server's frames")
        match frame.WhichOneof("kind"):
            case "reply":
                self._connections.uploads.announce(session, frame.reply)
            case "chunk":
                self._connections.uploads.take_chunk(session, frame.chunk)
            case "fault":
                self._take_fault(session, frame.fault)
            case "renewal" if session.certificate is not None:
                request = frame.renewal.signing_request
                answer = self._connections.verifier.renew(session.certificate, request)
                self._connections.downloads.send(session, ServerFrame(certificate=answer))
            case "progress":
                self._take_progress(session, frame.progress)
            case "leave":
                self._leave(session, frame.leave)
                return False
            case other:
                raise ProtocolMismatch(f"received a frame of kind {other} after the hello")
        return True

    def _take_fault(self, session: DeviceSession, fault: Fault) -> None:
        instruction = session.instruction
        if instruction is not None and fault.message_id == instruction.message_id:
            code, text = fault.code[:MAX_FAULT_CODE], fault.text[:MAX_FAULT_TEXT]
            self._connections.uploads.fail(session, error_of(code, text))

    def _take_progress(self, session: DeviceSession, progress: Progress) -> None:
        instruction = session.instruction
        if instruction is not None and progress.message_id == instruction.message_id:
            self._connections.device_records.note_steps(session.name, progress.num_steps)

    def _leave(self, session: DeviceSession, leave: Leave) -> None:
        """End a session at the device's request; a stated reason is recorded like a refusal."""
        reason: HeadwaterError = ConnectionLost(f"{session.name} left")
        if leave.code:
            text = f"{session.name}: {leave.text[:MAX_FAULT_TEXT]}"
            reason = error_of(leave.code[:MAX_FAULT_CODE], text)
            self._connections.uploads.refusals[reason.code] += 1
            self._connections.device_records.note_refusal(session.name, reason)
            log.warning("%s left for a while: %s: %s", session.name, reason.code, reason)
        else:
            log.info("%s left", session.name)
        self._connections.uploads.fail(session, reason)
        self._connections.sessions.pop(session.node_id, None)
