"""The watch over the streams: who is gone, takes nothing, stands still, or may go on no longer.

gRPC tells when a connection breaks, and of a device that is merely silent nothing. So a stream that
does not read what it is sent is closed after ``reconnect_seconds``, an upload that stands still is
given up, and a session without a stream forgotten; a stream whose certificate was revoked or has
expired is ended at once.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import time

from headwater.common.errors import ConnectionLost, LateUpdate, NoStream
from headwater.server.enrolment.peer_certificates import CertificateVerifier
from headwater.server.transport.listener import UnidentifiedConnections
from headwater.server.transport.session import ClosingStreams, DeviceSession, Sessions
from headwater.server.transport.uploads import Uploads

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25


class Watchdog:
    """Looks at every session, time and again, in the intake's event loop."""

    def __init__(
        self,
        sessions: Sessions,
        displaced: ClosingStreams,
        *,
        reconnect_seconds: float,
        identities: CertificateVerifier,
        uploads: Uploads,
    ) -> None:
        self._sessions = sessions
        self._displaced = displaced
        self._reconnect_seconds = reconnect_seconds
        self._identities = identities
        self._uploads = uploads
        self._refusals = uploads.refusals

    async def keep(self, strangers: UnidentifiedConnections) -> None:
        """Keep it until the task is cancelled, whatever goes wrong."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                for session in list(self._sessions.values()):
                    self._look_at(session, before=time.monotonic() - self._reconnect_seconds)
                self._end_revoked()
                self._count(strangers)
                self._uploads.give_turns()
            except Exception:
                log.exception("the watch over the devices failed, and goes on")

    def _look_at(self, session: DeviceSession, *, before: float) -> None:
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
            self._refusals[ConnectionLost.__name__] += 1
            log.warning("%s took nothing that it was sent %s: disconnected", session.name, within)
            if session.task is not None:
                session.task.cancel()
        elif self._uploads.is_sending(session) and session.heard_at < before:
            still = LateUpdate(f"{session.name}: its upload stood still {within}")
            self._uploads.settle_with(session, still)

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

    def _count(self, strangers: UnidentifiedConnections) -> None:
        """Count those whom gRPC refused; the log has the 1st, 2nd, 4th, 8th, ... of them."""
        before = self._refusals[NoStream.__name__]
        times = strangers.count(time.monotonic())
        if times > before:
            self._refusals[NoStream.__name__] = times
        if times.bit_length() > before.bit_length():
            log.warning(
                "%d connections so far came without a stream: no certificate of ours, or silence",
                times,
            )
