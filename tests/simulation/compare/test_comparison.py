"""Which runs a comparison needs next, and how it reads those that ended."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.common.errors import SettingsError
from headwater.common.settings.sources import load
from headwater.simulation.compare.budget import Budget, Resource
from headwater.simulation.compare.candidates import Shared
from headwater.simulation.compare.comparison import Comparison, plan_comparison
from headwater.simulation.sweep.grid import SweepRun
from headwater.simulation.sweep.worker import RESULT

TASK = "tests/tasks.py:TwoLayers"
NAMES = [
    *("exact", "fedavg E=1", "fedavg E=5", "fedprox E=5"),
    *("scaffold E=1", "client-momentum E=1", "fedavgm", "fedavgm muon", "diloco"),
]


def comparison(
    folder: Path,
    *,
    budget: Budget | None = None,
    tree: Any = None,
    is_quick: bool = False,
    **overrides: Any,
) -> Comparison:
    return plan_comparison(
        Shared(tree=tree or {}, overrides={"task": TASK, "simulation.clients": 4, **overrides}),
        seeds=(0, 1),
        budget=budget or Budget(resource="rounds", amount=9),
        metric=None,
        folder=folder,
        is_quick=is_quick,
    )


def rate_of(run: SweepRun) -> float:
    return float(run.point.get("optimizer.learning_rate") or run.point["local.learning_rate"])


def end(run: SweepRun, value: float, *, ended: str = "whole") -> None:
    """Write a result with this accuracy after each round; a round has 100 bytes, 8 examples."""
    rounds = [
        {
            "round": number,
            "loss": 1.0,
            "weight": 8,
            "metrics": {"test_accuracy": value},
            "num_examples": 8,
            "bytes_up": 40,
            "bytes_down": 60,
            "virtual_seconds": 0.5,
            "seconds": 9.0,
        }
        for number in range(1, (run.settings.num_rounds or 0) + 1)
    ]
    run.folder.mkdir(parents=True)
    result = {"ended": ended, "message": "", "rounds": rounds}
    (run.folder / RESULT).write_text(json.dumps(result))


def end_all(found: Comparison, value: Callable[[SweepRun], float]) -> list[SweepRun]:
    """Give each run that becomes due a result; return them in this order."""
    ended = []
    while due := found.due():
        for run in due:
            end(run, value(run))
        ended += due
    return ended


def nearness(run: SweepRun) -> float:
    """Return an accuracy that is the better, the nearer the rate is to the default's."""
    middle = {"exact": 0.01, "fedavgm": 0.001, "diloco": 0.001}.get(
        run.settings.local.algorithm, 0.1
    )
    return 0.9 - abs(math.log10(rate_of(run) / middle)) / 10


def test_three_rates_of_each_algorithm_come_first_with_a_third_of_the_rounds(
    tmp_path: Path,
) -> None:
    found = comparison(tmp_path)
    due = found.due()
    assert len(due) == 3 * len(NAMES)
    assert {run.settings.rounds for run in due} == {3}
    assert {run.seed for run in due} == {2}  # none of those that are compared
    assert [one.name for one in found.candidates] == NAMES


def test_an_algorithm_that_the_settings_refuse_is_not_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = comparison(tmp_path, tree={"aggregation": {"rule": "median"}})
    assert [one.name for one in found.candidates] == [one for one in NAMES if "scaffold" not in one]
    assert "scaffold E=1 is not compared: SCAFFOLD adds up" in caplog.text


@pytest.mark.parametrize(
    ("budget", "changes", "more"),
    [
        (
            "bytes",
            {},
            {
                *("exact int8", "fedavgm int4", "fedavgm int2", "fedavgm low-rank"),
                *("fedavgm muon int4", "fedavgm muon int2"),
            },
        ),
        ("seconds", {"secure.aggregation": "semi-honest"}, {"fedavgm low-rank"}),
        ("bytes", {"compression.up": "int8"}, set()),
        ("examples", {}, set()),
    ],
)
def test_where_bytes_count_some_algorithms_also_send_fewer(
    tmp_path: Path, budget: Resource, changes: dict[str, Any], more: set[str]
) -> None:
    found = comparison(tmp_path, budget=Budget(resource=budget, amount=1000), **changes)
    names = {one.name for one in found.candidates}
    assert {name for name in names if name not in NAMES} == more
    by_name = {one.name: one for one in found.candidates}
    if "fedavgm int2" in more:
        flags = "--algorithm fedavgm --compress int2 --compress-down int2 --local-learning-rate 0.1"
        assert by_name["fedavgm int2"].flags(0.1) == flags


def test_the_runs_of_all_seeds_follow_as_soon_as_an_algorithm_s_search_is_done(
    tmp_path: Path,
) -> None:
    found = comparison(tmp_path)
    first = found.due()
    for run in first[:3]:  # of exact
        end(run, nearness(run))
    due = found.due()
    assert [(rate_of(run), run.seed, run.settings.rounds) for run in due[:2]] == [
        *((0.01, 0, 9), (0.01, 1, 9)),
    ]
    assert [run.folder for run in due[2:]] == [run.folder for run in first[3:]]


def test_every_run_ends_once_and_its_standing_says_what_the_search_cost(tmp_path: Path) -> None:
    found = comparison(tmp_path)
    ended = end_all(found, nearness)
    assert len(ended) == len({run.folder for run in ended}) == found.num_expected
    standings = found.standings()
    assert [one.rate for one in standings] == [0.01, *[0.1] * 5, *[0.001] * 3]
    for one in standings:
        assert len(one.tried) == 3
        assert one.search_cost == {"rounds": 9, "bytes": 900, "examples": 72, "seconds": 4.5}
        assert one.last is not None
        assert one.last.median == pytest.approx(0.9)
        assert [run.total["bytes"] for run in one.runs] == [900, 900]


def test_a_search_goes_on_where_the_best_rate_is_the_largest(tmp_path: Path) -> None:
    found = comparison(tmp_path)
    end_all(found, rate_of)
    exact = found.standings()[0]
    assert sorted(exact.tried) == [0.003, 0.01, 0.03, 0.1, 0.3]
    assert exact.rate == 0.3


@pytest.mark.slow
def test_a_quick_comparison_goes_on_with_the_better_half_after_all_searches(tmp_path: Path) -> None:
    found = comparison(tmp_path, is_quick=True)
    first = found.due()
    assert len(first) == 3 * len(NAMES)
    by_name = {name: first[3 * at : 3 * at + 3] for at, name in enumerate(NAMES)}
    for place, runs in enumerate(by_name.values()):
        assert {run.seed for run in found.due()} == {2}  # no run before all searches are done
        for run in runs:  # the later the better, and the largest rate of each
            end(run, 0.1 * place + rate_of(run) / 100)
    due = found.due()
    assert {run.seed for run in due} == {0, 1}
    assert [run.point["local.algorithm"] for run in due[::2]] == [
        *("exact", "client-momentum", "fedavgm", "fedavgm", "diloco")
    ]
    for run in due:
        end(run, nearness(run))
    assert not found.due()
    assert len(found.results()) == found.num_expected == 3 * 9 + 2 * 5
    assert found.num_expected_rounds == 3 * 9 * 3 + 2 * 5 * 9
    assert [bool(one.runs) for one in found.standings()] == [True] + [False] * 4 + [True] * 4


def test_a_quick_comparison_has_two_that_stand_at_the_least(tmp_path: Path) -> None:
    found = comparison(tmp_path, is_quick=True)
    for number, finalists in ((1, 1), (2, 2), (3, 2), (5, 3), (8, 4)):
        assert replace(found, candidates=found.candidates[:number]).num_finalists == finalists


def test_the_advised_settings_are_those_of_the_run(tmp_path: Path) -> None:
    found = comparison(tmp_path)
    end_all(found, nearness)
    for standing in found.standings():
        settings = found.advised(standing)
        assert settings.out is None
        assert settings.rounds == 9
        assert settings.local.algorithm == standing.candidate.point["local.algorithm"]
    (tmp_path / "best.toml").write_text(settings.to_toml())
    assert load(tmp_path / "best.toml", {}) == settings


def test_an_algorithm_that_diverges_at_every_rate_has_no_runs_to_compare(tmp_path: Path) -> None:
    found = comparison(tmp_path)
    while due := [run for run in found.due() if run.settings.local.algorithm == "exact"]:
        for run in due:
            end(run, 0.0, ended="diverged")
    exact = found.standings()[0]
    assert exact.rate is None
    assert set(exact.tried.values()) == {None}
    assert exact.last is None


def test_a_budget_in_bytes_gives_the_rounds_that_it_pays_for(tmp_path: Path) -> None:
    found = comparison(tmp_path, budget=Budget(resource="bytes", amount=2500))
    assert {run.settings.rounds for run in found.due()} == {10}
    ended = end_all(found, nearness)
    assert {run.settings.rounds for run in ended if run.seed < 2} == {25}


def test_a_server_optimizer_is_for_exact_steps_alone_and_a_local_batch_for_the_others(
    tmp_path: Path,
) -> None:
    tree = {"optimizer": {"name": "sgd"}, "simulation": {"dropout": 0.25}}
    overrides: dict[str, Any] = {"local.batch_size": 8, "optimizer.arguments": {"momentum": 0.5}}
    for run in comparison(tmp_path, tree=tree, **overrides).due():
        is_exact = run.settings.local.algorithm == "exact"
        assert (run.settings.optimizer.name == "sgd") == is_exact
        assert (run.settings.optimizer.arguments == {"momentum": 0.5}) == is_exact
        assert (run.settings.local.batch_size == 8) != is_exact
        assert run.settings.simulation.dropout == 0.25


@pytest.mark.parametrize(
    ("key", "value", "flag"),
    [
        ("rounds", 5, "--rounds"),
        ("seed", 5, "--seed"),
        ("local.algorithm", "fedavg", "--algorithm"),
        ("local.epochs", 2, "--local-epochs"),
        ("optimizer.learning_rate", 0.1, "--learning-rate"),
    ],
)
def test_a_setting_that_the_comparison_chooses_is_refused(
    key: str, value: Any, flag: str, tmp_path: Path
) -> None:
    section, _, leaf = key.rpartition(".")
    message = f"{flag} is set, and a comparison chooses it"
    with pytest.raises(SettingsError, match=message):
        comparison(tmp_path, **{key: value})
    with pytest.raises(SettingsError, match=message):
        comparison(tmp_path, tree={section: {leaf: value}} if section else {leaf: value})


def test_a_wrong_setting_is_named_before_anything_runs(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {"simulation.dropout": 2.0}
    with pytest.raises(SettingsError, match="dropout"):
        comparison(tmp_path, **wrong)


def test_a_setting_without_effect_in_every_algorithm_is_refused(tmp_path: Path) -> None:
    rank: dict[str, Any] = {"compression.rank": 4}
    factors: dict[str, Any] = {"compression.up": "low-rank"}
    with pytest.raises(SettingsError, match="--compress-rank has no effect without"):
        comparison(tmp_path, **rank)
    assert comparison(tmp_path, **rank, **factors).candidates


def test_a_seed_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="names a seed twice"):
        plan_comparison(
            Shared(overrides={"task": TASK}),
            seeds=(0, 0),
            budget=Budget(resource="rounds", amount=9),
            metric=None,
            folder=tmp_path,
        )
