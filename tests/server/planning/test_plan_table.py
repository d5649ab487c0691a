"""The table of a round's plans says what the plans say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.messages import Plan
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.planning import plan_table
from headwater.server.planning.plan_table import PlanTable
from tests.server.planning.planned import ROWS, assign, device, devices_of

FIGURES = (
    *("round", "model_version", "quota", "micro_batch_size", "max_examples", "accumulation_steps"),
    *("deadline_seconds", "finish_seconds", "share", "counted_round", "weigh_as"),
)
OTHERS = ("rows", "terms", "reason", "make", "_made")


def table_of(assigned: Any, settings: Settings, **given: Any) -> PlanTable:
    figures = {"counted": {}, "weights": {}, "frozen": None, "round_number": 3} | given
    return plan_table.plans_of(
        assigned, settings, micro_batch_size=lambda _, planned: planned, **figures
    )


@pytest.mark.parametrize(
    "chosen", [{}, {"plan.accumulation_steps": 3}, {"cohort.deadline_seconds": 40}]
)
@given(rows=ROWS, weigh_as=st.none() | st.integers(1, 99))
def test_each_column_has_what_the_plans_have(
    chosen: dict[str, Any], rows: list[dict[str, Any]], weigh_as: int | None
) -> None:
    settings, devices = load(None, chosen), devices_of(rows)
    assigned = assign(devices, settings.plan, target=300)
    weights = {} if weigh_as is None else dict.fromkeys(assigned, weigh_as)
    table = table_of(assigned, settings, counted={"d0": 2}, weights=weights)
    plans = {name: Plan.model_validate_json(one.model_dump_json()) for name, one in table.items()}
    for known in (table, PlanTable.of(plans), PlanTable.of(plans).some([*plans])):
        for name in FIGURES:
            own = [getattr(plan, name) for plan in plans.values()]
            expected = [np.nan if name in plan_table._FLOATS and x is None else x or 0 for x in own]
            np.testing.assert_array_equal(getattr(known, name), expected, err_msg=name)
        assert [known.reason(name) for name in known] == [one.reason for one in plans.values()]
        assert dict(known) == plans
    assert table.weights(7) == [one.weigh_as or 7 * one.max_examples for one in plans.values()]


def test_the_plans_of_twins_are_one_object_and_those_of_others_are_not() -> None:
    settings = load(None, {"plan.accumulation_steps": 3, "plan.micro_batch_size": 4})
    devices = [device("a", 50), device("b", 90), device("poor", 5), device("seen", 90)]
    table = table_of(assign(devices, settings.plan, target=9), settings, counted={"seen": 2})
    assert table["a"] is table["b"], "what they own bounds neither"
    assert len({id(plan) for plan in table.values()}) == 3
    some = table.some(["b", "poor"])
    assert list(some) == ["b", "poor"]
    assert some["b"] is table["a"]
    assert some.quota.tolist() == [12, 5]
