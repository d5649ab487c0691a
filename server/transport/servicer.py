"""The server's end of the stream: devices connect, are pushed instructions, and upload in chunks.

One event loop in a thread of its own serves every stream; the rounds talk to it through
``ask``, ``withdraw`` and the queue ``arrivals``. Here is what they call, and what opens and closes.
``server.transport.stream`` serves one stream; at its door stand ``server.transport.doorway`` and ``server.transport.admission``;
``server.transport.uploads`` takes replies in, ``server.transport.downloads`` sends, and ``server.transport.watchdog`` ends
what stands still. What is wrong with a device or an upload is refused by a named error, before
anything of it reaches the sum.

A device that loses its connection may come back with its session's token within
``reconnect_seconds``: its instruction still stands, and its upload goes on from the last byte that
arrived.
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
from headwater.common.transport.limits import METHOD
from headwater.common.transport.tls import Credentials
from headwater.common.transport.wire_pb2 import Goodbye, Notice, ServerFrame
from headwater.server.enrolment.peer_certificates import CertificateVerifier
from headwater.server.transport.admission import Admission
from headwater.server.transport.device_records import DeviceRecords
from headwater.server.transport.doorway import Doorway
from headwater.server.transport.downloads import Downloads
from headwater.server.transport.health import HealthService
from headwater.server.transport.listener import Listener
from headwater.server.transport.session import (
    Arrival,
    ClosingStreams,
    DeviceInstruction,
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
        credentials: Credentials | None,
        staging_bytes: int,
        reconnect_seconds: float,
        spool_folder: Path | None = None,
        identities: CertificateVerifier | None = None,
        attendance: DeviceRecords | None = None,
    ) -> None:
        self.attendance = attendance or DeviceRecords()
        self.port = 0
        self._address = address
        self._credentials = credentials
        self._sessions: Sessions = {}
        self._displaced: ClosingStreams = {}
        self._downloads = Downloads()
        self._room = StagingMemory(staging_bytes, spool_folder=spool_folder)
        self._uploads = Uploads(self._room, send=self._downloads.send)
        self.arrivals = self._uploads.arrivals
        self.refusals = self._uploads.refusals
        identities = identities or CertificateVerifier()
        self._admission = Admission(identities)
        self._doorway = Doorway(
            self._sessions,
            self._displaced,
            run_id=run_id,
            has_tls=credentials is not None,
            admission=self._admission,
            identities=identities,
            attendance=self.attendance,
            uploads=self._uploads,
            downloads=self._downloads,
        )
        self._streams = Streams(
            self._sessions,
            self._displaced,
            doorway=self._doorway,
            identities=identities,
            attendance=self.attendance,
            uploads=self._uploads,
            downloads=self._downloads,
        )
        self._watch = Watchdog(
            self._sessions,
            self._displaced,
            reconnect_seconds=reconnect_seconds,
            identities=identities,
            uploads=self._uploads,
        )
        self._is_closing = False
        self._health = HealthService()
        self._port: Listener | None = None
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
    def bytes_up(self) -> int:
        """The bytes that were read from devices."""
        return self._streams.num_bytes

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

    def ask(self, asks: Sequence[DeviceInstruction]) -> None:
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
        port = Listener(self._address, self._credentials, (streams, self._health.rpc_handler()))
        await port.open()
        self._port, self.port = port, port.number
        self._warden = asyncio.create_task(self._watch.keep(port.strangers))

    async def _close(self, *, say_goodbye: bool) -> None:
        self._is_closing = True
        self._health.is_serving = False
        if self._port is None:
            return
        self._warden.cancel()
        if say_goodbye:
            for session in self._sessions.values():
                self._downloads.send(session, ServerFrame(goodbye=Goodbye()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    while self.connected():
                        await asyncio.sleep(0.01)
        await self._port.close()
        for session in self._sessions.values():
            self._uploads.drop(session)

    async def _serve(self, _: Any, stream: Stream) -> None:
        if self._is_closing:
            return  # a device that stays, and is back already: it tries again
        if self._port is not None:
            self._port.brought_stream(stream.peer())
        await self._streams.serve(stream)

    async def _ask(self, asks: Sequence[DeviceInstruction]) -> None:
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
            self._downloads.push(session, ask)

    async def _withdraw(self, message_ids: set[str]) -> None:
        for session in self._sessions.values():
            if session.ask is not None and session.ask.message_id in message_ids:
                self._uploads.withdraw(session)
        self._downloads.forget_frames()

    def _pause(self, is_paused: bool) -> None:
        if is_paused == self._doorway.is_paused:
            return
        self._doorway.is_paused = is_paused
        for session in self._sessions.values():
            self._downloads.send(session, ServerFrame(notice=Notice(is_paused=is_paused)))

    async def _refuse(self, node_id: int, error: HeadwaterError) -> None:
        self.refusals[error.code] += 1
        session = self._sessions.pop(node_id, None)
        if session is not None:
            self._admission.turn_away(node_id, session.token, error)
            self.attendance.refuse(session.name, error)
            self._uploads.answer(session, error)
            self._downloads.send(session, fault_frame(error))
