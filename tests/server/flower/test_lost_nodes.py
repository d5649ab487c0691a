"""On Flower's own grid a node that leaves is given up, though no error reply tells of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from torch import nn

from headwater.common.flower import records
from headwater.common.flower.grid import ensure_message_id, enter_run
from headwater.common.messages import DescribeRequest, DeviceReport, EvaluateReport, Plan
from headwater.common.model.parameters import ModelImage
from headwater.server.asynchronous.dispatching_grid_fleet import DispatchingGridFleet
from headwater.server.fleet import Dropout
from headwater.server.flower.registration import DESCRIBE, Registration

REQUEST = DescribeRequest(run_seed=0, wants_speed=True, layout_digest="same", num_parameters=1)
PLAN = Plan(round=1, run_seed=0, model_version=0, quota=1, micro_batch_size=1)


class SuperLink(Grid):
    """Flower's grid as of 1.43: nodes describe themselves, and one that leaves says nothing."""

    def __init__(self, *nodes: int) -> None:
        self.nodes = list(nodes)
        self.leaves_after_push: list[int] = []
        self.fails_to_push = False
        self._open: dict[str, Message] = {}
        enter_run(secrets.randbits(62))

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        if self.fails_to_push:
            return ["" for _ in messages]
        pushed = {ensure_message_id(message): message for message in messages}
        self._open |= pushed
        self.nodes = [node for node in self.nodes if node not in self.leaves_after_push]
        return list(pushed)

    def pull_messages(  # type: ignore[override]
        self, reply_to_message_ids: Iterable[str] | None = None, **_: Any
    ) -> Iterable[Message]:
        for message_id in list(reply_to_message_ids or ()):
            message = self._open[message_id]
            node = message.metadata.dst_node_id
            if message.metadata.message_type == DESCRIBE and node in self.nodes:
                report = DeviceReport(name=f"d{node}", num_examples=9, layout_digest="same")
                yield Message(records.content_of(report), reply_to=self._open.pop(message_id))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise NotImplementedError


class BusySimulator(SuperLink):
    """A simulator's grid, whose workers are busy with something else at first."""

    has_virtual_clock = True

    def __init__(self, *nodes: int, busy_seconds: float) -> None:
        super().__init__(*nodes)
        self._busy_until = time.monotonic() + busy_seconds

    def pull_messages(  # type: ignore[override]
        self, reply_to_message_ids: Iterable[str] | None = None, **_: Any
    ) -> Iterable[Message]:
        yield from super().pull_messages(reply_to_message_ids)
        for message_id in [*self._open] if time.monotonic() > self._busy_until else ():
            node = self._open[message_id].metadata.dst_node_id
            report = EvaluateReport(name=f"d{node}", weight=1, loss_sum=0.0)
            yield Message(records.content_of(report), reply_to=self._open.pop(message_id))


def fleet_on(grid: SuperLink, nodes: int) -> DispatchingGridFleet:
    fleet = DispatchingGridFleet(grid)
    fleet.describe(REQUEST, min_clients=nodes)
    return fleet


def lost(answer: object) -> tuple[str, str]:
    assert isinstance(answer, Dropout)
    return answer.name, answer.error.code


def test_a_round_without_a_deadline_goes_on_when_a_node_is_lost_in_it() -> None:
    grid, image = SuperLink(1, 2), ModelImage(nn.Linear(2, 1))
    fleet = fleet_on(grid, 2)
    grid.leaves_after_push = [1, 2]
    answers = fleet.train({"d1": PLAN, "d2": PLAN}, image, timeout_seconds=None)
    assert {lost(answer) for answer in answers} == {
        ("d1", "ConnectionLost"),
        ("d2", "ConnectionLost"),
    }


def test_a_simulated_device_is_not_late_because_its_worker_is() -> None:
    grid, image = BusySimulator(1, busy_seconds=0.5), ModelImage(nn.Linear(2, 1))
    fleet = fleet_on(grid, 1)
    assert fleet.has_virtual_clock
    (answer,) = fleet.evaluate({"d1": PLAN}, image, timeout_seconds=0.1)
    assert isinstance(answer, EvaluateReport)


def test_an_asynchronous_plan_of_a_lost_node_is_given_up() -> None:
    grid, image = SuperLink(1, 2), ModelImage(nn.Linear(2, 1))
    fleet = fleet_on(grid, 2)
    grid.leaves_after_push = [2]
    fleet.dispatch({"d2": PLAN}, image, round_number=1)
    assert lost(fleet.next_answer()) == ("d2", "ConnectionLost")


def test_the_first_round_does_not_wait_for_a_newcomer_that_has_left() -> None:
    grid = SuperLink(1, 2)
    grid.leaves_after_push = [2]
    registration = Registration(grid)
    registration.update(REQUEST)
    registration.update(REQUEST)
    assert registration.may_begin(min_clients=1)


def test_a_request_that_could_not_be_pushed_is_sent_again() -> None:
    grid = SuperLink(1)
    registration = Registration(grid)
    grid.fails_to_push = True
    registration.update(REQUEST)
    grid.fails_to_push = False
    registration.update(REQUEST)
    registration.update(REQUEST)
    assert set(registration.clients()) == {"d1"}
