"""Two plans of a client at a time: which follow on which, and which are dropped."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from headwater.common.errors import SettingsError
from headwater.common.messages import Plan
from headwater.server.asynchronous.overlapping_plans import OverlappingPlans, overlapping
from tests.plans import plan_of


class Sent:
    """A fleet that notes whose answers wait, and whose it drops."""

    takes_two_plans = True

    def __init__(self) -> None:
        self.held: Collection[str] = ()
        self.dropped: list[str] = []

    def hold_back(self, names: Collection[str]) -> None:
        self.held = names

    def drop(self, names: Collection[str]) -> None:
        self.dropped += names


def made() -> tuple[OverlappingPlans, Any]:
    sent: Any = Sent()
    return OverlappingPlans(sent), sent


def plan(number: int) -> Plan:
    return plan_of(round=number, run_seed=0, model_version=number - 1, quota=1, micro_batch_size=1)


def test_a_second_plan_is_for_the_next_step_and_names_the_first() -> None:
    plans, _ = made()
    at_work = dict(overlapping({"a": plan(1), "b": plan(1)}))
    new = plans.add({"a": plan(1), "c": plan(1)}, at_work)
    assert {name: (one.round, one.model_version, one.after_round) for name, one in new.items()} == {
        "a": (2, 0, 1)
    }
    assert all(one.overlaps for one in (*at_work.values(), *new.values()))
    assert plans.add({"a": plan(2)}, at_work) == {}  # it has two


def test_a_second_plan_is_carried_on_only_if_the_first_one_counted() -> None:
    plans, sent = made()
    at_work = {"a": plan(1), "b": plan(1), "c": plan(1)}
    plans.add(at_work, at_work)
    del at_work["a"], at_work["b"]
    plans.begin(at_work, counted={"a": 1})  # the step with the update of b was aborted
    assert sorted(at_work) == ["a", "c"]
    assert (at_work["a"].round, at_work["c"].round) == (2, 1)
    assert (sent.dropped, [*plans.plans]) == (["b"], ["c"])


def test_a_refused_update_drops_the_plan_after_it_and_an_accepted_one_holds_it_back() -> None:
    plans, sent = made()
    at_work = {"a": plan(1), "b": plan(1), "c": plan(1)}
    plans.add(at_work, at_work)
    plans.note_answers({"a"}, {"b"})
    assert (list(sent.held), sent.dropped, sorted(plans.plans)) == (["a"], ["b"], ["a", "c"])


def test_a_fleet_of_one_plan_at_a_time_is_refused_by_name() -> None:
    sent: Any = Sent()
    sent.takes_two_plans = False
    with pytest.raises(SettingsError, match="--overlap"):
        OverlappingPlans(sent)
