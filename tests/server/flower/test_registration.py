"""New nodes are asked once; left-out devices are asked again without waiting for the answer."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from flwr.app import Error, Message
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from headwater.common.errors import HeadwaterError, TaskFailed
from headwater.common.flower import records
from headwater.common.flower.grid import HeadwaterGrid, ensure_message_id
from headwater.common.messages import DescribeRequest, DeviceReport
from headwater.server.flower.registration import PATIENCE_SECONDS, SILENT_SECONDS, Registration

REQUEST = DescribeRequest(run_seed=0, wants_speed=True, layout_digest="same", num_parameters=1)
LEFT_OUT = REQUEST.model_copy(update={"left_out": "one example takes 3.1 s of its 2.0 s"})


class Wire(HeadwaterGrid):
    """A grid whose test decides which node answers what, and when."""

    def __init__(self, *nodes: int) -> None:
        super().__init__()
        self.nodes = list(nodes)
        self.requests: list[Message] = []
        self.names: dict[int, str] = {}
        self.refused: dict[int, str] = {}
        self._answers: list[Message] = []
        self._open: dict[int, Message] = {}
        self.enter_run(secrets.randbits(62))

    def num_bytes(self) -> tuple[int, int]:
        return 0, 0

    def get_node_ids(self) -> Iterable[int]:
        return self.nodes

    def name_of(self, node_id: int) -> str | None:
        return self.names.get(node_id)

    def refuse(self, node_id: int, error: HeadwaterError) -> None:
        self.refused[node_id] = error.code
        self.nodes.remove(node_id)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = {ensure_message_id(message): message for message in messages}
        self.requests += pushed.values()
        return list(pushed)

    def replies_to(self, message_ids: Iterable[str]) -> Iterator[Message]:
        answers, self._answers = self._answers, []
        yield from answers

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        raise NotImplementedError

    def new_requests(self) -> list[tuple[int, str | None]]:
        """Return the nodes asked since the last call, each with its reason for being left out."""
        found = [
            (m.metadata.dst_node_id, records.read(m.content, DescribeRequest).left_out)
            for m in self.requests
        ]
        self._open |= {m.metadata.dst_node_id: m for m in self.requests}
        self.requests = []
        return found

    def answer(self, node: int, **changes: Any) -> None:
        """Answer a node's last request."""
        report = {"name": f"d{node}", "num_examples": 10, "layout_digest": "same"} | changes
        content = records.content_with_head(json.dumps(report), None)
        self._answers.append(Message(content, reply_to=self._open[node]))

    def fail(self, node: int, error: Error) -> None:
        self._answers.append(Message(error, reply_to=self._open[node]))


class FlowerNodes(Grid):
    """A grid of Flower's own, whose nodes never answer."""

    def __init__(self, *nodes: int) -> None:
        self._nodes = nodes

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return self._nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [ensure_message_id(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        return iter(())

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        raise NotImplementedError


def known(*nodes: int, clock: Callable[[], float] = time.monotonic) -> tuple[Registration, Wire]:
    """Return a registration in which these nodes are described."""
    wire = Wire(*nodes)
    registration = Registration(wire, clock=clock)
    registration.update(REQUEST)
    assert wire.new_requests() == [(node, None) for node in nodes]
    for node in nodes:
        wire.answer(node)
    registration.update(REQUEST)
    assert {node: report.name for node, report in registration.reports.items()} == {
        node: f"d{node}" for node in nodes
    }
    return registration, wire


def examples(registration: Registration) -> dict[int, int | None]:
    return {node: report.num_examples for node, report in registration.reports.items()}


def test_a_left_out_device_gets_the_reason_and_its_answer_replaces_the_old_one() -> None:
    registration, wire = known(1, 2)
    registration.ask_again({"d2": LEFT_OUT})
    assert wire.new_requests() == [(2, LEFT_OUT.left_out)]
    wire.answer(2, num_examples=20)
    registration.update(REQUEST)
    assert examples(registration) == {1: 10, 2: 20}
    assert wire.refused == {}


def test_a_round_waits_for_as_many_beside_those_without_whom_it_begins() -> None:
    registration, _ = known(1, 2, 3)

    def counts(report: DeviceReport) -> bool:
        return report.name != "d1"

    assert registration.may_begin(min_clients=2, counts=counts)
    assert not registration.may_begin(min_clients=3, counts=counts)
    waits = registration.awaited(min_clients=3, counts=counts)
    assert waits == "waiting: 2 of 3 clients connected, without 1 that this round is not for"


def test_registration_does_not_wait_for_repeated_requests() -> None:
    registration, _ = known(1, 2)
    registration.ask_again({"d2": LEFT_OUT})
    registration.update(REQUEST)
    assert registration.may_begin(min_clients=2)
    assert examples(registration) == {1: 10, 2: 10}


def test_the_first_round_waits_once_for_newcomers_and_no_later_round_does() -> None:
    now = [0.0]
    wire = Wire(1)
    registration = Registration(wire, clock=lambda: now[0])
    registration.update(REQUEST)
    wire.new_requests()
    wire.answer(1)
    for node in range(2, 12):  # a newcomer a second, each silent
        wire.nodes.append(node)
        registration.update(REQUEST)
        assert not registration.may_begin(min_clients=1)
        now[0] += PATIENCE_SECONDS / 10
    assert registration.may_begin(min_clients=1)
    wire.nodes.append(12)
    registration.update(REQUEST)
    assert registration.may_begin(min_clients=1)
    assert examples(registration) == {1: 10}


def test_the_first_round_begins_at_once_when_every_newcomer_has_answered() -> None:
    registration, wire = known(1, 2)
    assert registration.may_begin(min_clients=2)
    assert not registration.may_begin(min_clients=3)
    wire.nodes.append(3)
    registration.update(REQUEST)
    assert registration.may_begin(min_clients=2)


def test_a_device_that_has_not_answered_is_not_asked_twice() -> None:
    registration, wire = known(1)
    registration.ask_again({"d1": LEFT_OUT})
    assert len(wire.new_requests()) == 1
    registration.ask_again({"d1": LEFT_OUT})
    registration.update(REQUEST)
    assert wire.new_requests() == []
    wire.answer(1)
    registration.update(REQUEST)
    registration.ask_again({"d1": LEFT_OUT})
    assert len(wire.new_requests()) == 1


def test_a_device_that_answered_a_later_message_may_be_asked_again() -> None:
    """An instruction to train takes the question's place on the stream of the device."""
    registration, wire = known(1)
    registration.ask_again({"d1": LEFT_OUT})
    wire.new_requests()
    registration.forget_repeats({1})
    registration.ask_again({"d1": LEFT_OUT})
    assert wire.new_requests() == [(1, LEFT_OUT.left_out)]


def test_a_known_device_that_ignores_a_repeated_request_is_not_refused() -> None:
    now = [0.0]
    registration, wire = known(1, clock=lambda: now[0])
    registration.ask_again({"d1": LEFT_OUT})
    now[0] = SILENT_SECONDS + 1
    registration.update(REQUEST)
    assert wire.refused == {}
    assert examples(registration) == {1: 10}
    registration.ask_again({"d1": LEFT_OUT})
    assert len(wire.new_requests()) == 2


def test_a_device_whose_description_takes_hours_joins_and_the_log_names_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    registration, wire = known(1, clock=lambda: now[0])
    wire.nodes.append(2)
    wire.names[2] = "d2"
    for _ in range(10):
        registration.update(REQUEST)
        now[0] += SILENT_SECONDS / 2 + 1
    wire.new_requests()
    assert [one.message for one in caplog.records] == [
        "d2 has not described itself within 300 s; it joins when it has"
    ]
    wire.answer(2)
    registration.update(REQUEST)
    assert examples(registration) == {1: 10, 2: 10}
    assert wire.refused == {}


def test_a_node_of_flowers_engines_that_stays_silent_is_refused() -> None:
    now = [0.0]
    nodes = FlowerNodes(1)
    registration = Registration(nodes, clock=lambda: now[0])
    registration.update(REQUEST)
    now[0] = SILENT_SECONDS + 1
    registration.update(REQUEST)
    assert registration.refused[1].code == "LateUpdate"


def test_a_disconnected_device_is_not_asked_again() -> None:
    registration, wire = known(1)
    wire.nodes.clear()
    registration.update(REQUEST)
    registration.ask_again({"d1": LEFT_OUT})
    assert wire.new_requests() == []


def test_a_known_device_that_fails_keeps_its_old_description() -> None:
    registration, wire = known(1)
    registration.ask_again({"d1": LEFT_OUT})
    wire.new_requests()
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
def test_a_known_device_with_a_false_answer_is_refused(lie: dict[str, Any], code: str) -> None:
    registration, wire = known(1, 2)
    registration.ask_again({"d1": LEFT_OUT})
    wire.new_requests()
    wire.answer(1, **lie)
    registration.update(REQUEST)
    assert wire.refused == {1: code}
    assert examples(registration) == {2: 10}


def test_a_second_device_of_a_name_is_refused() -> None:
    registration, wire = known(1)
    wire.nodes.append(2)
    registration.update(REQUEST)
    wire.new_requests()
    wire.answer(2, name="d1")
    registration.update(REQUEST)
    assert wire.refused == {2: "IdentityRefused"}
    assert registration.reports == {
        1: DeviceReport(name="d1", num_examples=10, layout_digest="same")
    }
