"""The server's end of the stream: devices connect, are pushed instructions, and upload in chunks.

One event loop in a thread of its own serves every stream; the rounds talk to it through
``ask``, ``withdraw`` and the queue ``arrivals``. What is wrong with a device or an upload is
refused by a named error, before anything of it reaches the sum: ``server.admission`` does so for a
hello, ``server.uploads`` for replies. What is sent is in ``server.downloads``.
A stream that says nothing, or does not read what it is sent, is closed; an upload that stands still
is given up.

A device that loses its connection may come back with its session's token within
``reconnect_seconds``: its instruction still stands, and its upload goes on from the last byte that
arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import hmac
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from common.errors import (
    ConnectionLost,
    HeadwaterError,
    IdentityRefused,
    LateUpdate,
    NoStream,
    ProtocolMismatch,
    TooManyAttempts,
    error_of,
)
from common.tls import Credentials
from common.wire import HELLO_SECONDS, METHOD, PROTOCOL_VERSION
from common.wire_pb2 import (
    ClientFrame,
    Fault,
    Goodbye,
    Hello,
    Leave,
    Notice,
    ServerFrame,
    Welcome,
)
from server.admission import Admission
from server.attendance import Attendance
from server.downloads import GRPC_FRAME_BYTES, Downloads
from server.health import Health
from server.identities import Identities, Shown
from server.port import Port
from server.ration import Frames, Ration, subscriber
from server.sessions import Arrival, Ask, Session, Stream, Work, node_id_of
from server.staging import StagingRoom
from server.uploads import Uploads, fault_frame

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25
CLOSE_SECONDS = 5.0
ALIVE_SECONDS = 1.0
# Frames that wait for one device; an honest one has a handful.
MAX_OUTBOX_FRAMES = 1000
MAX_FAULT_CODE, MAX_FAULT_TEXT = 100, 1000
BROKEN = (
    grpc.RpcError,
    grpc.aio.UsageError,
    grpc.aio.InternalError,
    asyncio.InvalidStateError,
)


class Intake:
    """Serves the devices' streams in a thread of its own."""

    def __init__(
        self,
        address: str,
        *,
        run_id: int,
        credentials: Credentials | None,
        staging_bytes: int,
        reconnect_seconds: float,
        spool_folder: Path | None = None,
        identities: Identities | None = None,
        attendance: Attendance | None = None,
    ) -> None:
        self.bytes_up = 0
        self.attendance = attendance or Attendance()
        self.port = 0
        self._address = address
        self._run_id = run_id
        self._credentials = credentials
        self._room = StagingRoom(staging_bytes, spool_folder=spool_folder)
        self._uploads = Uploads(self._room, send=self._send)
        self.arrivals = self._uploads.arrivals
        self.refusals = self._uploads.refusals
        self._reconnect_seconds = reconnect_seconds
        self._identities = identities or Identities()
        self._admission = Admission(self._identities)
        self._downloads = Downloads()
        self._sessions: dict[int, Session] = {}
        self._writers: set[asyncio.Task[None]] = set()
        # Streams that are ended, and what their devices are told; None: to come back.
        self._displaced: dict[Stream, HeadwaterError | None] = {}
        self._is_closing = False
        self._is_paused = False
        self._health = Health()
        self._ration = Ration()
        self._port: Port | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="intake", daemon=True)

    # What the rounds call, from their own thread.

    def start(self) -> None:
        """Open the port.

        Raises:
            PortInUse: it cannot be had.
        """
        self._thread.start()
        self._call(self._open())

    def stop(self, *, say_goodbye: bool) -> None:
        """Close every stream; with a goodbye the devices know that the run has ended."""
        self._call(self._close(say_goodbye=say_goodbye))
        self._is_closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def expect_layout(self, digest: str) -> None:
        """Let only devices in whose model is laid out like this."""
        self._admission.layout_digest = digest

    @property
    def bytes_down(self) -> int:
        """The bytes that were sent to devices."""
        return self._downloads.num_bytes

    @property
    def staged_bytes(self) -> int:
        """The bytes of uploads that are held in RAM now."""
        return self._room.held_bytes

    def connected(self) -> list[int]:
        """Return the nodes that are connected now."""
        return [s.node_id for s in list(self._sessions.values()) if s.stream is not None]

    def name_of(self, node_id: int) -> str | None:
        """Return the name in a device's hello, which with TLS is that of its certificate."""
        session = self._sessions.get(node_id)
        return None if session is None else session.name

    def pause(self, is_paused: bool) -> None:
        """Tell the devices, and those that come, that rounds are held back, or go on."""
        with contextlib.suppress(RuntimeError):  # closed: there is nobody to tell
            self._loop.call_soon_threadsafe(self._pause, is_paused)

    def drain(self) -> None:
        """Tell those who ask for this server's health that it takes no more work."""
        self._health.is_serving = False

    def is_alive(self, *, within_seconds: float = ALIVE_SECONDS) -> bool:
        """Whether the event loop answers."""
        answered = threading.Event()
        try:
            self._loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # closed
            return False
        return answered.wait(within_seconds)

    def ask(self, asks: Sequence[Ask]) -> None:
        """Send instructions; their answers come to ``arrivals``."""
        self._call(self._ask(asks))

    def withdraw(self, message_ids: Sequence[str]) -> None:
        """Forget asks whose answers nobody waits for any more, and stop sending their model."""
        if not self._is_closing:
            self._call(self._withdraw(set(message_ids)))

    def refuse(self, node_id: int, error: HeadwaterError) -> None:
        """Turn a device away, and whoever comes under its name until the server ends."""
        self._call(self._refuse(node_id, error))

    def _call(self, work: Work) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # The event loop's side.

    async def _open(self) -> None:
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        service, method = METHOD.lstrip("/").split("/")
        streams = grpc.method_handlers_generic_handler(service, {method: handler})
        port = Port(self._address, self._credentials, (streams, self._health.rpc_handler()))
        await port.open()
        self._port, self.port = port, port.number
        self._warden = asyncio.create_task(self._watch_lost())

    async def _close(self, *, say_goodbye: bool) -> None:
        self._is_closing = True
        self._health.is_serving = False
        if self._port is None:
            return
        self._warden.cancel()
        if say_goodbye:
            for session in self._sessions.values():
                self._send(session, ServerFrame(goodbye=Goodbye()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    while self.connected():
                        await asyncio.sleep(0.01)
        await self._port.close()
        for session in self._sessions.values():
            self._uploads.drop(session)

    async def _serve(self, _: Any, stream: Stream) -> None:
        """Serve one stream from its first frame to its last."""
        session: Session | None = None
        if self._is_closing:
            return  # a device that stays, and is back already: it tries again
        if self._port is not None:
            self._port.brought_stream(stream.peer())
        if not self._ration.is_left(self._who(stream), time.monotonic()):
            self.refusals[TooManyAttempts.__name__] += 1
            return  # without a word: a device of ours that was not at fault tries again
        try:
            session = await self._welcome(stream)
            writer = asyncio.create_task(self._write_all(session, stream))
            self._writers.add(writer)  # asyncio itself holds tasks weakly
            writer.add_done_callback(self._writers.discard)
            try:
                await self._read_all(session, stream)
            finally:
                writer.cancel()
                await asyncio.wait([writer], timeout=POLL_SECONDS)
        except HeadwaterError as error:
            if session is not None and session.sending_since is not None:
                # A frame is stuck on its way out: behind it no fault and no status can be sent.
                self._count(stream, error)
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
                session.stream, session.task, session.lost_at = None, None, time.monotonic()
                session.outbox, session.sending_since = asyncio.Queue(), None
                self._uploads.pause(session)
                if session.known is not None:
                    self.attendance.disconnected(session.known)
                log.info("%s disconnected", session.name)

    def _who(self, stream: Stream) -> str:
        """Return whose refusals are rationed: a certificate's name, or an address."""
        if self._credentials is not None:
            name = stream.auth_context().get("x509_common_name", [b""])[0]
            return f"name {name.decode(errors='replace')}"
        host = stream.peer().rpartition(":")[0].partition(":")[2]
        return subscriber(unquote(host).strip("[]"))

    def _count(self, stream: Stream, error: HeadwaterError) -> None:
        self.refusals[error.code] += 1
        self._ration.take(self._who(stream), time.monotonic())
        log.warning("%s refused: %s: %s", stream.peer(), error.code, error)

    async def _turn_away(self, stream: Stream, error: HeadwaterError) -> None:
        """Tell a device why its stream ends."""
        self._count(stream, error)
        with contextlib.suppress(TimeoutError, *BROKEN):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._downloads.write(stream, fault_frame(error))

    async def _welcome(self, stream: Stream) -> Session:
        """Read and check Hello, and find or make the session."""
        try:
            frame = await asyncio.wait_for(self._read(stream), HELLO_SECONDS)
        except TimeoutError:
            raise ProtocolMismatch(f"no hello within {HELLO_SECONDS} s") from None
        if frame is None or frame.WhichOneof("kind") != "hello":
            raise ProtocolMismatch("the first frame of a stream must be a hello")
        hello = frame.hello
        shown = self._shown(stream)
        try:
            self._admission.check(hello, shown)
        except HeadwaterError as error:
            self.attendance.refuse(hello.name if shown is None else shown.name, error)
            raise
        session = self._sessions.get(node_id_of(hello.name))
        is_kin = session is not None and self._identities.is_same_device(session.shown, shown)
        is_same = (
            session is not None and is_kin and hmac.compare_digest(session.token, hello.session)
        )
        has_displaced = session is not None and session.stream is not None and not is_same
        if has_displaced and session is not None:
            self._displace(session, stream, is_kin=is_kin)
        if session is None:
            session = Session(name=hello.name, node_id=node_id_of(hello.name), token=b"")
            self._sessions[session.node_id] = session
        if not is_same:
            session.token = secrets.token_bytes(16)
            self._uploads.drop(session)
        if session.task is not None:
            session.task.cancel()  # the old stream
        session.shown = shown
        if shown is not None:
            self._identities.settle(shown)
        self._attach(session, stream, hello, has_displaced=has_displaced)
        return session

    def _displace(self, session: Session, stream: Stream, *, is_kin: bool) -> None:
        """Let a stream take the place of the device's other one, if it has proved to be its."""
        if self._credentials is None or not is_kin:
            # Not noted as the device's refusal: it is another that came under its name.
            key = "" if self._credentials is None else ", with another key"
            raise IdentityRefused(f"a device of the name {session.name} is connected already{key}")
        first: Stream = session.stream
        log.warning(
            "%s: a stream from %s has proved the same key, and displaces the one from %s",
            session.name,
            stream.peer(),
            first.peer(),
        )
        self._displaced[first] = IdentityRefused(
            f"another stream has come with the key of {session.name}"
        )

    def _shown(self, stream: Stream) -> Shown | None:
        if self._credentials is None:
            return None
        return Shown.of_pem(stream.auth_context().get("x509_pem_cert", [b""])[0])

    def _attach(
        self, session: Session, stream: Stream, hello: Hello, *, has_displaced: bool
    ) -> None:
        session.stream, session.task = stream, asyncio.current_task()
        session.outbox, session.image_id = asyncio.Queue(), hello.image_id
        session.sending_since, session.frames = None, Frames(at=time.monotonic())
        if session.ask is not None:
            session.frames.asked(session.ask.reply_bytes)
        welcome = Welcome(
            protocol_version=PROTOCOL_VERSION,
            session=session.token,
            run_id=self._run_id,
            has_displaced=has_displaced,
        )
        self._send(session, ServerFrame(welcome=welcome))
        session.known = self.attendance.connected(session.name)
        if self._is_paused:
            self._send(session, ServerFrame(notice=Notice(is_paused=True)))
        if session.ask is not None:
            session.outbox.put_nowait(
                partial(self._downloads.send_ask, session, session.ask, stream)
            )
        log.info("%s connected from %s", session.name, stream.peer())

    # Reading.

    async def _read(self, stream: Stream) -> ClientFrame | None:
        data = await stream.read()
        if data is grpc.aio.EOF:
            return None
        self.bytes_up += len(data) + GRPC_FRAME_BYTES
        try:
            return ClientFrame.FromString(data)
        except DecodeError:
            raise ProtocolMismatch("a frame that is not of this protocol") from None

    async def _read_all(self, session: Session, stream: Stream) -> None:
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
                    self._send(session, ServerFrame(certificate=answer))
                case "leave":
                    self._leave(session, frame.leave)
                    return
                case other:
                    raise ProtocolMismatch(f"a frame of kind {other} in mid-stream")

    def _take_fault(self, session: Session, fault: Fault) -> None:
        ask = session.ask
        if ask is not None and fault.message_id == ask.message_id:
            code, text = fault.code[:MAX_FAULT_CODE], fault.text[:MAX_FAULT_TEXT]
            self._uploads.answer(session, error_of(code, text))

    def _leave(self, session: Session, leave: Leave) -> None:
        """Let a device go; why one leaves for a while is counted and noted like a refusal."""
        why: HeadwaterError = ConnectionLost(f"{session.name} left")
        if leave.code:
            text = f"{session.name}: {leave.text[:MAX_FAULT_TEXT]}"
            why = error_of(leave.code[:MAX_FAULT_CODE], text)
            self.refusals[why.code] += 1
            self.attendance.refuse(session.name, why)
            log.warning("%s left for a while: %s: %s", session.name, why.code, why)
        else:
            log.info("%s left", session.name)
        self._uploads.answer(session, why)
        self._sessions.pop(session.node_id, None)

    async def _watch_lost(self) -> None:
        """Give up on devices that are gone, take nothing, or stand still for too long."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                for session in list(self._sessions.values()):
                    self._watch(session, before=time.monotonic() - self._reconnect_seconds)
                self._end_revoked()
                self._count_strangers()
                self._uploads.give_turns()
            except Exception:
                log.exception("the watch over the devices failed, and goes on")

    def _count_strangers(self) -> None:
        """Count those whom gRPC refused; the log has the 1st, 2nd, 4th, 8th, ... of them."""
        if self._port is None:
            return
        before = self.refusals[NoStream.__name__]
        times = self._port.strangers.count(time.monotonic())
        if times > before:
            self.refusals[NoStream.__name__] = times
        if times.bit_length() > before.bit_length():
            log.warning(
                "%d connections so far came without a stream: no certificate of ours, or silence",
                times,
            )

    def _end_revoked(self) -> None:
        """End the streams whose certificates were revoked, and what is awaited from them."""
        known = {s.shown.serial: s for s in self._sessions.values() if s.shown is not None}
        shown = [s.shown for s in known.values() if s.shown is not None]
        for serial, error in self._identities.ended(shown).items():
            session = known[serial]
            log.warning("%s: %s", session.name, error)
            self._sessions.pop(session.node_id, None)
            self._uploads.answer(session, error)
            if session.stream is not None and session.task is not None:
                self._displaced[session.stream] = error
                session.task.cancel()

    def _watch(self, session: Session, *, before: float) -> None:
        within = f"for {self._reconnect_seconds:g} s"
        if session.stream is None:
            if session.lost_at < before:
                gone = ConnectionLost(f"{session.name} has been gone {within}")
                self._uploads.answer(session, gone)
                self._sessions.pop(session.node_id, None)
        elif session.shown is not None and session.shown.expires_at < dt.datetime.now(dt.UTC):
            if session.task is not None and session.stream not in self._displaced:
                log.warning("%s: its certificate has ended, and so does its stream", session.name)
                self._displaced[session.stream] = None  # with a renewed one it comes back
                session.task.cancel()
        elif session.sending_since is not None and session.sending_since < before:
            self.refusals[ConnectionLost.__name__] += 1
            log.warning("%s took nothing that it was sent %s: disconnected", session.name, within)
            if session.task is not None:
                session.task.cancel()
        elif self._uploads.is_sending(session) and session.heard_at < before:
            still = LateUpdate(f"{session.name}: its upload stood still {within}")
            self._uploads.settle_with(session, still)

    # Writing.

    def _send(self, session: Session, frame: ServerFrame) -> None:
        if session.stream is not None:
            session.outbox.put_nowait(
                partial(self._downloads.write, session.stream, frame, session)
            )

    async def _write_all(self, session: Session, stream: Stream) -> None:
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

    async def _ask(self, asks: Sequence[Ask]) -> None:
        await self._downloads.offer(asks)
        for ask in asks:
            session = self._sessions.get(ask.node_id)
            if session is None:
                gone = ConnectionLost("the device is gone")
                self.arrivals.put(
                    Arrival(message_id=ask.message_id, node_id=ask.node_id, error=gone)
                )
                continue
            self._uploads.let_go(session)
            session.ask = ask
            session.frames.asked(ask.reply_bytes)
            if session.stream is not None:
                send = partial(self._downloads.send_ask, session, ask, session.stream)
                session.outbox.put_nowait(send)

    async def _withdraw(self, message_ids: set[str]) -> None:
        for session in self._sessions.values():
            if session.ask is not None and session.ask.message_id in message_ids:
                self._uploads.withdraw(session)
        self._downloads.forget_frames()

    def _pause(self, is_paused: bool) -> None:
        if is_paused == self._is_paused:
            return
        self._is_paused = is_paused
        for session in self._sessions.values():
            self._send(session, ServerFrame(notice=Notice(is_paused=is_paused)))

    async def _refuse(self, node_id: int, error: HeadwaterError) -> None:
        self.refusals[error.code] += 1
        session = self._sessions.pop(node_id, None)
        if session is not None:
            self._admission.turn_away(node_id, session.token, error)
            self.attendance.refuse(session.name, error)
            self._uploads.answer(session, error)
            self._send(session, fault_frame(error))
