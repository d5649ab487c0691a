"""One stream from its first frame to its last: what a device says is read, what it is told written.

The first frame is a hello, which ``server.transport.doorway`` turns into a session or refuses. Replies and
their chunks go on to ``server.transport.uploads``. Whatever is wrong ends the stream with a named error, of
which the device is told as long as anything can be sent to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from headwater.common.errors import ConnectionLost, HeadwaterError, ProtocolMismatch, error_of
from headwater.common.transport.limits import HELLO_SECONDS
from headwater.common.transport.wire_pb2 import ClientFrame, Fault, Hello, Leave, ServerFrame
from headwater.server.enrolment.peer_certificates import CertificateVerifier
from headwater.server.transport.device_records import DeviceRecords
from headwater.server.transport.doorway import Doorway
from headwater.server.transport.downloads import GRPC_FRAME_BYTES, Downloads
from headwater.server.transport.session import ClosingStreams, DeviceSession, Sessions, Stream
from headwater.server.transport.uploads import Uploads, fault_frame

log = logging.getLogger(__name__)

FAULT_SECONDS = 5.0  # for a device to be told why its stream ends
WRITER_SECONDS = 0.25  # for what is on its way out to end
# Frames that wait for one device; an honest one has a handful.
MAX_OUTBOX_FRAMES = 1000
MAX_FAULT_CODE, MAX_FAULT_TEXT = 100, 1000
BROKEN = (
    grpc.RpcError,
    grpc.aio.UsageError,
    grpc.aio.InternalError,
    asyncio.InvalidStateError,
)


class Streams:
    """Serves streams; everything here runs in the intake's event loop."""

    def __init__(
        self,
        sessions: Sessions,
        displaced: ClosingStreams,
        *,
        doorway: Doorway,
        identities: CertificateVerifier,
        attendance: DeviceRecords,
        uploads: Uploads,
        downloads: Downloads,
    ) -> None:
        self.num_bytes = 0
        """That were read."""
        self._sessions = sessions
        self._displaced = displaced
        self._doorway = doorway
        self._identities = identities
        self._attendance = attendance
        self._uploads = uploads
        self._downloads = downloads
        self._refusals = uploads.refusals
        self._writers: set[asyncio.Task[None]] = set()

    async def serve(self, stream: Stream) -> None:
        """Serve one stream from its first frame to its last."""
        session: DeviceSession | None = None
        if not self._doorway.may_knock(stream):
            return  # without a word: a device of ours that was not at fault tries again
        try:
            session = self._doorway.welcome(stream, await self._hello(stream))
            writer = asyncio.create_task(self._write_all(session))
            self._writers.add(writer)  # asyncio itself holds tasks weakly
            writer.add_done_callback(self._writers.discard)
            try:
                await self._read_all(session, stream)
            finally:
                writer.cancel()
                await asyncio.wait([writer], timeout=WRITER_SECONDS)
        except HeadwaterError as error:
            if session is not None and session.sending_since is not None:
                # A frame is stuck on its way out: behind it no fault and no status can be sent.
                self._doorway.count(stream, error)
                raise asyncio.CancelledError from error
            await self._turn_away(stream, error)
        except asyncio.CancelledError:
            if stream not in self._displaced:
                raise
            displaced = self._displaced.pop(stream)
            if displaced is not None:
                await self._turn_away(stream, displaced)
        except BROKEN as error:
            log.debug("stream lost: %s", error)
        finally:
            self._displaced.pop(stream, None)
            if session is not None and session.stream is stream:
                self._lose(session)

    def _lose(self, session: DeviceSession) -> None:
        """Keep a session without its stream: the device may come back."""
        session.stream, session.task, session.lost_at = None, None, time.monotonic()
        session.outbox, session.sending_since = asyncio.Queue(), None
        self._uploads.pause(session)
        if session.known is not None:
            self._attendance.disconnected(session.known)
        log.info("%s disconnected", session.name)

    async def _turn_away(self, stream: Stream, error: HeadwaterError) -> None:
        """Tell a device why its stream ends."""
        self._doorway.count(stream, error)
        with contextlib.suppress(TimeoutError, *BROKEN):
            async with asyncio.timeout(FAULT_SECONDS):
                await self._downloads.write(stream, fault_frame(error))

    async def _write_all(self, session: DeviceSession) -> None:
        """Send what is in the outbox, in order; write() waits where the device reads slowly."""
        outbox = session.outbox
        try:
            while True:
                send = await outbox.get()
                session.sending_since = time.monotonic()
                await send()
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
            raise ProtocolMismatch("a frame that is not of this protocol") from None

    async def _hello(self, stream: Stream) -> Hello:
        try:
            frame = await asyncio.wait_for(self._read(stream), HELLO_SECONDS)
        except TimeoutError:
            raise ProtocolMismatch(f"no hello within {HELLO_SECONDS} s") from None
        if frame is None or frame.WhichOneof("kind") != "hello":
            raise ProtocolMismatch("the first frame of a stream must be a hello")
        return frame.hello

    async def _read_all(self, session: DeviceSession, stream: Stream) -> None:
        while (frame := await self._read(stream)) is not None:
            session.heard_at = time.monotonic()
            if not session.frames.take(session.heard_at):
                raise ProtocolMismatch(f"{session.name} sends frames without end")
            if session.known is not None:
                session.known.bytes_up += frame.ByteSize() + GRPC_FRAME_BYTES
            if session.outbox.qsize() > MAX_OUTBOX_FRAMES:
                raise ProtocolMismatch(f"{session.name} does not read what it is sent")
            match frame.WhichOneof("kind"):
                case "reply":
                    self._uploads.announce(session, frame.reply)
                case "chunk":
                    self._uploads.take_chunk(session, frame.chunk)
                case "fault":
                    self._take_fault(session, frame.fault)
                case "renewal" if session.shown is not None:
                    answer = self._identities.renew(session.shown, frame.renewal.signing_request)
                    self._downloads.send(session, ServerFrame(certificate=answer))
                case "leave":
                    self._leave(session, frame.leave)
                    return
                case other:
                    raise ProtocolMismatch(f"a frame of kind {other} in mid-stream")

    def _take_fault(self, session: DeviceSession, fault: Fault) -> None:
        ask = session.ask
        if ask is not None and fault.message_id == ask.message_id:
            code, text = fault.code[:MAX_FAULT_CODE], fault.text[:MAX_FAULT_TEXT]
            self._uploads.answer(session, error_of(code, text))

    def _leave(self, session: DeviceSession, leave: Leave) -> None:
        """Let a device go; why one leaves for a while is counted and noted like a refusal."""
        why: HeadwaterError = ConnectionLost(f"{session.name} left")
        if leave.code:
            text = f"{session.name}: {leave.text[:MAX_FAULT_TEXT]}"
            why = error_of(leave.code[:MAX_FAULT_CODE], text)
            self._refusals[why.code] += 1
            self._attendance.refuse(session.name, why)
            log.warning("%s left for a while: %s: %s", session.name, why.code, why)
        else:
            log.info("%s left", session.name)
        self._uploads.answer(session, why)
        self._sessions.pop(session.node_id, None)
