"""Uploads are started in order, bounded in number, resumed, and refused by named errors."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from headwater.common.errors import CorruptUpdate
from headwater.common.transport.wire_pb2 import Chunk, Reply, ServerFrame
from headwater.server.transport import uploads as uploads_module
from headwater.server.transport.session import DeviceInstruction, DeviceSession
from headwater.server.transport.staging import StagingMemory
from headwater.server.transport.uploads import Uploads

VECTOR = bytes(range(200))


class SentFrames:
    """The frames sent to each session, in order."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, ServerFrame]] = []

    def send(self, session: DeviceSession, frame: ServerFrame) -> None:
        self.frames.append((session.name, frame))

    def started(self) -> list[str]:
        """Return the sessions whose uploads were started, in order."""
        return [name for name, f in self.frames if f.HasField("receipt") and not f.receipt.is_done]


def session(number: int) -> DeviceSession:
    instruction = DeviceInstruction(
        node_id=number,
        message_id=f"message {number}",
        message_type="train",
        head_json="{}",
        image=None,
        reply_bytes=len(VECTOR),
    )
    return DeviceSession(
        name=str(number), node_id=number, token=b"", instruction=instruction, stream=object()
    )


def announce(uploads: Uploads, one: DeviceSession) -> None:
    assert one.instruction is not None
    digest = hashlib.sha256(VECTOR).digest()
    uploads.announce(
        one, Reply(message_id=one.instruction.message_id, num_bytes=len(VECTOR), sha256=digest)
    )


def send(uploads: Uploads, one: DeviceSession, start: int, end: int) -> None:
    chunk = Chunk(transfer_id=f"message {one.node_id}", offset=start, data=VECTOR[start:end])
    uploads.take_chunk(one, chunk)


def test_uploads_in_progress_are_bounded_and_start_in_order() -> None:
    sent = SentFrames()
    uploads = Uploads(StagingMemory(10_000), send=sent.send, max_uploads=2)
    sessions = [session(number) for number in range(4)]
    for one in sessions:
        announce(uploads, one)
    assert sent.started() == ["0", "1"]
    send(uploads, sessions[1], 0, len(VECTOR))
    assert sent.started() == ["0", "1", "2"]
    uploads.discard(sessions[0])
    assert sent.started() == ["0", "1", "2", "3"]
    assert uploads.arrivals.get_nowait().node_id == 1


def test_an_upload_is_a_stage_from_its_announcement_on_and_its_seconds_are_counted() -> None:
    uploads = Uploads(StagingMemory(10_000), send=SentFrames().send, max_uploads=1)
    first, waiting = sessions = session(0), session(1)
    for one in sessions:
        one.stage = "computing"
        announce(uploads, one)
    assert [one.stage for one in sessions] == ["uploading"] * 2
    send(uploads, first, 0, 100)
    assert first.seconds_up == 0.0, "of a whole transfer"
    send(uploads, first, 100, len(VECTOR))
    assert first.stage is None
    assert first.seconds_up > 0.0
    assert waiting.seconds_up == 0.0, "it has only just begun"
    uploads.discard(waiting)
    assert waiting.stage is None
    assert waiting.seconds_up > 0.0


def test_a_waiting_upload_holds_no_memory() -> None:
    staging = StagingMemory(10_000)
    uploads = Uploads(staging, send=SentFrames().send, max_uploads=1)
    for number in range(5):
        announce(uploads, session(number))
    assert staging.held_bytes == len(VECTOR)


def test_a_chunk_before_the_starting_receipt_is_refused() -> None:
    sent = SentFrames()
    uploads = Uploads(StagingMemory(10_000), send=sent.send, max_uploads=1)
    first, second = session(0), session(1)
    announce(uploads, first)
    send(uploads, first, 0, 100)
    uploads.pause(first)  # its stream broke: half of it has arrived
    announce(uploads, second)
    announce(uploads, first)
    send(uploads, first, 100, 200)
    assert uploads.refusals == {"CorruptUpdate": 1}


def test_a_broken_upload_resumes_after_its_last_byte() -> None:
    sent = SentFrames()
    uploads = Uploads(StagingMemory(10_000), send=sent.send, max_uploads=1)
    one = session(0)
    announce(uploads, one)
    send(uploads, one, 0, 120)
    uploads.pause(one)
    announce(uploads, one)
    assert sent.frames[-1][1].receipt.next_offset == 120
    send(uploads, one, 120, 200)
    arrival = uploads.arrivals.get_nowait()
    assert arrival.staging is not None
    assert bytes(arrival.staging.view()) == VECTOR


def test_a_slow_upload_does_not_delay_other_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = SentFrames()
    uploads = Uploads(StagingMemory(10_000), send=sent.send, max_uploads=1)
    slow, quick = session(0), session(1)
    announce(uploads, slow)
    announce(uploads, quick)
    uploads.start_waiting()
    assert sent.started() == ["0"]
    monkeypatch.setattr(uploads_module, "SLOW_AFTER_SECONDS", -1.0)
    uploads.start_waiting()
    assert sent.started() == ["0", "1"]
    send(uploads, slow, 0, len(VECTOR))
    assert uploads.arrivals.get_nowait().node_id == 0


@pytest.mark.parametrize("how", ["its round closed", "another instruction took its place"])
def test_a_reply_that_crosses_its_cancellation_is_ignored(how: str) -> None:
    sent = SentFrames()
    uploads = Uploads(StagingMemory(10_000), send=sent.send)
    slow, instruction = session(0), session(0).instruction
    assert instruction is not None
    if how == "its round closed":
        uploads.cancel_late(slow)
        assert [frame.fault.code for _, frame in sent.frames] == ["LateUpdate"]
    else:
        uploads.cancel(slow)
    slow.instruction, num_frames = replace(instruction, message_id="the next"), len(sent.frames)
    late = Reply(message_id=instruction.message_id, num_bytes=len(VECTOR), sha256=bytes(32))
    uploads.announce(slow, late)
    send(uploads, slow, 0, len(VECTOR))
    assert (len(sent.frames), uploads.refusals, uploads.arrivals.empty()) == (num_frames, {}, True)
    assert slow.instruction.message_id == "the next"


def test_a_reply_without_an_instruction_is_refused() -> None:
    sent = SentFrames()
    uploads = Uploads(StagingMemory(10_000), send=sent.send)
    one = session(0)
    uploads.announce(one, Reply(message_id="unknown"))
    assert uploads.refusals == {"UnexpectedUpdate": 1}


def with_following(number: int) -> DeviceSession:
    one = session(number)
    assert one.instruction is not None
    one.following = replace(one.instruction, message_id="following", follows=True)
    return one


def test_a_following_instruction_is_awaited_once_the_reply_before_is_whole() -> None:
    sent, one = SentFrames(), with_following(1)
    following = one.following
    uploads = Uploads(StagingMemory(10_000), send=sent.send)
    announce(uploads, one)
    send(uploads, one, 0, len(VECTOR))
    assert (one.instruction, one.following) == (following, None)
    assert uploads.arrivals.get_nowait().message_id == "message 1"


def test_a_following_instruction_is_dropped_with_the_reply_before_it() -> None:
    """Nothing of it reaches the round, and the device learns of both."""
    sent, one = SentFrames(), with_following(1)
    uploads = Uploads(StagingMemory(10_000), send=sent.send)
    uploads.reject(one, CorruptUpdate("damaged"))
    faults = {f.fault.message_id: f.fault.code for _, f in sent.frames if f.HasField("fault")}
    assert faults == {"message 1": "CorruptUpdate", "following": "PlanWithoutEarlier"}
    assert (one.instruction, one.following) == (None, None)
    assert uploads.arrivals.get_nowait().message_id == "message 1"
    assert uploads.arrivals.empty()
