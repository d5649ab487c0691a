"""Curves by cost, medians over seeds, the target, and the order of the candidates."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.common.settings.schema import Settings
from headwater.simulation.compare.budget import Budget
from headwater.simulation.compare.candidates import Candidate
from headwater.simulation.compare.standing import Spread, derived_target, equal_amount, ranked
from headwater.simulation.compare.trajectory import summed, trajectory_of
from headwater.simulation.sweep.grid import SweepRun
from headwater.simulation.sweep.results import Result, RoundCost
from tests.simulation.compare.standings import RATE, curve, standing


def test_costs_add_up_over_all_rounds_and_values_stand_at_the_evaluated_ones() -> None:
    run = SweepRun(point={}, seed=0, settings=Settings(out=Path("run")))
    costs = {n: RoundCost(num_bytes=10 * n, num_examples=n, seconds=0.5) for n in (1, 2, 3, 4)}
    result = Result(
        run=run,
        has_diverged=False,
        num_rounds=4,
        curves={"test_accuracy": {2: 0.5, 4: 0.75}},
        costs=costs,
    )
    found = trajectory_of(result, "test_accuracy", is_smaller_better=False)
    assert found.values == (0.5, 0.75)
    assert [cost["bytes"] for cost in found.spent] == [30, 100]
    assert found.total == {"rounds": 4, "bytes": 100, "examples": 10, "seconds": 2.0}
    assert summed([found.total, found.total])["seconds"] == 4.0


def test_the_value_at_a_cost_is_the_last_one_that_it_pays_for() -> None:
    run = curve(0.1, 0.5, 0.4, bytes_each=100)
    assert [run.at("bytes", amount) for amount in (99, 100, 299, 300, 1e9)] == [
        *(None, 0.1, 0.5, 0.4, 0.4)
    ]


def test_the_target_is_reached_at_the_first_value_as_good() -> None:
    cost = curve(0.1, 0.9, 0.2, 0.95).cost_to(0.9)
    assert cost is not None
    assert cost["rounds"] == 2
    assert curve(0.1, 0.2).cost_to(0.9) is None
    falling = curve(4.0, 2.0, 1.0, is_smaller_better=True).cost_to(2.0)
    assert falling is not None
    assert falling["rounds"] == 2


def test_a_seed_that_did_not_reach_the_target_counts_as_endless() -> None:
    runs = [curve(0.1, 0.9), curve(0.9, 0.9), curve(0.1, 0.1)]
    assert standing("a", *runs).cost_to(0.9, "rounds") == Spread(2, 1, math.inf)
    assert standing("a", *runs[1:]).cost_to(0.9, "rounds") is None
    assert standing("a", *runs[:2], num_diverged=3).cost_to(0.9, "rounds") is None


def test_equal_cost_is_the_most_that_every_run_spent() -> None:
    cheap = standing("cheap", curve(0.1, 0.2, bytes_each=10))
    dear = standing("dear", curve(0.3, 0.4, bytes_each=25), curve(0.3, 0.6, bytes_each=25))
    assert equal_amount([cheap, dear], "bytes") == 20
    assert cheap.at("bytes", 20) == Spread(0.2, 0.2, 0.2)
    assert dear.at("bytes", 20) is None  # its first value costs 25
    assert dear.at("bytes", 50) == Spread(0.5, 0.4, 0.6)
    assert equal_amount([standing("none")], "bytes") is None


def test_the_median_at_equal_cost_leaves_no_diverged_seed_out() -> None:
    assert standing("a", curve(0.5), num_diverged=1).at("rounds", 1) is None


def test_the_derived_target_is_nearly_the_best_and_rounded_to_the_easier_side() -> None:
    best = standing("best", curve(0.1, 0.978), curve(0.2, 0.978))
    worse = standing("worse", curve(0.3, 0.6))
    # 0.1 + 0.97 (0.978 - 0.1) = 0.9517
    assert derived_target([best, worse], is_smaller_better=False) == 0.95
    falling = standing("falling", curve(5.0, 1.0, is_smaller_better=True))
    # 5 - 0.97 x 4 = 1.12
    assert derived_target([falling], is_smaller_better=True) == 1.2
    assert derived_target([standing("none")], is_smaller_better=True) is None
    assert derived_target([standing("flat", curve(0.5))], is_smaller_better=False) == 0.5


@pytest.mark.parametrize(
    ("resource", "expected"), [("rounds", ["fast", "slow"]), ("bytes", ["slow", "fast"])]
)
def test_the_best_reaches_the_target_with_the_least_of_the_budget_s_resource(
    resource: str, expected: list[str]
) -> None:
    fast = standing("fast", curve(0.1, 0.9, bytes_each=100))
    slow = standing("slow", curve(0.1, 0.5, 0.9, bytes_each=10))
    never = standing("never", curve(0.1, 0.8))
    lower = standing("lower", curve(0.1, 0.7))
    gone = standing("gone", num_diverged=1)
    budget = Budget(resource=resource, amount=1000)  # type: ignore[arg-type]
    order = ranked([lower, gone, never, slow, fast], 0.9, budget)
    assert [one.candidate.name for one in order] == [*expected, "never", "lower"]


def test_a_candidate_s_flags_can_be_typed() -> None:
    candidate = Candidate(
        name="fedavg E=5",
        point={"local.algorithm": "fedavg", "local.epochs": 5},
        rate_key="local.learning_rate",
        first_rate=0.1,
        other_branch="optimizer",
    )
    assert candidate.flags(0.3) == ("--algorithm fedavg --local-epochs 5 --local-learning-rate 0.3")


@pytest.mark.parametrize(
    ("tried", "is_at_end"),
    [
        ({RATE: 1.0}, False),
        ({0.3 * RATE: 0.5, RATE: 1.0}, True),
        ({RATE: 1.0, 3 * RATE: 0.5}, True),
    ],
)
def test_a_rate_at_the_end_of_those_tried_is_told(
    tried: dict[float, float | None], is_at_end: bool
) -> None:
    found = replace(standing("exact", curve(0.5)), tried=tried)
    assert found.has_rate_at_end is is_at_end
    between = replace(found, tried={0.3 * RATE: 0.5, RATE: 1.0, 3 * RATE: None})
    assert not between.has_rate_at_end
