"""The plans that clients may still answer survive a restart of the server."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headwater.common.errors import CountOutOfRange
from headwater.common.estimates.linear_fit import Line
from headwater.common.messages import Plan, UpdateReport
from headwater.common.offline.terms import OfflineTerms
from headwater.common.settings.schema import Settings
from headwater.server.asynchronous.plans_out import FILE, MOST_HASTE, PlansOut


def plan_of(version: int, *, quota: int = 4) -> Plan:
    return Plan(
        round=version + 1, run_seed=0, model_version=version, quota=quota, micro_batch_size=2
    )


def report(name: str, round_number: int, *, num_examples: int = 4) -> UpdateReport:
    return UpdateReport(
        name=name,
        round=round_number,
        num_examples=num_examples,
        weight=num_examples,
        loss_sum=1.0,
        micro_batch_size=2,
        seconds=1.0,
        steps=(),
        reason="quota",
    )


def plans_in(
    folder: Path,
    *,
    max_staleness: int = 5,
    offline_windows: int = 3,
    algorithm: str = "exact",
    wall_clock: Callable[[], float] = time.time,
    steady_clock: Callable[[], float] = time.monotonic,
    clock: str | None = None,
) -> PlansOut:
    chosen = {
        "is_on": True,
        "max_staleness": max_staleness,
        "offline_windows": offline_windows,
    }
    settings = {"out": folder, "asynchronous": chosen, "local": {"algorithm": algorithm}}
    return PlansOut(
        Settings.model_validate(settings),
        wall_clock=wall_clock,
        steady_clock=steady_clock,
        clock=clock,
    )


def test_plans_are_known_to_the_next_server_until_they_are_answered(tmp_path: Path) -> None:
    before, after = plans_in(tmp_path), plans_in(tmp_path)
    before.add({"pi": plan_of(3), "laptop": plan_of(3)}, version=3)
    before.add({"pi": plan_of(4)}, version=4)
    after.restore(version=4, counted={})
    assert (after.answered_by(report("pi", 4)), after.answered_by(report("pi", 5))) == (
        plan_of(3),
        plan_of(4),
    )
    after.remove("pi", 4)
    assert (after.answered_by(report("pi", 4)), after.answered_by(report("pi", 5))) == (
        None,
        plan_of(4),
    )
    assert after.answered_by(report("laptop", 4)) == plan_of(3)


def test_plans_of_models_that_are_too_old_are_forgotten(tmp_path: Path) -> None:
    plans = plans_in(tmp_path)
    plans.add({"pi": plan_of(1)}, version=1)
    plans.add({"laptop": plan_of(7)}, version=7)
    assert plans.answered_by(report("pi", 2)) is None


def test_a_plan_that_the_checkpoint_has_counted_is_not_open_again(tmp_path: Path) -> None:
    plans_in(tmp_path).add({"pi": plan_of(3), "laptop": plan_of(3)}, version=3)
    after = plans_in(tmp_path)
    after.restore(version=5, counted={"pi": 4, "laptop": 3})
    assert (after.answered_by(report("pi", 4)), after.answered_by(report("laptop", 4))) == (
        None,
        plan_of(3),
    )


def test_a_plan_of_a_model_after_the_checkpoint_is_forgotten(tmp_path: Path) -> None:
    plans_in(tmp_path).add({"pi": plan_of(3), "laptop": plan_of(4)}, version=4)
    after = plans_in(tmp_path)
    after.restore(version=3, counted={})
    assert (after.answered_by(report("pi", 4)), after.answered_by(report("laptop", 5))) == (
        plan_of(3),
        None,
    )


def test_a_plan_of_another_algorithm_is_forgotten(tmp_path: Path) -> None:
    plans_in(tmp_path).add({"pi": plan_of(3)}, version=3)
    after = plans_in(tmp_path, algorithm="fedavg")
    after.restore(version=3, counted={})
    assert after.answered_by(report("pi", 4)) is None


PACE = Line(base=0.5, each=0.25)
WINDOW_SECONDS = 2 * 0.5 + 4 * 0.25  # of four examples in two micro-batches


@pytest.mark.parametrize("is_restarted", [False, True])
def test_windows_that_a_client_had_no_time_for_are_refused(
    tmp_path: Path, *, is_restarted: bool
) -> None:
    now, plan = [1000.0], plan_of(3).asking(OfflineTerms(windows=50))
    plans = plans_in(tmp_path, offline_windows=50, wall_clock=lambda: now[0])
    plans.add({"pi": plan}, version=3)
    if is_restarted:
        plans = plans_in(tmp_path, offline_windows=50, wall_clock=lambda: now[0])
        plans.restore(version=3, counted={})
    many = report("pi", 4, num_examples=200).model_copy(update={"num_windows": 50})
    now[0] += 50 * WINDOW_SECONDS / MOST_HASTE * 0.99
    with pytest.raises(CountOutOfRange, match="pi: 50 windows in 24"):
        plans.check_time(many, plan, PACE)
    now[0] += 1.0
    plans.check_time(many, plan, PACE)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_clock_that_was_set_back_takes_no_time_from_a_client(
    tmp_path: Path, *, is_restarted: bool
) -> None:
    wall, steady, plan = [1000.0], [50.0], plan_of(3).asking(OfflineTerms(windows=50))
    kept: dict[str, Any] = {"offline_windows": 50, "wall_clock": lambda: wall[0]}
    plans = plans_in(tmp_path, **kept, steady_clock=lambda: steady[0])
    plans.add({"pi": plan}, version=3)
    many = report("pi", 4, num_examples=200).model_copy(update={"num_windows": 50})
    if is_restarted:
        plans = plans_in(tmp_path, **kept)
        plans.restore(version=3, counted={})
    wall[0] -= 3600.0
    steady[0] += 50 * WINDOW_SECONDS
    plans.check_time(many, plan, PACE)


def test_the_clock_of_another_machine_s_server_says_nothing(tmp_path: Path) -> None:
    """A standby two minutes behind refused windows that were honestly made."""
    plan, many = plan_of(3).asking(OfflineTerms(windows=50)), report("pi", 4, num_examples=200)
    many = many.model_copy(update={"num_windows": 50})
    first = plans_in(tmp_path, offline_windows=50, wall_clock=lambda: 1000.0, clock="a")
    first.add({"pi": plan}, version=3)
    for clock, now in (("b", 880.0), ("b", 4600.0), ("a", 4600.0)):
        after = plans_in(tmp_path, offline_windows=50, wall_clock=partial(float, now), clock=clock)
        after.restore(version=3, counted={})
        after.check_time(many, plan, PACE)
    with pytest.raises(CountOutOfRange):
        first.check_time(many, plan, PACE)


def test_one_window_and_a_run_without_speeds_have_no_such_limit(tmp_path: Path) -> None:
    plans, plan = plans_in(tmp_path, wall_clock=lambda: 1000.0), plan_of(3)
    plans.add({"pi": plan}, version=3)
    plans.check_time(report("pi", 4), plan, PACE)
    plans.check_time(report("pi", 4).model_copy(update={"num_windows": 3}), plan, None)


def test_a_damaged_file_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"pi": ["{"]}')
    plans = plans_in(tmp_path)
    plans.restore(version=1, counted={})
    assert plans.answered_by(report("pi", 1)) is None


def test_nothing_is_written_without_offline_windows(tmp_path: Path) -> None:
    plans = plans_in(tmp_path, offline_windows=1)
    plans.add({"pi": plan_of(0)}, version=0)
    assert not (tmp_path / FILE).exists()


def test_a_round_that_two_servers_planned_has_both_plans(tmp_path: Path) -> None:
    """A device without a link works on the first plan; the next server's plan may be smaller."""
    plans_in(tmp_path).add({"pi": plan_of(3, quota=6)}, version=3)
    after = plans_in(tmp_path)
    after.restore(version=3, counted={})
    after.add({"pi": plan_of(3, quota=4)}, version=3)
    found = [after.answered_by(report("pi", 4, num_examples=number)) for number in (4, 6, 8)]
    assert [None if plan is None else plan.quota for plan in found] == [4, 6, 4]
    after.remove("pi", 4)
    assert after.answered_by(report("pi", 4)) is None
