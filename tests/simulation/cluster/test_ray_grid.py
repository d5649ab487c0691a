"""On Ray a simulated device answers one message at a time, and no reply is lost by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest
from flwr.app import Message

from headwater.common.flower import records
from headwater.common.messages import EvaluateReport
from headwater.simulation.cluster.ray_grid import RayGrid, Stopped
from tests.server.flower.test_lost_nodes import REQUEST, SuperLink

ANSWER_SECONDS = 0.3


class Workers(SuperLink):
    """Flower's grid, with a worker for each message that answers after a while."""

    def __init__(self, *nodes: int) -> None:
        super().__init__(*nodes)
        self.most_at_once = 0
        self._begun: dict[str, float] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = list(super().push_messages(messages))
        self._begun |= dict.fromkeys(pushed, time.monotonic())
        nodes = [message.metadata.dst_node_id for message in self._open.values()]
        self.most_at_once = max(self.most_at_once, *map(nodes.count, nodes))
        return pushed

    def pull_messages(  # type: ignore[override]
        self, reply_to_message_ids: Iterable[str] | None = None, **_: Any
    ) -> Iterable[Message]:
        for message_id in list(reply_to_message_ids or ()):
            if time.monotonic() - self._begun[message_id] >= ANSWER_SECONDS:
                report = EvaluateReport(name="d", weight=1, loss_sum=0.0)
                yield Message(records.content_of(report), reply_to=self._open.pop(message_id))


def asked(node: int, kind: str) -> Message:
    return Message(records.content_of(REQUEST), node, f"query.{kind}", group_id="1")


def pulled(grid: RayGrid, message_ids: list[str]) -> list[str]:
    """Return the ids of what was answered, when all of it has been."""
    found: list[str] = []
    while len(found) < len(message_ids):
        replies = grid.pull_messages([one for one in message_ids if one not in found])
        found += [reply.metadata.reply_to_message_id for reply in replies]
    return found


def test_a_message_waits_for_the_answer_to_the_one_before() -> None:
    workers = Workers(1, 2)
    grid = RayGrid(workers, threading.Event())
    first = list(grid.push_messages([asked(1, "unmask"), asked(2, "unmask")]))
    second = list(grid.push_messages([asked(1, "describe")]))
    assert workers.most_at_once == 1
    assert pulled(grid, second) == second
    assert sorted(pulled(grid, first)) == sorted(first)


def test_a_wait_for_an_answer_ends_when_the_run_is_stopped() -> None:
    stop = threading.Event()
    grid = RayGrid(Workers(1), stop)
    list(grid.push_messages([asked(1, "unmask")]))
    stop.set()
    with pytest.raises(Stopped):
        grid.push_messages([asked(1, "describe")])
