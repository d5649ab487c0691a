"""The registration: newcomers are asked once, and whoever is left out again, without waiting for it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from flwr.app import Error, Message

from headwater.common.errors import HeadwaterError, TaskFailed
from headwater.common.flower import records
from headwater.common.flower.grid import HeadwaterGrid, ensure_message_id
from headwater.common.messages import DescribeRequest, DeviceReport
from headwater.server.flower.registration import Registration

REQUEST = DescribeRequest(run_seed=0, wants_speed=True, layout_digest="same", num_parameters=1)
LEFT_OUT = REQUEST.model_copy(update={"left_out": "one example takes 3.1 s of its 2.0 s"})


class Wire(HeadwaterGrid):
    """A network in which a test decides who answers what, and when."""

    silent_seconds = 300.0

    def __init__(self, *nodes: int) -> None:
        super().__init__()
        self.nodes = list(nodes)
        self.questions: list[Message] = []
        self.refused: dict[int, str] = {}
        self._answers: list[Message] = []
        self._open: dict[int, Message] = {}
        self.enter_run(secrets.randbits(62))

    def num_bytes(self) -> tuple[int, int]:
        return 0, 0

    def get_node_ids(self) -> Iterable[int]:
        return self.nodes

    def refuse(self, node_id: int, error: HeadwaterError) -> None:
        self.refused[node_id] = error.code
        self.nodes.remove(node_id)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = {ensure_message_id(message): message for message in messages}
        self.questions += pushed.values()
        return list(pushed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        answers, self._answers = self._answers, []
        yield from answers

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        raise NotImplementedError

    def asked(self) -> list[tuple[int, str | None]]:
        """Return whom the registration asked since the last look, and why it is left out."""
        found = [
            (m.metadata.dst_node_id, records.read(m.content, DescribeRequest).left_out)
            for m in self.questions
        ]
        self._open |= {m.metadata.dst_node_id: m for m in self.questions}
        self.questions = []
        return found

    def answer(self, node: int, **changes: Any) -> None:
        """Let a node answer what it was asked last."""
        report = {"name": f"d{node}", "num_examples": 10, "layout_digest": "same"} | changes
        content = records.content_with_head(json.dumps(report), None)
        self._answers.append(Message(content, reply_to=self._open[node]))

    def fail(self, node: int, error: Error) -> None:
        self._answers.append(Message(error, reply_to=self._open[node]))


def known(*nodes: int) -> tuple[Registration, Wire]:
    """Return a registration in which these nodes are described."""
    wire = Wire(*nodes)
    registration = Registration(wire)
    registration.update(REQUEST)
    assert wire.asked() == [(node, None) for node in nodes]
    for node in nodes:
        wire.answer(node)
    registration.update(REQUEST)
    assert {node: report.name for node, report in registration.reports.items()} == {
        node: f"d{node}" for node in nodes
    }
    return registration, wire


def examples(registration: Registration) -> dict[int, int]:
    return {node: report.num_examples for node, report in registration.reports.items()}


def test_who_is_left_out_is_told_why_and_its_answer_takes_the_place_of_the_old_one() -> None:
    registration, wire = known(1, 2)
    registration.ask_again({"d2": LEFT_OUT})
    assert wire.asked() == [(2, LEFT_OUT.left_out)]
    wire.answer(2, num_examples=20)
    registration.update(REQUEST)
    assert examples(registration) == {1: 10, 2: 20}
    assert wire.refused == {}


def test_nobody_waits_for_the_answer_of_who_is_left_out() -> None:
    registration, wire = known(1, 2)
    registration.ask_again({"d2": LEFT_OUT})
    registration.update(REQUEST)
    assert registration.is_settled
    assert examples(registration) == {1: 10, 2: 10}
    wire.nodes.append(3)
    registration.update(REQUEST)
    assert not registration.is_settled


def test_who_has_not_answered_yet_is_not_asked_twice() -> None:
    registration, wire = known(1)
    registration.ask_again({"d1": LEFT_OUT})
    assert len(wire.asked()) == 1
    registration.ask_again({"d1": LEFT_OUT})
    registration.update(REQUEST)
    assert wire.asked() == []
    wire.answer(1)
    registration.update(REQUEST)
    registration.ask_again({"d1": LEFT_OUT})
    assert len(wire.asked()) == 1


def test_who_has_answered_something_later_may_be_asked_once_more() -> None:
    """An instruction to train takes the question's place on the stream of the device."""
    registration, wire = known(1)
    registration.ask_again({"d1": LEFT_OUT})
    wire.asked()
    registration.forget_repeats({1})
    registration.ask_again({"d1": LEFT_OUT})
    assert wire.asked() == [(1, LEFT_OUT.left_out)]


def test_who_is_silent_when_asked_again_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    registration, wire = known(1)
    registration.ask_again({"d1": LEFT_OUT})
    monkeypatch.setattr(wire, "silent_seconds", -1.0)
    registration.update(REQUEST)
    assert wire.refused == {}
    assert examples(registration) == {1: 10}
    registration.ask_again({"d1": LEFT_OUT})
    assert len(wire.asked()) == 2


def test_who_is_gone_is_not_asked_again() -> None:
    registration, wire = known(1)
    wire.nodes.clear()
    registration.update(REQUEST)
    registration.ask_again({"d1": LEFT_OUT})
    assert wire.asked() == []


def test_who_fails_when_asked_again_stays_as_it_was() -> None:
    registration, wire = known(1)
    registration.ask_again({"d1": LEFT_OUT})
    wire.asked()
    wire.fail(1, records.to_flower_error(TaskFailed("busy for a moment")))
    registration.update(REQUEST)
    assert examples(registration) == {1: 10}
    assert wire.refused == {}


@pytest.mark.parametrize(
    ("lie", "code"),
    [
        ({"num_examples": 0}, "CorruptUpdate"),
        ({"name": "somebody"}, "IdentityRefused"),
        ({"name": "d2"}, "IdentityRefused"),
    ],
)
def test_who_lies_when_asked_again_is_turned_away(lie: dict[str, Any], code: str) -> None:
    registration, wire = known(1, 2)
    registration.ask_again({"d1": LEFT_OUT})
    wire.asked()
    wire.answer(1, **lie)
    registration.update(REQUEST)
    assert wire.refused == {1: code}
    assert examples(registration) == {2: 10}


def test_two_devices_of_one_name_are_still_told_apart() -> None:
    registration, wire = known(1)
    wire.nodes.append(2)
    registration.update(REQUEST)
    wire.asked()
    wire.answer(2, name="d1")
    registration.update(REQUEST)
    assert wire.refused == {2: "IdentityRefused"}
    assert registration.reports == {
        1: DeviceReport(name="d1", num_examples=10, layout_digest="same")
    }
