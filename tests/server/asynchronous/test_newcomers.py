"""Clients that join while a masked buffer fills: what their plans say of the others."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from flwr.app import Message

from headwater.common.errors import ConnectionLost
from headwater.common.flower import records
from headwater.common.messages import Plan
from headwater.common.secagg.terms import MaskingTerms
from headwater.server.asynchronous.buffered_rounds import BufferedRounds
from headwater.server.asynchronous.dispatching_grid_fleet import DispatchingGridFleet
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.run_state import Training
from tests.masked import RUN, settings_of
from tests.server.asynchronous.test_dispatched_plans import Answering

NEWCOMER = 5


class Joined(Exception):
    """The newcomer has its plan."""


class Joining(Answering):
    """A grid that loses its node 4, and then has one more; the others are still at work."""

    def dispatch(self, messages: Iterable[Message]) -> list[str]:
        sent = super().dispatch(messages)
        if NEWCOMER in self.nodes:
            raise Joined
        return sent

    def next_reply(self, *, timeout: float) -> Message | None:
        if 4 in self.nodes:
            self.nodes.remove(4)
            lost = records.to_flower_error(ConnectionLost("d4 left"), is_same_process=True)
            return Message(lost, reply_to=self.plans[3])
        self.nodes.append(NEWCOMER)
        self.while_waiting()
        return next(self.replies_to(()))


def test_a_newcomer_s_plan_counts_no_client_that_was_lost() -> None:
    settings = settings_of(
        cohort={"min_clients": 3},
        plan={"accumulation_steps": 2, "micro_batch_size": 4},
        asynchronous={"is_on": True, "buffer": 3},
        secure={"aggregation": "semi-honest"},
    )
    wire = Joining(1, 2, 3, 4)
    fleet = DispatchingGridFleet(wire)
    with pytest.raises(Joined):
        BufferedRounds(fleet, settings)(Training(settings, run_id=RUN), fleet, Observer())
    plans = [records.read(message.content, Plan) for message in wire.plans]
    assert [terms.num_invited for plan in plans if (terms := plan.of(MaskingTerms))] == [
        4,
        4,
        4,
        4,
        4,
    ]
