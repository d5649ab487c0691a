"""Serves the devices' gRPC streams: sends them instructions and receives their replies.

One event loop in a thread of its own serves all streams. The rounds call ``send_instructions`` and
``end_exchange``, and read the queue ``arrivals``. ``server.transport.stream`` serves one stream,
``admission`` checks it, ``uploads`` receives replies, ``downloads`` sends, and ``watchdog`` ends
streams that hang. A faulty device or upload is refused by a named error before any of its data
reaches the sum.

A device that loses its connection may return with its session's token: its instruction is still
open, and its upload continues after the last received byte. ``watchdog`` decides how long.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from headwater.common.errors import ConnectionLost, HeadwaterError
from headwater.common.transport.last_events import last_events
from headwater.common.transport.limits import STREAM_METHOD
from headwater.common.transport.tls import Credentials
from headwater.common.transport.wire_pb2 import Goodbye, ServerFrame
from headwater.server.transport.admission import Admission, OfferedTask
from headwater.server.transport.connections import Connections
from headwater.server.transport.device_records import DeviceRecords, Stages
from headwater.server.transport.downloads import Downloads
from headwater.server.transport.listener import HealthService, Listener
from headwater.server.transport.peer_certificates import CertificateVerifier
from headwater.server.transport.session import (
    Arrival,
    DeviceInstruction,
    OpenExchange,
    Sessions,
    Stream,
    Work,
)
from headwater.server.transport.staging import StagingMemory
from headwater.server.transport.stream import Streams
from headwater.server.transport.uploads import Uploads, fault_frame
from headwater.server.transport.watchdog import Watchdog

CLOSE_SECONDS = 5.0
ALIVE_SECONDS = 1.0


class Servicer:
    """Serves the devices' streams in a thread of its own."""

    def __init__(
        self,
        address: str,
        *,
        run_id: int,
        term: int = 0,
        task: str = "",
        offered: OfferedTask | None = None,
        credentials: Credentials | None,
        staging_bytes: int,
        reconnect_seconds: float,
        return_seconds: float,
        spool_folder: Path | None = None,
        verifier: CertificateVerifier | None = None,
        device_records: DeviceRecords | None = None,
    ) -> None:
        self.device_records = device_records or DeviceRecords()
        self.port = 0
        self._address = address
        self._credentials = credentials
        self._sessions: Sessions = {}
        self._downloads = Downloads()
        self._staging = StagingMemory(staging_bytes, spool_folder=spool_folder)
        self._uploads = Uploads(self._staging, send=self._downloads.send)
        self.arrivals = self._uploads.arrivals
        self.refusals = self._uploads.refusals
        self._connections = Connections(
            sessions=self._sessions,
            closing={},
            verifier=verifier or CertificateVerifier(),
            device_records=self.device_records,
            uploads=self._uploads,
            downloads=self._downloads,
        )
        self._admission = Admission(
            self._connections,
            run_id=run_id,
            term=term,
            has_tls=credentials is not None,
            task=task,
            offered=offered,
        )
        self._streams = Streams(self._connections, self._admission)
        self._watchdog = Watchdog(
            self._connections, reconnect_seconds=reconnect_seconds, return_seconds=return_seconds
        )
        self._is_closing = False
        self._health = HealthService(self._note_call)
        self._listener: Listener | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servicer", daemon=True)

    # Called from other threads.

    def start(self) -> None:
        """Open the port.

        Raises:
            PortInUse: another process has it.
        """
        self._thread.start()
        self._call(self._open())

    def follow_term(self, term: int) -> None:
        """Welcome devices with a later term from now on; an earlier one changes nothing."""
        self._admission.term = max(self._admission.term, term)

    def stop(self, *, say_goodbye: bool) -> None:
        """Close every stream; a goodbye informs the devices that the run has ended."""
        self._call(self._close(say_goodbye=say_goodbye))
        self._is_closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._connections.verifier.close()

    def close(self) -> None:
        """Release the event loop of a servicer that was never started."""
        if self._thread.ident is None:
            self._loop.close()
            self._connections.verifier.close()

    def require_layout(self, digest: str, layout: str) -> None:
        """Refuse devices whose model has another layout from now on, and show them this one."""
        self._admission.layout_digest, self._admission.layout = digest, layout

    @property
    def bytes_up(self) -> int:
        """Bytes received from devices."""
        return self._streams.num_bytes

    @property
    def bytes_down(self) -> int:
        """Bytes sent to devices."""
        return self._downloads.num_bytes

    @property
    def staged_bytes(self) -> int:
        """Bytes of uploads held in RAM now."""
        return self._staging.held_bytes

    def connected(self) -> list[int]:
        """Return the node ids of the connected devices."""
        return [s.node_id for s in list(self._sessions.values()) if s.stream is not None]

    def link_seconds(self) -> dict[str, tuple[float, float]]:
        """Return each session's seconds of transfers so far, down and up, by the device's name."""
        sessions = list(self._sessions.values())
        return {one.name: (one.seconds_down, one.seconds_up) for one in sessions}

    def stages(self) -> Stages:
        """Return where each device is with its plan, or with its masked vector."""
        sessions = list(self._sessions.values())
        return {one.name: one.stage for one in sessions if one.stage is not None}

    def name_of(self, node_id: int) -> str | None:
        """Return the name in a device's hello, which with TLS is its certificate's name."""
        session = self._sessions.get(node_id)
        return None if session is None else session.name

    def pause(self, is_paused: bool) -> None:
        """Notify connected and new devices that the run is paused or resumed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: no device is connected
            self._loop.call_soon_threadsafe(self._notify, is_paused, None)

    def watch(self, is_watched: bool) -> None:
        """Notify connected and new devices whether somebody watches their progress."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._notify, None, is_watched)

    def drain(self) -> None:
        """Report in health checks that this server accepts no more work."""
        self._health.is_serving = False

    def is_alive(self, *, within_seconds: float = ALIVE_SECONDS) -> bool:
        """Return whether the event loop responds."""
        responded = threading.Event()
        try:
            self._loop.call_soon_threadsafe(responded.set)
        except RuntimeError:  # closed
            return False
        return responded.wait(within_seconds)

    def send_instructions(
        self, instructions: Sequence[DeviceInstruction], *, num_needed: int | None = None
    ) -> None:
        """Send instructions; their outcomes arrive in ``arrivals``.

        ``num_needed`` is set if a round awaits the replies together, until ``end_exchange``. Then a
        device that loses its connection is awaited for as long as others work, and for longer than
        ``return_seconds`` only while fewer than ``num_needed`` have replied.
        """
        self._call(self._send_instructions(instructions, num_needed))

    def end_exchange(self, message_ids: Sequence[str]) -> None:
        """End the exchange, and cancel the instructions whose replies are awaited no longer."""
        if not self._is_closing:
            self._call(self._end_exchange(set(message_ids)))

    def refuse(self, node_id: int, error: HeadwaterError) -> None:
        """End a device's session, and refuse the session until the server ends."""
        self._call(self._refuse(node_id, error))

    def _call(self, work: Work) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # Run in the event loop.

    async def _open(self) -> None:
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        service, method = STREAM_METHOD.lstrip("/").split("/")
        streams = grpc.method_handlers_generic_handler(service, {method: handler})
        handlers = (streams, self._health.rpc_handler())
        listener = Listener(self._address, self._credentials, handlers)
        await listener.open()
        self._listener, self.port = listener, listener.port
        self._watching = asyncio.create_task(self._watchdog.run(listener.unidentified))

    async def _close(self, *, say_goodbye: bool) -> None:
        self._is_closing = True
        self._health.is_serving = False
        if self._listener is None:
            return
        self._watching.cancel()
        if say_goodbye:
            for session in self._sessions.values():
                self._downloads.send(session, ServerFrame(goodbye=Goodbye()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    while self.connected():
                        await asyncio.sleep(0.01)
        await self._listener.close()
        for session in self._sessions.values():
            self._uploads.discard(session)
        await last_events()

    async def _serve(self, _: Any, stream: Stream) -> None:
        if self._is_closing:
            return  # a device that reconnected already: it retries
        peer = stream.peer()
        self._note_call(peer)
        try:
            await self._streams.serve(stream)
        finally:
            if self._listener is not None:
                self._listener.unidentified.note_end(peer)

    def _note_call(self, peer: str) -> None:
        if self._listener is not None:
            self._listener.note_call(peer)

    async def _send_instructions(
        self, instructions: Sequence[DeviceInstruction], num_needed: int | None
    ) -> None:
        earlier = [one for s in self._sessions.values() for one in s.open_instructions]
        await self._downloads.set_models(instructions, earlier)
        if num_needed is not None:
            self._uploads.exchange = OpenExchange(
                message_ids=frozenset(one.message_id for one in instructions),
                num_needed=num_needed,
            )
        for one in instructions:
            session = self._sessions.get(one.node_id)
            if session is None:
                lost = ConnectionLost("the device is not connected any more")
                self.arrivals.put(
                    Arrival(message_id=one.message_id, node_id=one.node_id, error=lost)
                )
                continue
            if one.follows and session.instruction is not None:
                session.following = one
            else:
                self._uploads.cancel(session)
                session.instruction, session.num_starts_over = one, 0
                session.stage = "planned" if one.message_type == "train" else None
            session.frame_limit.grant_reply(one.reply_bytes)
            self._downloads.send_instruction(session, one)

    async def _end_exchange(self, message_ids: set[str]) -> None:
        self._uploads.exchange = None
        for session in self._sessions.values():
            if session.instruction is not None and session.instruction.message_id in message_ids:
                self._uploads.cancel_late(session)
            elif session.following is not None and session.following.message_id in message_ids:
                self._uploads.drop_following(session)
        self._downloads.clear_frames()

    def _notify(self, is_paused: bool | None, is_watched: bool | None) -> None:
        """Take what has changed, None for what has not, and tell it to all devices."""
        admission = self._admission
        before = admission.is_paused, admission.is_watched
        admission.is_paused = before[0] if is_paused is None else is_paused
        admission.is_watched = before[1] if is_watched is None else is_watched
        if before != (admission.is_paused, admission.is_watched):
            for session in self._sessions.values():
                self._downloads.send(session, admission.notice())

    async def _refuse(self, node_id: int, error: HeadwaterError) -> None:
        self.refusals[error.code] += 1
        session = self._sessions.pop(node_id, None)
        if session is not None:
            self._admission.refuse_session(session, error)
            self.device_records.note_refusal(session.name, error)
            self._uploads.fail(session, error)
            self._downloads.send(session, fault_frame(error))
