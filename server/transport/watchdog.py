"""Watchdog of the streams: ends lost, unresponsive, stalled, expired and revoked ones.

gRPC reports a broken connection but not a silent device. The watchdog therefore closes a stream
whose device has not read for ``reconnect_seconds``, rejects a stalled upload, and forgets a session
without a stream. A stream whose certificate was revoked or has expired is ended at once.

A device that loses its connection in a round may return: a router restarts, a process is started
again and continues from its spool. While other devices work, waiting for it costs nothing. When
they are done, the round waits until ``return_seconds`` after the loss of the connection, or until
``reconnect_seconds`` after it if it would have too few replies. Each wait in vain halves the next
one for that device: no device slows the rounds down by leaving.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping

from headwater.common.errors import ConnectionLost, LateUpdate, NoStream
from headwater.common.wording import natural
from headwater.server.transport.connections import Connections
from headwater.server.transport.listener import UnidentifiedConnections
from headwater.server.transport.session import DeviceSession, OpenExchange

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.25
MAX_NAMES = 5
# After a wait in vain, so many answers of the device restore its full wait.
FORGIVING_ANSWERS = 10
MAX_KNOWN = 10_000
NEWCOMERS = ""  # no device's name


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
                "%d connections so far made no call: they had no valid certificate or were silent",
                count,
            )


class ReturnWaits:
    """How long a round waits for the return of each device: half as long after each wait in vain.

    Devices that have answered no round yet share one wait, because without TLS a stranger may come
    under ever new names.
    """

    def __init__(self, return_seconds: float) -> None:
        self._return_seconds = return_seconds
        self._in_vain: defaultdict[str, float] = defaultdict(float)
        self._known: OrderedDict[str, None] = OrderedDict()

    def seconds(self, name: str) -> float:
        """Return how long the round waits for this device."""
        return self._return_seconds * 2 ** -self._in_vain.get(self._key(name), 0.0)

    def note_in_vain(self, names: Iterable[str]) -> None:
        """Note that a round has waited for these devices, and has given them up."""
        for key in {self._key(name) for name in names}:
            self._in_vain[key] += 1

    def note_answer(self, name: str) -> None:
        """Note that a device has answered a round."""
        key = self._key(name)
        left = self._in_vain.pop(key, 0.0) - 1 / FORGIVING_ANSWERS
        if left > 0:
            self._in_vain[key] = left
        self._known[name] = None
        self._known.move_to_end(name)
        if len(self._known) > MAX_KNOWN:
            self._in_vain.pop(self._known.popitem(last=False)[0], None)

    def _key(self, name: str) -> str:
        return name if name in self._known else NEWCOMERS


class LostDevices:
    """Gives up the devices that lost their connection in a round, and logs them.

    | other devices of the round | its replies | a lost device may return |
    | --- | --- | --- |
    | one or more still work | any | as long as they work |
    | all are done | enough | for ``return_seconds``, or less: see ``ReturnWaits`` |
    | all are done | too few to count | for ``reconnect_seconds`` |

    The seconds are those without a connection, over all losses of a device in the round.
    """

    def __init__(
        self, connections: Connections, *, reconnect_seconds: float, return_seconds: float
    ) -> None:
        self._connections = connections
        self._reconnect_seconds = reconnect_seconds
        self._waits = ReturnWaits(min(return_seconds, reconnect_seconds))
        self._exchange: OpenExchange | None = None
        self._lost: dict[str, float] = {}
        self._away_seconds: defaultdict[str, float] = defaultdict(float)
        """Of the losses that ended with a return."""
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
        uploads = self._connections.uploads
        while uploads.answered:
            self._waits.note_answer(uploads.answered.pop())
        self._waits.note_in_vain(uploads.in_vain)
        uploads.in_vain.clear()
        exchange = uploads.exchange
        if exchange is not self._exchange:
            self._exchange = exchange
            self._lost.clear()
            self._away_seconds.clear()
            self._num_losses.clear()
        if exchange is None:
            return
        awaited = [s for s in self._connections.sessions.values() if self.may_return(s)]
        lost = {session.name: session for session in awaited if session.stream is None}
        working = [session.name for session in awaited if session.stream is not None]
        has_enough = exchange.num_replies >= exchange.num_needed
        limits = {
            name: self._waits.seconds(name) if has_enough else self._reconnect_seconds
            for name in lost
        }
        longest = max(limits.values(), default=0.0)
        why = "" if has_enough else f"; with fewer than {exchange.num_needed} replies it is aborted"
        waits = f"for {_listed(working)}" if working else f"up to {longest:g} s for a return{why}"
        self._note_changes(lost, working, waits, now=now)
        gone = [
            one
            for name, one in lost.items()
            if not working and self._away_seconds[name] + now - one.lost_at >= limits[name]
        ]
        for one in gone:
            away_seconds = now - one.lost_at
            error = ConnectionLost(f"{one.name} lost its connection {away_seconds:.0f} s ago")
            uploads.fail_lost(one, error)
            del self._lost[one.name]
        if gone:
            self._waits.note_in_vain(one.name for one in gone)
            names = _listed(one.name for one in gone)
            log.warning("the round goes on without %s: connection lost", names)

    def _note_changes(
        self, lost: Mapping[str, DeviceSession], working: Iterable[str], waits: str, *, now: float
    ) -> None:
        """Log who lost a connection and who is back; of each device the 1st, 2nd, 4th, ... time."""
        new = lost.keys() - self._lost.keys()
        back = self._lost.keys() & set(working)
        for name in back:
            self._away_seconds[name] += now - self._lost.pop(name)
        self._lost |= {name: lost[name].lost_at for name in new}
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
