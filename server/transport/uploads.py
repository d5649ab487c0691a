"""Replies on their way in: announced, given a turn, staged, verified whole, handed to the rounds.

A device announces its reply and sends the vector when the server's receipt gives it its turn. So a
thousand devices that finish at once wait at home, not in the server's buffers. A turn counts until
the upload is whole or has shown itself slow: what a slow link has in flight is small, and it must
not hold up the others.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from headwater.common.errors import (
    CorruptUpdate,
    HeadwaterError,
    LateUpdate,
    OversizeUpdate,
    StateError,
    UnexpectedUpdate,
    travelling,
)
from headwater.common.transport.limits import CHUNK_BYTES, MAX_REPLY_HEAD_BYTES, RECEIPT_EVERY_BYTES
from headwater.common.transport.wire_pb2 import Chunk, Fault, Receipt, Reply, ServerFrame
from headwater.server.transport.session import Arrival, DeviceSession
from headwater.server.transport.staging import StagedUpload, StagingMemory

log = logging.getLogger(__name__)

TURNS = 16
# Below this a device is slower than gRPC's smallest window, and what it has in flight is small.
SLOW_BYTES_PER_SECOND = CHUNK_BYTES
SLOW_AFTER_SECONDS = 3.0

Send = Callable[[DeviceSession, ServerFrame], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadTurn:
    """Since when an upload has been sending, and how much of it was there then."""

    since: float
    from_bytes: int


class Uploads:
    """The uploads of all sessions; everything here runs in the intake's event loop."""

    def __init__(self, room: StagingMemory, *, send: Send, turns: int = TURNS) -> None:
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.refusals: Counter[str] = Counter()
        self._room = room
        self._send = send
        self._num_turns = turns
        self._turns: dict[DeviceSession, UploadTurn] = {}
        self._waiting: deque[DeviceSession] = deque()
        self._is_giving = False

    def announce(self, session: DeviceSession, reply: Reply) -> None:
        """Take a reply's head; its vector goes on where it broke off, or begins, in its turn.

        One that has crossed the news that nobody waits for it is dropped: its device knows by then.
        """
        ask = session.ask
        if reply.message_id in session.let_go:
            log.debug("%s: a reply has crossed the news that it is late", session.name)
            return
        if ask is None or reply.message_id != ask.message_id:
            late = UnexpectedUpdate(f"{session.name}: nobody waits for this reply any more")
            self._refuse(session, reply.message_id, late)
            return
        if len(reply.head_json) > MAX_REPLY_HEAD_BYTES or reply.num_bytes != ask.reply_bytes:
            over = OversizeUpdate(
                f"{session.name}: a reply of {reply.num_bytes:,} bytes with a head of "
                f"{len(reply.head_json):,}, where {ask.reply_bytes:,} bytes were expected"
            )
            self.settle_with(session, over)
            return
        if session.upload is not None and session.upload.sha256 != reply.sha256:
            self.drop(session)
        self.pause(session)
        session.reply = reply
        self._waiting.append(session)
        self.give_turns()

    def give_turns(self) -> None:
        """Let the next in the queue send, as far as there are turns."""
        if self._is_giving:
            return  # a turn that ended at once: the loop below goes on by itself
        self._is_giving = True
        try:
            now = time.monotonic()
            while self._waiting and self._num_busy(now) < self._num_turns:
                session = self._waiting.popleft()
                if session.reply is not None:
                    self._begin(session, session.reply, now)
        finally:
            self._is_giving = False

    def _num_busy(self, now: float) -> int:
        return sum(not self._is_slow(session, now) for session in self._turns)

    def _is_slow(self, session: DeviceSession, now: float) -> bool:
        turn, upload = self._turns[session], session.upload
        seconds = now - turn.since
        received = 0 if upload is None else upload.received - turn.from_bytes
        return seconds > SLOW_AFTER_SECONDS and received < seconds * SLOW_BYTES_PER_SECOND

    def _begin(self, session: DeviceSession, reply: Reply, now: float) -> None:
        if session.upload is None:
            try:
                session.upload = StagedUpload(
                    self._room, num_bytes=reply.num_bytes, sha256=reply.sha256
                )
            except StateError as error:
                self.settle_with(session, error)
                return
        received = session.upload.received
        session.heard_at = now
        self._turns[session] = UploadTurn(since=now, from_bytes=received)
        self._send(session, _receipt(reply.message_id, received))
        self._finish_if_whole(session)

    def take_chunk(self, session: DeviceSession, chunk: Chunk) -> None:
        """Stage the next chunk, and the whole upload if it was the last."""
        upload = session.upload
        if session.reply is None or chunk.transfer_id != session.reply.message_id:
            return  # behind a refusal, until the device hears of it
        try:
            if upload is None or session not in self._turns:
                raise CorruptUpdate("a chunk before its turn, which the first receipt gives")
            before = upload.received
            upload.add(chunk.offset, chunk.data)
        except CorruptUpdate as error:
            self.settle_with(session, CorruptUpdate(f"{session.name}: {error}"))
            return
        if upload.received // RECEIPT_EVERY_BYTES > before // RECEIPT_EVERY_BYTES:
            self._send(session, _receipt(chunk.transfer_id, upload.received))
        self._finish_if_whole(session)

    def _finish_if_whole(self, session: DeviceSession) -> None:
        upload, reply, ask = session.upload, session.reply, session.ask
        if upload is None or reply is None or ask is None or not upload.is_whole:
            return
        try:
            upload.verify()
        except CorruptUpdate as error:
            self.settle_with(session, CorruptUpdate(f"{session.name}: {error}"))
            return
        session.upload, session.reply, session.ask = None, None, None
        self._send(session, _receipt(reply.message_id, upload.num_bytes, is_done=True))
        self.arrivals.put(
            Arrival(
                message_id=ask.message_id,
                node_id=session.node_id,
                head_json=reply.head_json,
                staging=upload,
            )
        )
        self._end_turn(session)

    def settle_with(self, session: DeviceSession, error: HeadwaterError) -> None:
        """Refuse a reply for good: its device hears of it, and so does the round."""
        if session.ask is not None:
            self._refuse(session, session.ask.message_id, error)
            self.answer(session, error)

    def answer(self, session: DeviceSession, error: HeadwaterError) -> None:
        """Let an error stand for the session's reply, if one is awaited."""
        ask = session.ask
        session.ask = None
        if ask is not None:
            self.arrivals.put(
                Arrival(message_id=ask.message_id, node_id=session.node_id, error=error)
            )
        self.drop(session)

    def withdraw(self, session: DeviceSession) -> None:
        """Tell a device that nobody waits for its reply any more."""
        if session.ask is not None:
            late = LateUpdate(f"{session.name}: the round closed before its update came")
            self._send(session, fault_frame(late, session.ask.message_id))
            self.let_go(session)

    def let_go(self, session: DeviceSession) -> None:
        """Wait no more for a session's reply: another ask is on its way, or the device is told."""
        if session.ask is not None:
            session.let_go.append(session.ask.message_id)
        session.ask = None
        self.drop(session)

    def drop(self, session: DeviceSession) -> None:
        """Forget what has come of a session's upload."""
        if session.upload is not None:
            session.upload.release()
        session.upload, session.reply = None, None
        self._end_turn(session)

    def pause(self, session: DeviceSession) -> None:
        """Keep what has come, but not the turn: the stream is gone, or begins the reply anew."""
        if session in self._waiting:
            self._waiting.remove(session)
        self._turns.pop(session, None)

    def _end_turn(self, session: DeviceSession) -> None:
        self.pause(session)
        self.give_turns()

    def is_sending(self, session: DeviceSession) -> bool:
        """Whether it is the session's turn, so that chunks of it are awaited."""
        return session in self._turns

    def _refuse(self, session: DeviceSession, message_id: str, error: HeadwaterError) -> None:
        self.refusals[error.code] += 1
        if session.known is not None:
            session.known.refuse(error)
        self._send(session, fault_frame(error, message_id))


def _receipt(message_id: str, next_offset: int, *, is_done: bool = False) -> ServerFrame:
    receipt = Receipt(message_id=message_id, next_offset=next_offset, is_done=is_done)
    return ServerFrame(receipt=receipt)


def fault_frame(error: HeadwaterError, message_id: str = "") -> ServerFrame:
    """Return the frame that tells a device of an error, as much of it as may travel."""
    code, text = travelling(error)
    return ServerFrame(fault=Fault(message_id=message_id, code=code, text=text))
