"""Who must be waited for uses the time: the shares of a fleet whose links differ."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.messages import DeviceReport
from headwater.common.model.parameters import build_model
from headwater.common.settings.sources import load
from headwater.server.planning.cohort import ConnectedClients
from headwater.server.planning.equal_finish import (
    MORE_TIME,
    CohortColumns,
    equal_finish,
    round_end,
    share_wait,
)
from headwater.server.planning.features import planning_features
from headwater.server.planning.round_plans import RoundPlanner
from headwater.server.planning.target_batch import Target
from tests.tasks import TwoLayers

SECONDS = st.floats(1e-5, 1e2)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "size": st.integers(1, 64),
            "base": st.just(0.0) | SECONDS,
            "each": SECONDS,
            "fixed": st.just(0.0) | SECONDS,
            "most": st.integers(1, 2000),
        }
    ),
    min_size=1,
    max_size=12,
)


def cohort_of(rows: list[dict[str, Any]], turn_seconds: float = 0.0) -> CohortColumns:
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return CohortColumns(**columns, longest=np.full(len(rows), math.inf), turn_seconds=turn_seconds)


@given(rows=ROWS, turn=st.just(0.0) | st.floats(1e-5, 1.0), target=st.integers(1, 5000))
def test_the_sum_stays_and_the_round_takes_at_most_a_twentieth_longer(
    rows: list[dict[str, Any]], turn: float, target: int
) -> None:
    cohort = cohort_of(rows, turn)
    before, _ = equal_finish(cohort, target=target, finish_seconds=None)
    after = share_wait(cohort, before, least_share=0.25, finish_seconds=None)
    assert after.sum() == before.sum()
    assert (after >= 1).all()
    assert (after <= cohort.most).all()
    assert round_end(cohort, after) <= round_end(cohort, before) * (1 + MORE_TIME) * (1 + 1e-9)


@given(rows=ROWS, target=st.integers(1, 5000))
def test_no_quota_above_an_even_share_is_raised_and_none_below_it_lowered(
    rows: list[dict[str, Any]], target: int
) -> None:
    cohort = cohort_of(rows)
    before, _ = equal_finish(cohort, target=target, finish_seconds=None)
    after = share_wait(cohort, before, least_share=0.25, finish_seconds=None)
    even = before.sum() / len(before)
    assert (after[before > even] <= before[before > even]).all()
    assert (after[before <= even] >= before[before <= even]).all()


def test_ten_files_on_one_network_share_a_round_that_takes_150_ms_anyway() -> None:
    """Links of a millisecond or two decided: four clients had one example, "link-bound"."""
    links = [5e-4, 5e-4, 5e-4, 2e-3, 2e-3, 2e-3, 4e-3, 4e-3, 4e-3, 4e-3]
    rows = [
        {"size": 256, "base": 1.5e-3, "each": 2e-6, "fixed": link, "most": 217 + 30 * at}
        for at, link in enumerate(links)
    ]
    cohort = cohort_of(rows)
    before, _ = equal_finish(cohort, target=512, finish_seconds=None)
    assert before.tolist() == [168, 168, 169, *[1] * 7]
    after = share_wait(cohort, before, least_share=0.25, finish_seconds=None, round_seconds=0.15)
    assert after.sum() == before.sum()
    assert after.min() >= 0.95 * 51
    assert round_end(cohort, after) <= round_end(cohort, before) + 0.05 * 0.15


def test_a_fleet_that_computes_until_the_end_keeps_its_quotas() -> None:
    rows = [
        {"size": 8, "base": 0.0, "each": each, "fixed": 0.0, "most": 10_000}
        for each in (1e-3, 2e-3, 4e-3)
    ]
    cohort = cohort_of(rows)
    before, _ = equal_finish(cohort, target=700, finish_seconds=None)
    after = share_wait(cohort, before, least_share=0.25, finish_seconds=None)
    assert after.tolist() == before.tolist() == [400, 200, 100]


def test_a_slow_client_keeps_a_share_by_its_speed() -> None:
    rows = [
        {"size": 1, "base": 0.0, "each": each, "fixed": 0.0, "most": 10_000}
        for each in (1e-3, 1e-3, 1e-1)
    ]
    cohort = cohort_of(rows)
    before, _ = equal_finish(cohort, target=3000, finish_seconds=None)
    after = share_wait(cohort, before, least_share=0.25, finish_seconds=None)
    assert after.tolist() == before.tolist()


def test_a_deadline_is_no_later_for_small_shares() -> None:
    rows = [
        {"size": 1, "base": 0.0, "each": each, "fixed": fixed, "most": 10_000}
        for each, fixed in ((1e-3, 0.0), (1e-3, 0.0), (1e-2, 0.95))
    ]
    cohort = cohort_of(rows)
    before, _ = equal_finish(cohort, target=900, finish_seconds=1.0)
    after = share_wait(cohort, before, least_share=0.25, finish_seconds=1.0)
    assert round_end(cohort, after) <= max(round_end(cohort, before), 1.0)


def test_a_client_that_hardly_has_a_share_is_named_once_with_what_to_set(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = load(None, {"task": "none"})
    layout = build_model(TwoLayers(), seed=0).layout
    target = Target(settings.plan, max_weight_per_example=1, demand=None)
    planner = RoundPlanner(settings, target, layout)
    reports = {
        name: DeviceReport(
            name=name,
            num_examples=5000,
            layout_digest="d",
            seconds_per_micro_batch=0.0,
            seconds_per_example=each,
        )
        for name, each in (("laptop", 1e-3), ("desktop", 1e-3), ("zero", 2e-2))
    }
    clients = ConnectedClients(reports=reports, described=(), disconnected=())
    with caplog.at_level("WARNING"):
        planned = [
            planner.plan(clients, round_number=number, counted={}, turn_seconds=0.0)
            for number in (1, 2)
        ]
    assert [one.below_share for one in planned] == [("zero",)] * 2
    assert caplog.text.count("less than 0.25 of an even share") == 1
    assert "--accumulation-steps" in caplog.text
    plans = planned[0].plans
    share = plans["zero"].quota / sum(plan.quota for plan in plans.values())
    assert f"zero {share:.1%}" in caplog.text


def test_a_masked_client_with_a_small_share_measures_again_after_rounds_2_4_and_8() -> None:
    task = "tests/tasks.py:TwoLayers"
    settings = load(None, {"task": task, "secure.aggregation": "semi-honest"})
    layout = build_model(TwoLayers(), seed=0).layout
    planner = RoundPlanner(
        settings,
        Target(settings.plan, max_weight_per_example=1, demand=None),
        layout,
        features=[*planning_features(settings, layout)],
    )

    def report(name: str, each: float) -> DeviceReport:
        return DeviceReport(
            name=name,
            num_examples=5000,
            layout_digest="d",
            seconds_per_micro_batch=0.0,
            seconds_per_example=each,
        )

    reports = {name: report(name, each) for name, each in (("a", 0.1), ("b", 1e-3), ("c", 1e-3))}
    described: tuple[str, ...] = ()
    asked, quotas = [], []
    for number in range(1, 10):
        if number == 5:  # the second measurement was not in a busy second
            reports["a"], described = report("a", 1e-3), ("a",)
        clients = ConnectedClients(reports=reports, described=described, disconnected=())
        planned = planner.plan(clients, round_number=number, counted={}, turn_seconds=0.0)
        quotas.append(planned.plans["a"].quota)
        described = ()
        if planner.to_measure(planned, round_number=number):
            asked.append(number)
    assert asked == [2, 4]
    assert quotas[3] < quotas[4]
    assert abs(quotas[4] - planned.plans["b"].quota) <= 1
