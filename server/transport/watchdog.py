"""Watchdog of the streams: ends lost, unresponsive, stalled, expired and revoked ones.

gRPC reports a broken connection but not a silent device. The watchdog therefore closes a stream
whose device has not read for ``reconnect_seconds``, rejects a stalled upload, and forgets a session
without a stream. A stream whose certificate was revoked or has expired is ended at once.

A device that loses its connection in a round may return: a router restarts, a process is started
again and continues from its spool. While other devices work, waiting for it costs nothing. When
they are done, the round waits until ``return_seconds`` after the loss of the connection, or until
``reconnect_seconds`` after it if it would have too few replies.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import time
from collections import Counter
from collections.abc import Iterable

from headwater.common.errors import ConnectionLost, LateUpdate, NoStream
from headwater.common.wording import natural
from headwater.server.transport.connections import Connections
from headwater.server.transport.listener import UnidentifiedConnections
from headwater.server.transport.session import DeviceSession, OpenExchange

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.25
MAX_NAMES = 5


class Watchdog:
    """Checks every session four times a second, in the servicer's event loop."""

    def __init__(
        self, connections: Connections, *, reconnect_seconds: float, return_seconds: float
    ) -> None:
        self._connections = connections
        self._reconnect_seconds = reconnect_seconds
        self._lost_devices = LostDevices(
            connections, reconnect_seconds=reconnect_seconds, return_seconds=return_seconds
        )

    async def run(self, unidentified: UnidentifiedConnections) -> None:
        """Check until the task is cancelled; an error is logged and does not end it."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                now = time.monotonic()
                for session in list(self._connections.sessions.values()):
                    self._check(session, before=now - self._reconnect_seconds)
                self._lost_devices.check(now)
                self._end_revoked()
                self._count(unidentified)
                self._connections.uploads.start_waiting()
            except Exception:
                log.exception("the watchdog of the streams failed; it continues")

    def _check(self, session: DeviceSession, *, before: float) -> None:
        period = f"for {self._reconnect_seconds:g} s"
        if session.stream is None:
            if session.lost_at < before and not self._lost_devices.may_return(session):
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


class LostDevices:
    """Gives up the devices that lost their connection in a round, and logs them.

    | other devices of the round | its replies | a lost device may return |
    | --- | --- | --- |
    | one or more still work | any | as long as they work |
    | all are done | enough | for ``return_seconds`` |
    | all are done | too few to count | for ``reconnect_seconds`` |

    The seconds are counted from the loss of the connection.
    """

    def __init__(
        self, connections: Connections, *, reconnect_seconds: float, return_seconds: float
    ) -> None:
        self._connections = connections
        self._reconnect_seconds = reconnect_seconds
        self._return_seconds = min(return_seconds, reconnect_seconds)
        self._exchange: OpenExchange | None = None
        self._lost: set[str] = set()
        self._num_losses: Counter[str] = Counter()

    def may_return(self, session: DeviceSession) -> bool:
        """Return whether a round awaits the session's reply, so that ``check`` decides."""
        exchange, instruction = self._connections.uploads.exchange, session.instruction
        return (
            exchange is not None
            and instruction is not None
            and instruction.message_id in exchange.message_ids
        )

    def check(self, now: float) -> None:
        """Give up the devices that the round has waited for long enough; log all changes."""
        exchange = self._connections.uploads.exchange
        if exchange is not self._exchange:
            self._exchange = exchange
            self._lost.clear()
            self._num_losses.clear()
        if exchange is None:
            return
        awaited = [s for s in self._connections.sessions.values() if self.may_return(s)]
        lost = {session.name: session for session in awaited if session.stream is None}
        working = [session.name for session in awaited if session.stream is not None]
        has_enough = exchange.num_replies >= exchange.num_needed
        limit = self._return_seconds if has_enough else self._reconnect_seconds
        why = "" if has_enough else f"; with fewer than {exchange.num_needed} replies it is aborted"
        waits = f"for {_listed(working)}" if working else f"up to {limit:g} s for a return{why}"
        self._log_changes(lost.keys(), working, waits)
        gone = [one for one in lost.values() if not working and now - one.lost_at >= limit]
        for one in gone:
            away_seconds = now - one.lost_at
            error = ConnectionLost(f"{one.name} lost its connection {away_seconds:.0f} s ago")
            self._connections.uploads.fail_lost(one, error)
            self._lost.discard(one.name)
        if gone:
            names = _listed(one.name for one in gone)
            log.warning("the round goes on without %s: connection lost", names)

    def _log_changes(self, lost: Iterable[str], working: Iterable[str], waits: str) -> None:
        """Log who lost a connection and who is back; of each device the 1st, 2nd, 4th, ... time."""
        new = set(lost) - self._lost
        back = self._lost.intersection(working)
        self._lost = (self._lost | new) - back
        if logged := [name for name in back if _is_power_of_two(self._num_losses[name])]:
            log.warning("back in the round: %s", _listed(logged))
        self._num_losses.update(new)
        if logged := [name for name in new if _is_power_of_two(self._num_losses[name])]:
            log.warning("lost the connection to %s; the round waits %s", _listed(logged), waits)


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names, key=natural)
    more = len(ordered) - MAX_NAMES
    return ", ".join(ordered[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _is_power_of_two(number: int) -> bool:
    return number.bit_count() == 1
