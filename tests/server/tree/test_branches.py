"""A server with aggregators: their lists are of the round, and each device is in one branch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from flwr.app import Message

from headwater.common.errors import AggregatorRefused, ConnectionLost, HeadwaterError
from headwater.common.flower import records
from headwater.common.messages import DeviceReport, Plan
from headwater.common.settings.schema import Settings
from headwater.common.tree.branch_messages import MEMBERS, Members, MembersRequest
from headwater.server.fleet import Dropout
from headwater.server.flower import grid_fleet
from headwater.server.flower.grid_fleet import GridFleet
from headwater.server.flower.registration import Registration
from headwater.server.tree.branch_wire import members_payload
from headwater.server.tree.branches import SILENT_BRANCH_SECONDS, Branches, DividedPlans
from headwater.server.tree.trusted_aggregators import refusal_of_branch
from tests.server.flower.test_registration import REQUEST, Wire


class Tree:
    """A registration of aggregators a1, a2, ..., for whose devices the test answers."""

    def __init__(self, *nodes: int, refusal: AggregatorRefused | None = None) -> None:
        self.now = 0.0
        self.wire = Wire(*nodes)
        clock = lambda: self.now  # noqa: E731
        self.branches = branches_of(self.wire, refusal=refusal, clock=clock)
        self.found = Registration(self.wire, clock=clock, intermediaries=self.branches)
        self.found.update(REQUEST)
        self.wire.new_requests()
        for node in nodes:
            self.wire.answer(node, name=f"a{node}", num_examples=None, is_aggregator=True)
        self.found.update(REQUEST)  # takes the answers
        self.found.update(REQUEST)

    def asked(self) -> dict[int, Message]:
        """Return the requests for lists since the last call, by node."""
        requests, self.wire.requests = self.wire.requests, []
        return {message.metadata.dst_node_id: message for message in requests}

    def list(self, request: Message, *names: str, examples: int = 10) -> None:
        self.wire._answers.append(list_of(request, *names, examples=examples))
        self.found.update(REQUEST)

    def begin_round(self) -> dict[int, Message]:
        self.branches.begin_round()
        self.found.update(REQUEST)
        return self.asked()


def no_order(plans: Any) -> Any:
    raise AssertionError("no plans are sent")


def branches_of(grid: Any, *, refusal: AggregatorRefused | None = None, **clock: Any) -> Branches:
    return Branches(grid, order=no_order, refusal=lambda name: refusal, **clock)


def list_of(request: Message, *names: str, examples: int = 10) -> Message:
    """Return an aggregator's answer to the request for its list."""
    devices = tuple(
        DeviceReport(name=name, num_examples=examples, layout_digest="same") for name in names
    )
    head, vector = members_payload(f"a{request.metadata.dst_node_id}", Members(devices=devices))
    content = records.content_of(head, records.flat_array(vector, dtype="uint8"))
    return Message(content, reply_to=request)


class OneAggregator(Wire):
    """The grid of an aggregator that lists its two devices when the test lets it."""

    def __init__(self, *, may_list: Callable[[], bool]) -> None:
        super().__init__(1)
        self._may_list = may_list

    def replies_to(self, message_ids: Iterable[str]) -> Iterator[Message]:
        listing = f"query.{MEMBERS}"
        if any(one.metadata.message_type != listing for one in self.requests):
            self.new_requests()
            self.answer(1, name="a1", num_examples=None, is_aggregator=True)
        elif self.requests and self._may_list():
            self._answers.append(list_of(self.requests.pop(), "x", "y"))
        return super().replies_to(message_ids)


def plans_of(*names: str) -> dict[str, Plan]:
    plan = Plan(round=1, run_seed=0, quota=4, micro_batch_size=4, model_version=0)
    return dict.fromkeys(names, plan)


def test_an_aggregator_s_devices_are_the_clients_and_not_the_aggregator() -> None:
    tree = Tree(1, 2)
    asked = tree.asked()
    tree.list(asked[1], "x", "y")
    tree.list(asked[2], "z")
    assert sorted(tree.found.clients()) == ["x", "y", "z"]
    divided = tree.branches.divide(plans_of("x", "y", "z"), ["a1", "a2"])
    assert {name: sorted(plans) for name, plans in divided.branches.items()} == {
        "a1": ["x", "y"],
        "a2": ["z"],
    }
    assert not divided.direct


def test_a_listed_device_with_an_aggregator_s_name_is_no_client() -> None:
    tree = Tree(1, 2)
    asked = tree.asked()
    tree.list(asked[1], "x", "a1", "a2")
    tree.list(asked[2], "z")
    assert sorted(tree.found.clients()) == ["x", "z"]


def test_each_round_waits_for_the_lists_of_all_aggregators() -> None:
    tree = Tree(1, 2)
    for number in range(3):
        asked = tree.asked() if number == 0 else tree.begin_round()
        assert sorted(asked) == [1, 2]
        tree.list(asked[1], "x")
        assert not tree.found.may_begin(min_clients=1)
        tree.list(asked[2], "z")
        assert tree.found.may_begin(min_clients=2)


def test_the_first_round_waits_for_an_aggregator_that_joins_with_enough_devices() -> None:
    wire = Wire(1, 2)
    found = Registration(wire, intermediaries=branches_of(wire))
    found.update(REQUEST)
    wire.new_requests()
    wire.answer(1)
    wire.answer(2, name="a2", num_examples=None, is_aggregator=True)
    found.update(REQUEST)
    assert not found.may_begin(min_clients=1)
    [request] = wire.requests
    wire._answers.append(list_of(request, "x"))
    found.update(REQUEST)
    assert found.may_begin(min_clients=2)


def test_a_server_that_waits_for_a_list_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    grid = OneAggregator(may_list=lambda: not fleet_has_list or bool(caplog.messages))
    fleet = GridFleet(grid, intermediaries=branches_of(grid))
    fleet_has_list = False
    fleet.describe(REQUEST, min_clients=1)
    fleet_has_list = True
    monkeypatch.setattr(grid_fleet, "FIRST_NOTICE_SECONDS", 0.0)
    assert sorted(fleet.describe(REQUEST, min_clients=1).reports) == ["x", "y"]
    assert caplog.messages == ["waiting for the list of devices of a1"]


def test_an_equal_description_is_kept_as_it_is_so_that_measured_speeds_stay() -> None:
    tree = Tree(1)
    tree.list(tree.asked()[1], "x", "y")
    before = tree.found.clients()
    tree.list(tree.begin_round()[1], "x", "y")
    assert tree.found.clients()["x"] is before["x"]
    tree.list(tree.begin_round()[1], "x", "y", examples=20)
    assert tree.found.clients()["x"].num_examples == 20


def test_a_device_in_two_branches_counts_in_one(caplog: pytest.LogCaptureFixture) -> None:
    tree = Tree(1, 2)
    asked = tree.asked()
    tree.list(asked[1], "x", "moved")
    tree.list(asked[2], "moved", "z")
    assert sorted(tree.found.clients()) == ["moved", "x", "z"]
    divided = tree.branches.divide(plans_of("x", "moved", "z"), ["a1", "a2"])
    assert [len(plans) for plans in divided.branches.values()] == [2, 1]
    assert "moved is listed by a2, and was first at a1" in caplog.text
    asked = tree.begin_round()
    tree.list(asked[1], "x")
    tree.list(asked[2], "moved", "z")
    divided = tree.branches.divide(plans_of("x", "moved", "z"), ["a1", "a2"])
    assert [len(plans) for plans in divided.branches.values()] == [1, 2]


def test_a_silent_aggregator_is_in_no_round_until_it_answers() -> None:
    tree = Tree(1, 2)
    asked = tree.asked()
    tree.list(asked[1], "x")
    tree.list(asked[2], "z")
    late = tree.begin_round()
    tree.list(late[1], "x")
    assert not tree.found.may_begin(min_clients=1)
    tree.now += SILENT_BRANCH_SECONDS
    assert tree.found.may_begin(min_clients=1)
    assert sorted(tree.found.clients()) == ["x"]
    tree.list(tree.begin_round()[1], "x")
    assert tree.found.may_begin(min_clients=1)  # at once
    tree.list(tree.begin_round()[2], "z")
    assert "z" in tree.found.clients()


def test_a_lost_aggregator_s_devices_leave_with_it() -> None:
    tree = Tree(1, 2)
    asked = tree.asked()
    tree.list(asked[1], "x")
    tree.list(asked[2], "z")
    tree.wire.nodes.remove(2)
    tree.found.update(REQUEST)
    assert sorted(tree.found.clients()) == ["x"]


def test_a_lost_answer_is_one_dropout_for_each_device_of_the_branch() -> None:
    plans = plans_of("x", "y", "z")
    sent = DividedPlans(
        direct={"z": plans["z"]}, branches={"a1": plans_of("x", "y")}, order=no_order
    )
    error: HeadwaterError = ConnectionLost("a1 lost its connection")
    answers: Iterable[Any] = [
        Dropout(name="a1", error=error),
        Dropout(name="z", error=ConnectionLost("z left")),
    ]
    assert [answer.name for answer in sent.of_clients(answers)] == ["x", "y", "z"]
    assert sent.sizes == [1, 2]


def test_left_out_devices_are_described_again_with_the_next_list() -> None:
    tree = Tree(1)
    tree.list(tree.asked()[1], "x")
    again = REQUEST.model_copy(update={"left_out": "too slow"})
    tree.found.ask_again({"x": again})
    assert tree.asked() == {}
    asked = tree.begin_round()
    assert records.read(asked[1].content, MembersRequest).left_out == {"x": "too slow"}
    tree.list(asked[1], "x")
    assert records.read(tree.begin_round()[1].content, MembersRequest).left_out == {}


def test_a_run_that_needs_single_updates_refuses_aggregators_by_name() -> None:
    tree = Tree(1, refusal=AggregatorRefused("this run takes no aggregators: masks"))
    assert tree.wire.refused == {1: "AggregatorRefused"}
    assert tree.asked() == {}


def test_a_server_takes_only_the_aggregators_that_its_settings_name() -> None:
    settings = Settings.model_validate({"server": {"aggregators": "north, south"}})
    trusting = refusal_of_branch(settings)
    assert trusting("north") is None
    assert trusting("south") is None
    refused = trusting("mallory")
    assert refused is not None
    assert "--trusted-aggregators mallory" in refused.remedy
    assert refusal_of_branch(Settings())("north") is not None
