"""Norm limit and robust rules in simulated runs: honest fleets never meet it, and lies lose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.common.errors import SettingsError
from headwater.common.settings.sources import load
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine

pytestmark = pytest.mark.slow

LIARS = '[[liar]]\nshare = 0.2\nkind = "scaled"\nfactor = -1e6\n'


def run(out: Path | None = None, *, resume: bool = False, **changes: Any) -> list[RoundRow]:
    rows: list[RoundRow] = []
    chosen = {
        "task": "examples/digits.py:Digits",
        "simulation.clients": 10,
        "rounds": 30,
        "seed": 1,
        "check_task": False,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    run_engine(load(None, chosen | {"out": out}), on_round=rows.append, resume=resume)
    return rows


@pytest.fixture
def liars(tmp_path: Path) -> Path:
    path = tmp_path / "faults.toml"
    path.write_text(LIARS)
    return path


@pytest.mark.parametrize("partition", ["iid", "labels:1", "dirichlet:0.1"])
@pytest.mark.parametrize("local_steps", [1, 4])
def test_an_honest_fleet_never_meets_the_norms_limit(partition: str, local_steps: int) -> None:
    rows = run(partition__kind=partition, local__steps=local_steps)
    assert [(row.num_outliers, row.num_aborted) for row in rows] == [(0, 0)] * 30


def test_finite_lies_of_a_fifth_of_the_fleet_do_not_end_the_model(liars: Path) -> None:
    rows = run(simulation__faults=liars)
    assert rows[0].num_aborted == 1
    assert [row.num_outliers for row in rows] == [2] * 30
    assert rows[-1].metrics["test_accuracy"] > 0.8


@pytest.mark.parametrize("rule", ["clipped", "trimmed-mean", "median", "krum"])
def test_a_robust_rule_withstands_a_fifth_of_false_updates(rule: str, liars: Path) -> None:
    rows = run(simulation__faults=liars, aggregation__rule=rule, aggregation__beyond_norm="keep")
    assert rows[-1].metrics["test_accuracy"] > 0.5  # chance: 0.1


def test_liars_among_many_devices_are_held_against_the_norms_of_the_fleet(
    liars: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(simulation__clients=40, simulation__faults=liars, rounds=5)
    assert [row.num_outliers for row in rows] == [8] * 5
    assert "vectorised: many in a pass" in capsys.readouterr().out


def test_a_robust_rule_computes_devices_one_by_one_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(simulation__clients=40, rounds=1, aggregation__rule="median")
    assert "one by one: median compares each device's own update" in capsys.readouterr().out
    with pytest.raises(SettingsError, match="--compute fused is not possible: median compares"):
        run(simulation__compute="fused", rounds=1, aggregation__rule="median")


@pytest.mark.parametrize("rule", ["sum", "krum"])
def test_a_resumed_run_knows_the_norms_limit(rule: str, liars: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"simulation__faults": liars, "aggregation__rule": rule}
    whole = run(tmp_path / "whole", rounds=4, **how)
    run(tmp_path / "parts", rounds=2, **how)
    rest = run(tmp_path / "parts", rounds=4, resume=True, **how)
    assert [row.loss for row in rest] == [row.loss for row in whole[2:]]
    assert [row.num_outliers for row in rest] == [2, 2]


@pytest.mark.parametrize("rule", ["clipped", "krum"])
def test_a_server_over_grpc_gives_the_simulators_losses_bit_for_bit(rule: str, liars: Path) -> None:
    how: dict[str, Any] = {"simulation__faults": liars, "aggregation__rule": rule, "rounds": 3}
    how |= {"simulation__clients": 5, "threads": 1, "aggregation__beyond_norm": "clip"}
    networked = run(simulation__engine="grpc", **how)
    assert [row.loss for row in networked] == [row.loss for row in run(**how)]
    assert [row.metrics for row in networked] == [row.metrics for row in run(**how)]
