from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from headwater.common.transport.wire_pb2 import Chunk, Reply, ServerFrame
from headwater.server.transport import uploads
from headwater.server.transport.session import DeviceInstruction, DeviceSession
from headwater.server.transport.staging import StagingMemory
from headwater.server.transport.uploads import Uploads

VECTOR = bytes(range(200))


class Heard:
    """What each session was sent, in order."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, ServerFrame]] = []

    def send(self, session: DeviceSession, frame: ServerFrame) -> None:
        self.frames.append((session.name, frame))

    def started(self) -> list[str]:
        """Return who was told to begin, in order."""
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
    return DeviceSession(name=str(number), node_id=number, token=b"", instruction=instruction)


def announce(room: Uploads, one: DeviceSession) -> None:
    assert one.instruction is not None
    digest = hashlib.sha256(VECTOR).digest()
    room.announce(one, Reply(message_id=one.instruction.message_id, num_bytes=len(VECTOR), sha256=digest))


def send(room: Uploads, one: DeviceSession, start: int, end: int) -> None:
    chunk = Chunk(transfer_id=f"message {one.node_id}", offset=start, data=VECTOR[start:end])
    room.take_chunk(one, chunk)


def test_only_as_many_send_at_once_as_there_are_turns_and_the_next_follows_in_order() -> None:
    heard = Heard()
    room = Uploads(StagingMemory(10_000), send=heard.send, max_uploads=2)
    sessions = [session(number) for number in range(4)]
    for one in sessions:
        announce(room, one)
    assert heard.started() == ["0", "1"]
    send(room, sessions[1], 0, len(VECTOR))
    assert heard.started() == ["0", "1", "2"]
    room.discard(sessions[0])
    assert heard.started() == ["0", "1", "2", "3"]
    assert room.arrivals.get_nowait().node_id == 1


def test_an_upload_that_waits_for_its_turn_holds_no_memory() -> None:
    staging = StagingMemory(10_000)
    room = Uploads(staging, send=Heard().send, max_uploads=1)
    for number in range(5):
        announce(room, session(number))
    assert staging.held_bytes == len(VECTOR)


def test_a_chunk_before_its_turn_is_refused() -> None:
    heard = Heard()
    room = Uploads(StagingMemory(10_000), send=heard.send, max_uploads=1)
    first, second = session(0), session(1)
    announce(room, first)
    send(room, first, 0, 100)
    room.pause(first)  # its stream broke: half of it is here
    announce(room, second)
    announce(room, first)
    send(room, first, 100, 200)
    assert room.refusals == {"CorruptUpdate": 1}


def test_an_upload_goes_on_where_it_broke_off_in_its_next_turn() -> None:
    heard = Heard()
    room = Uploads(StagingMemory(10_000), send=heard.send, max_uploads=1)
    one = session(0)
    announce(room, one)
    send(room, one, 0, 120)
    room.pause(one)
    announce(room, one)
    assert heard.frames[-1][1].receipt.next_offset == 120
    send(room, one, 120, 200)
    arrival = room.arrivals.get_nowait()
    assert arrival.staging is not None
    assert bytes(arrival.staging.view()) == VECTOR


def test_a_slow_link_does_not_keep_the_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    room = Uploads(StagingMemory(10_000), send=heard.send, max_uploads=1)
    slow, quick = session(0), session(1)
    announce(room, slow)
    announce(room, quick)
    room.start_waiting()
    assert heard.started() == ["0"]
    monkeypatch.setattr(uploads, "SLOW_AFTER_SECONDS", -1.0)
    room.start_waiting()
    assert heard.started() == ["0", "1"]
    send(room, slow, 0, len(VECTOR))
    assert room.arrivals.get_nowait().node_id == 0


@pytest.mark.parametrize("how", ["its round closed", "another instruction took its place"])
def test_a_reply_that_crosses_the_news_that_it_is_late_is_no_fault_of_its_device(how: str) -> None:
    heard = Heard()
    room = Uploads(StagingMemory(10_000), send=heard.send)
    slow, instruction = session(0), session(0).instruction
    assert instruction is not None
    if how == "its round closed":
        room.cancel_late(slow)
        assert [frame.fault.code for _, frame in heard.frames] == ["LateUpdate"]
    else:
        room.cancel(slow)
    slow.instruction, told = replace(instruction, message_id="the next"), len(heard.frames)
    late = Reply(message_id=instruction.message_id, num_bytes=len(VECTOR), sha256=bytes(32))
    room.announce(slow, late)
    send(room, slow, 0, len(VECTOR))
    assert (len(heard.frames), room.refusals, room.arrivals.empty()) == (told, {}, True)
    assert slow.instruction.message_id == "the next"


def test_a_reply_to_nothing_that_was_asked_is_refused() -> None:
    heard = Heard()
    room = Uploads(StagingMemory(10_000), send=heard.send)
    one = session(0)
    room.announce(one, Reply(message_id="never asked"))
    assert room.refusals == {"UnexpectedUpdate": 1}
