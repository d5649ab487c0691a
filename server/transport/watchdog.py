"""Watchdog of the streams: ends lost, unresponsive, stalled, expired and revoked ones.

gRPC reports a broken connection but not a silent device. The watchdog therefore closes a stream
whose device has not read for ``reconnect_seconds``, rejects a stalled upload, and forgets a session
without a stream. A stream whose certificate was revoked or has expired is ended at once.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import time

from headwater.common.errors import ConnectionLost, LateUpdate, NoStream
from headwater.server.transport.connections import Connections
from headwater.server.transport.listener import UnidentifiedConnections
from headwater.server.transport.session import DeviceSession

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.25


class Watchdog:
    """Checks every session four times a second, in the servicer's event loop."""

    def __init__(self, connections: Connections, *, reconnect_seconds: float) -> None:
        self._connections = connections
        self._reconnect_seconds = reconnect_seconds

    async def run(self, unidentified: UnidentifiedConnections) -> None:
        """Check until the task is cancelled; an error is logged and does not end it."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                for session in list(self._connections.sessions.values()):
                    self._check(session, before=time.monotonic() - self._reconnect_seconds)
                self._end_revoked()
                self._count(unidentified)
                self._connections.uploads.start_waiting()
            except Exception:
                log.exception("the watchdog of the streams failed; it continues")

    def _check(self, session: DeviceSession, *, before: float) -> None:
        period = f"for {self._reconnect_seconds:g} s"
        if session.stream is None:
            if session.lost_at < before:
                lost = ConnectionLost(f"{session.name} has been disconnected {period}")
                self._connections.uploads.fail(session, lost)
                self._connections.sessions.pop(session.node_id, None)
        elif session.certificate is not None and session.certificate.expires_at < dt.datetime.now(
            dt.UTC
        ):
            if session.task is not None and session.stream not in self._connections.closing:
                log.warning("%s: its certificate has expired, so its stream ends", session.name)
                self._connections.closing[session.stream] = None  # it may return with a renewed one
                session.task.cancel()
        elif session.sending_since is not None and session.sending_since < before:
            self._connections.uploads.refusals[ConnectionLost.__name__] += 1
            log.warning("%s has read nothing %s: disconnected", session.name, period)
            if session.task is not None:
                session.task.cancel()
        elif self._connections.uploads.is_sending(session) and session.heard_at < before:
            stalled = LateUpdate(f"{session.name}: its upload made no progress {period}")
            self._connections.uploads.reject(session, stalled)

    def _end_revoked(self) -> None:
        """End the streams with revoked certificates; their replies are awaited no longer."""
        sessions = {
            s.certificate.serial: s for s in self._connections.sessions.values() if s.certificate
        }
        certificates = [s.certificate for s in sessions.values() if s.certificate is not None]
        for serial, error in self._connections.verifier.newly_invalid(certificates).items():
            session = sessions[serial]
            log.warning("%s: %s", session.name, error)
            self._connections.sessions.pop(session.node_id, None)
            self._connections.uploads.fail(session, error)
            if session.stream is not None and session.task is not None:
                self._connections.closing[session.stream] = error
                session.task.cancel()

    def _count(self, unidentified: UnidentifiedConnections) -> None:
        """Count the connections without a stream; log the 1st, 2nd, 4th, 8th, ... of them."""
        before = self._connections.uploads.refusals[NoStream.__name__]
        count = unidentified.count(time.monotonic())
        if count > before:
            self._connections.uploads.refusals[NoStream.__name__] = count
        if count.bit_length() > before.bit_length():
            log.warning(
                "%d connections so far opened no stream: they had no valid certificate or were "
                "silent",
                count,
            )
