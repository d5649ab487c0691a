"""How long a round waits for a device that lost its connection, and what it logs."""

from __future__ import annotations

import pytest

from headwater.common.transport.wire_pb2 import Fault, Reply
from headwater.server.transport.connections import Connections
from headwater.server.transport.device_records import DeviceRecords
from headwater.server.transport.downloads import Downloads
from headwater.server.transport.peer_certificates import CertificateVerifier
from headwater.server.transport.session import DeviceInstruction, DeviceSession, OpenExchange
from headwater.server.transport.staging import StagedUpload, StagingMemory
from headwater.server.transport.uploads import MAX_STARTS, Uploads
from headwater.server.transport.watchdog import FORGIVING_ANSWERS, LostDevices

RECONNECT, RETURN = 60.0, 5.0
EMPTY_DIGEST = bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")


class Round:
    """A round's sessions without sockets, on a clock that the test moves."""

    def __init__(self, *names: str, num_needed: int = 1) -> None:
        downloads = Downloads()
        self.uploads = Uploads(StagingMemory(1 << 20), send=downloads.send)
        self.sessions = {name: _session(number, name) for number, name in enumerate(names)}
        connections = Connections(
            sessions={one.node_id: one for one in self.sessions.values()},
            closing={},
            verifier=CertificateVerifier(),
            device_records=DeviceRecords(),
            uploads=self.uploads,
            downloads=downloads,
        )
        self.uploads.exchange = OpenExchange(
            message_ids=frozenset(f"message {name}" for name in names), num_needed=num_needed
        )
        self.lost_devices = LostDevices(
            connections, reconnect_seconds=RECONNECT, return_seconds=RETURN
        )

    def next(self, *, at: float) -> None:
        """Begin the next round with the same sessions, all of them connected."""
        self.lost_devices.check(at)
        self.uploads.exchange = OpenExchange(
            message_ids=self.uploads.exchange.message_ids if self.uploads.exchange else frozenset(),
            num_needed=1,
        )
        for number, (name, session) in enumerate(self.sessions.items()):
            session.instruction, session.stream = _instruction(number, name), object()
        self.lost_devices.check(at)

    def seconds_lost_to(self, name: str) -> float:
        """Lose a device after the other ones have answered; return how long the round waits."""
        for other in self.sessions.keys() - {name}:
            self.answer(other)
        self.lose(name, at=0.0)
        return next(
            quarter / 4 for quarter in range(1000) if not self.is_awaited(name, at=quarter / 4)
        )

    def lose(self, name: str, *, at: float) -> None:
        self.sessions[name].stream, self.sessions[name].lost_at = None, at
        self.lost_devices.check(at)

    def come_back(self, name: str, *, at: float) -> None:
        self.sessions[name].stream = object()
        self.lost_devices.check(at)

    def answer(self, name: str) -> None:
        reply = Reply(message_id=f"message {name}", sha256=EMPTY_DIGEST)
        self.uploads.announce(self.sessions[name], reply)

    def is_awaited(self, name: str, *, at: float) -> bool:
        self.lost_devices.check(at)
        return self.sessions[name].instruction is not None


def _instruction(number: int, name: str) -> DeviceInstruction:
    return DeviceInstruction(
        node_id=number,
        message_id=f"message {name}",
        message_type="train",
        head_json="{}",
        image=None,
        reply_bytes=0,
    )


def _session(number: int, name: str) -> DeviceSession:
    return DeviceSession(
        name=name,
        node_id=number,
        token=b"",
        instruction=_instruction(number, name),
        stream=object(),
    )


def test_a_lost_device_is_awaited_as_long_as_others_work() -> None:
    opened = Round("lost", "works")
    opened.lose("lost", at=0.0)
    assert opened.is_awaited("lost", at=10_000.0)
    opened.answer("works")
    assert not opened.is_awaited("lost", at=10_000.0)
    assert opened.uploads.arrivals.get_nowait().error is None
    error = opened.uploads.arrivals.get_nowait().error
    assert error is not None
    assert error.code == "ConnectionLost"


def test_after_the_others_a_lost_device_has_its_seconds_from_the_loss() -> None:
    opened = Round("lost", "works")
    opened.answer("works")
    opened.lose("lost", at=0.0)
    assert opened.is_awaited("lost", at=RETURN - 0.1)
    assert not opened.is_awaited("lost", at=RETURN)


def test_a_round_with_too_few_replies_waits_longer() -> None:
    opened = Round("lost", "lost too", "works", num_needed=2)
    opened.answer("works")
    opened.lose("lost", at=0.0)
    opened.lose("lost too", at=0.0)
    assert opened.is_awaited("lost", at=RECONNECT - 0.1)
    assert not opened.is_awaited("lost", at=RECONNECT)


def test_a_round_that_lost_all_devices_waits_for_their_return() -> None:
    opened = Round("a", "b")
    opened.lose("a", at=0.0)
    opened.lose("b", at=1.0)
    assert opened.is_awaited("a", at=RETURN + 1.0)
    opened.come_back("a", at=RETURN + 2.0)
    assert opened.is_awaited("b", at=RECONNECT + 2.0)  # the other one works again
    opened.answer("a")
    assert not opened.is_awaited("b", at=RECONNECT + 2.0)


def test_each_wait_in_vain_halves_the_next_one_and_answers_restore_it() -> None:
    opened = Round("flaps", "works")
    opened.answer("flaps")
    opened.answer("works")
    waits = []
    for _ in range(4):
        opened.next(at=0.0)
        waits.append(opened.seconds_lost_to("flaps"))
    assert waits == [RETURN, RETURN / 2, RETURN / 4, 0.75]  # in steps of a quarter of a second
    for _ in range(4 * FORGIVING_ANSWERS):
        opened.next(at=0.0)
        opened.answer("flaps")
    opened.next(at=0.0)
    assert opened.seconds_lost_to("flaps") == RETURN


def test_newcomers_under_ever_new_names_share_one_wait() -> None:
    opened = Round("works", "first", "second", "third")
    for name in ("first", "second", "third"):
        opened.answer("works")
        if name != "first":
            opened.next(at=0.0)
        expected = {"first": RETURN, "second": RETURN / 2, "third": RETURN / 4}[name]
        others = {"first", "second", "third"} - {name}
        for other in others:  # they come under their own names in other rounds
            opened.sessions[other].instruction = None
        assert opened.seconds_lost_to(name) == expected


def test_the_seconds_without_a_connection_add_up_over_a_round() -> None:
    opened = Round("flaps", "works")
    opened.answer("works")
    for at in (0.0, 3.0):
        opened.lose("flaps", at=at)
        opened.come_back("flaps", at=at + 2.0)
    opened.lose("flaps", at=6.0)
    assert opened.is_awaited("flaps", at=6.5)
    assert not opened.is_awaited("flaps", at=7.0)


def test_a_device_that_was_given_up_hears_so_when_it_returns() -> None:
    opened = Round("lost", "works")
    opened.answer("works")
    opened.lose("lost", at=0.0)
    opened.lost_devices.check(RETURN)
    missed = opened.sessions["lost"].missed
    assert missed is not None
    assert missed.fault == Fault(
        message_id="message lost",
        code="LateUpdate",
        text="lost: the round closed while it was disconnected; a later round uses its examples",
    )


def test_the_log_says_who_left_what_the_round_waits_for_and_who_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    opened = Round("lost", "works", "works too")
    opened.lose("lost", at=0.0)
    opened.answer("works")
    opened.answer("works too")
    opened.lost_devices.check(RETURN)
    assert caplog.messages == [
        "lost the connection to lost; the round waits for works, works too",
        "the round goes on without lost: connection lost",
    ]


def test_the_log_says_why_a_round_waits_long_for_a_return(
    caplog: pytest.LogCaptureFixture,
) -> None:
    opened = Round("lost", "works", num_needed=2)
    opened.answer("works")
    opened.lose("lost", at=0.0)
    assert caplog.messages == [
        "lost the connection to lost; the round waits up to 60 s for a return; with fewer than 2 "
        "replies it is aborted"
    ]


def test_a_flapping_device_is_logged_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    opened = Round("flaps", "works")
    for number in range(100):
        opened.lose("flaps", at=float(number))
        opened.come_back("flaps", at=number + 0.5)
    assert sum("lost the connection" in line for line in caplog.messages) == 7  # 1, 2, 4, ... 64
    assert sum("back in the round" in line for line in caplog.messages) == 7


def test_an_upload_that_breaks_off_at_the_same_byte_is_counted_and_progress_starts_anew() -> None:
    upload = StagedUpload(StagingMemory(100), num_bytes=10, sha256=b"")
    assert [upload.note_start() for _ in range(3)] == [1, 2, 3]
    upload.add(0, b"more")
    assert [upload.note_start() for _ in range(2)] == [1, 2]


def test_an_upload_that_never_gets_on_is_given_up() -> None:
    opened = Round("flaps", "works")
    flapping = opened.sessions["flaps"]
    assert flapping.instruction is not None
    reply = Reply(message_id="message flaps", num_bytes=10, sha256=EMPTY_DIGEST)
    flapping.instruction = DeviceInstruction(
        node_id=0,
        message_id="message flaps",
        message_type="train",
        head_json="{}",
        image=None,
        reply_bytes=10,
    )
    for _ in range(MAX_STARTS):
        opened.uploads.announce(flapping, reply)
        opened.uploads.pause(flapping)  # its connection breaks
    assert opened.uploads.arrivals.empty()
    opened.uploads.announce(flapping, reply)
    error = opened.uploads.arrivals.get_nowait().error
    assert error is not None
    assert error.code == "LateUpdate"
