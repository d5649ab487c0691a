"""Uploads of replies: announced, queued, staged, verified as a whole, then passed to the round.

A device announces its reply and sends the vector after the server's first receipt starts it. A
thousand devices that finish at once therefore wait on their side, not in the server's buffers. An
upload counts towards the limit until it is complete or has proved slow: a slow link has little data
in flight, and must not delay faster devices.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from headwater.common.errors import (
    ConnectionLost,
    CorruptUpdate,
    HeadwaterError,
    LateUpdate,
    ModelMismatch,
    OversizeUpdate,
    PlanWithoutEarlier,
    ProtocolMismatch,
    StateError,
    UnexpectedUpdate,
    travelling,
)
from headwater.common.transport.limits import (
    CHUNK_BYTES,
    MAX_MESSAGE_ID,
    RECEIPT_EVERY_BYTES,
)
from headwater.common.transport.wire_pb2 import Chunk, Fault, Receipt, Reply, ServerFrame
from headwater.server.transport.rate_limit import UNASKED_REPLY_FRAMES
from headwater.server.transport.session import Arrival, DeviceSession, OpenExchange
from headwater.server.transport.staging import StagedUpload, StagingMemory

log = logging.getLogger(__name__)

MAX_UPLOADS = 16
# Below this rate an upload has little in flight: less than gRPC's smallest window.
SLOW_BYTES_PER_SECOND = CHUNK_BYTES
SLOW_AFTER_SECONDS = 3.0
# An upload that breaks off so often without a further byte is given up.
MAX_STARTS = 10

Send = Callable[[DeviceSession, ServerFrame], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadStart:
    """When an upload was started, and how many bytes had been received before."""

    at: float
    from_bytes: int


class Uploads:
    """The uploads of all sessions; all methods run in the servicer's event loop."""

    def __init__(
        self, memory: StagingMemory, *, send: Send, max_uploads: int = MAX_UPLOADS
    ) -> None:
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.refusals: Counter[str] = Counter()
        self.exchange: OpenExchange | None = None
        """The instructions that a round awaits now."""
        self.answered: set[str] = set()
        """The devices that answered a round since the watchdog last looked."""
        self.in_vain: set[str] = set()
        """The devices that started over too often since then."""
        self._memory = memory
        self._send = send
        self._max_uploads = max_uploads
        self._started: dict[DeviceSession, UploadStart] = {}
        self._waiting: deque[DeviceSession] = deque()
        self._is_starting = False

    def announce(self, session: DeviceSession, reply: Reply) -> None:
        """Take a reply's head and queue its vector, which resumes where it broke off.

        A reply that crossed its cancellation is ignored; its device has been notified by then.

        Raises:
            ProtocolMismatch: the device has sent too many replies that the server does not await.
        """
        instruction = session.instruction
        if reply.message_id in session.cancelled:
            log.debug("%s: ignored a reply that crossed its cancellation", session.name)
            return
        if instruction is None or reply.message_id != instruction.message_id:
            self._refuse_unasked(session, reply)
            return
        if len(reply.head_json) > instruction.head_bytes or not instruction.allows(reply.num_bytes):
            up_to = "" if instruction.is_length_exact else "up to "
            oversize = OversizeUpdate(
                f"{session.name}: received a reply of {reply.num_bytes:,} bytes with a head of "
                f"{len(reply.head_json):,} bytes, expected {up_to}{instruction.reply_bytes:,} and "
                f"a head of up to {instruction.head_bytes:,}"
            )
            self.reject(session, oversize)
            return
        if session.upload is not None and session.upload.sha256 != reply.sha256:
            self.discard(session)
        self.pause(session)
        session.reply = reply
        session.stage = "uploading" if reply.num_bytes else session.stage
        self._waiting.append(session)
        self.start_waiting()

    def _refuse_unasked(self, session: DeviceSession, reply: Reply) -> None:
        """Refuse a reply that no instruction asks for; a device that sends many is disconnected.

        The refusal repeats the reply's id, so an id longer than the server's own is not answered.
        """
        is_allowed = session.frame_limit.take(time.monotonic(), num_frames=UNASKED_REPLY_FRAMES)
        if not is_allowed or len(reply.message_id) > MAX_MESSAGE_ID:
            raise ProtocolMismatch(f"{session.name} sends replies that the server does not await")
        unexpected = UnexpectedUpdate(f"{session.name}: the server does not await this reply")
        self._refuse(session, reply.message_id, unexpected)

    def start_waiting(self) -> None:
        """Start waiting uploads, in order, while fewer than ``max_uploads`` are in progress."""
        if self._is_starting:
            return  # an upload that was complete at once: the loop below continues
        self._is_starting = True
        try:
            now = time.monotonic()
            while self._waiting and self._num_fast(now) < self._max_uploads:
                session = self._waiting.popleft()
                if session.reply is not None:
                    self._start(session, session.reply, now)
        finally:
            self._is_starting = False

    def _num_fast(self, now: float) -> int:
        return sum(not self._is_slow(session, now) for session in self._started)

    def _is_slow(self, session: DeviceSession, now: float) -> bool:
        start, upload = self._started[session], session.upload
        if upload is not None and upload.num_starts > 1:
            return True  # it broke off without a byte: it may not occupy a place again and again
        seconds = now - start.at
        received = 0 if upload is None else upload.received - start.from_bytes
        return seconds > SLOW_AFTER_SECONDS and received < seconds * SLOW_BYTES_PER_SECOND

    def _start(self, session: DeviceSession, reply: Reply, now: float) -> None:
        if session.upload is None:
            try:
                session.upload = StagedUpload(
                    self._memory, num_bytes=reply.num_bytes, sha256=reply.sha256
                )
            except StateError as error:
                self.reject(session, error)
                return
        received = session.upload.received
        if session.upload.note_start() > MAX_STARTS:
            text = f"{session.name}: its upload broke off {MAX_STARTS} times at byte {received:,}"
            self.reject(session, LateUpdate(text))
            return
        session.heard_at = now
        self._started[session] = UploadStart(at=now, from_bytes=received)
        self._send(session, _receipt(reply.message_id, received))
        self._finish_if_whole(session)

    def take_chunk(self, session: DeviceSession, chunk: Chunk) -> None:
        """Stage the next chunk; pass the upload to the round if it is complete."""
        upload = session.upload
        if session.reply is None or chunk.transfer_id != session.reply.message_id:
            return  # sent before the device learned that its reply was refused
        try:
            if upload is None or session not in self._started:
                raise CorruptUpdate("received a chunk before the receipt that starts the upload")
            before = upload.received
            upload.add(chunk.offset, chunk.data)
        except CorruptUpdate as error:
            self.reject(session, CorruptUpdate(f"{session.name}: {error}"))
            return
        except StateError as error:
            self.reject(session, error)
            return
        if upload.received // RECEIPT_EVERY_BYTES > before // RECEIPT_EVERY_BYTES:
            self._send(session, _receipt(chunk.transfer_id, upload.received))
        self._finish_if_whole(session)

    def _finish_if_whole(self, session: DeviceSession) -> None:
        upload, reply, instruction = session.upload, session.reply, session.instruction
        if upload is None or reply is None or instruction is None or not upload.is_whole:
            return
        try:
            upload.verify()
        except CorruptUpdate as error:
            self.reject(session, CorruptUpdate(f"{session.name}: {error}"))
            return
        session.upload, session.reply = None, None
        session.instruction, session.following = session.following, None
        session.has_answered = True
        self.pause(session)  # its seconds count before the round sees the reply
        if self.exchange is not None and instruction.message_id in self.exchange.message_ids:
            self.exchange.num_replies += 1
            self.answered.add(session.name)
        self._send(session, _receipt(reply.message_id, upload.num_bytes, is_done=True))
        self.arrivals.put(
            Arrival(
                message_id=instruction.message_id,
                node_id=session.node_id,
                head_json=reply.head_json,
                staging=upload,
            )
        )
        self._stop(session)
        if session.instruction is not None:
            session.stage = "computing"

    def reject(self, session: DeviceSession, error: HeadwaterError) -> None:
        """Refuse the awaited reply for good: report the error to the device and to the round."""
        if session.instruction is not None:
            self._refuse(session, session.instruction.message_id, error)
            self.fail(session, error)

    def fail(self, session: DeviceSession, error: HeadwaterError) -> None:
        """Pass an error to the round in place of the session's reply, if one is awaited.

        The reply to a following instruction would not count, so the device drops that too.
        """
        self.drop_following(session)
        instruction = session.instruction
        session.instruction = None
        if instruction is not None:
            self.arrivals.put(
                Arrival(message_id=instruction.message_id, node_id=session.node_id, error=error)
            )
        self.discard(session)

    def drop_following(self, session: DeviceSession) -> None:
        """Cancel the instruction after the one in progress, and tell the device."""
        following, session.following = session.following, None
        if following is not None:
            session.cancelled.append(following.message_id)
            text = f"{session.name}: the update before this one does not count"
            self._send(session, fault_frame(PlanWithoutEarlier(text), following.message_id))

    def cancel_late(self, session: DeviceSession) -> None:
        """Cancel the session's instruction because its round has closed; notify the device."""
        if session.instruction is not None:
            if session.stream is None:
                self._note_missed(session, session.instruction.message_id)
            else:
                late = LateUpdate(f"{session.name}: the round closed before its update arrived")
                self._send(session, fault_frame(late, session.instruction.message_id))
            self.cancel(session)

    def fail_lost(self, session: DeviceSession, error: ConnectionLost) -> None:
        """Stop waiting for a device without a connection, which is notified when it returns."""
        if session.instruction is not None:
            self._note_missed(session, session.instruction.message_id)
            self.fail(session, error)

    def _note_missed(self, session: DeviceSession, message_id: str) -> None:
        late = LateUpdate(
            f"{session.name}: the round closed while it was disconnected; a later round uses its "
            "examples"
        )
        session.missed = fault_frame(late, message_id)

    def cancel(self, session: DeviceSession) -> None:
        """Stop waiting for the session's reply; the caller sends the device the reason."""
        session.cancelled.extend(one.message_id for one in session.open_instructions)
        session.instruction = session.following = None
        self.discard(session)

    def discard(self, session: DeviceSession) -> None:
        """Release what the session has uploaded."""
        if session.upload is not None:
            session.upload.release()
        session.upload, session.reply = None, None
        self._stop(session)

    def pause(self, session: DeviceSession) -> None:
        """Stop a session's upload but keep its bytes: the stream is lost or the reply restarts."""
        if session in self._waiting:
            self._waiting.remove(session)
        start = self._started.pop(session, None)
        if start is not None:
            session.seconds_up += time.monotonic() - start.at

    def _stop(self, session: DeviceSession) -> None:
        session.stage = None
        self.pause(session)
        self.start_waiting()

    def is_sending(self, session: DeviceSession) -> bool:
        """Return whether the session's upload is in progress."""
        return session in self._started

    def _refuse(self, session: DeviceSession, message_id: str, error: HeadwaterError) -> None:
        self.refusals[error.code] += 1
        if session.record is not None:
            session.record.note_refusal(error)
        self._send(session, fault_frame(error, message_id))


def _receipt(message_id: str, next_offset: int, *, is_done: bool = False) -> ServerFrame:
    receipt = Receipt(message_id=message_id, next_offset=next_offset, is_done=is_done)
    return ServerFrame(receipt=receipt)


def fault_frame(error: HeadwaterError, message_id: str = "") -> ServerFrame:
    """Return the frame that reports an error to a device, cut to what may be sent."""
    code, text = travelling(error)
    layout = error.layout if isinstance(error, ModelMismatch) else ""
    remedy = "" if error.is_private or error.remedy == type(error).remedy else error.remedy
    return ServerFrame(
        fault=Fault(message_id=message_id, code=code, text=text, layout=layout, remedy=remedy)
    )
