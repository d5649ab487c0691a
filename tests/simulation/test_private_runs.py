"""Private runs of simulated devices: the epsilon is written, and nothing of the training."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headwater.common.errors import CheckpointCorrupt, SettingsError
from headwater.common.privacy.clip_bit import next_clip
from headwater.common.settings.sources import load
from headwater.server.operations.round_log import read_rows
from headwater.server.privacy.spent_budget import PRIVACY_FILE
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine

CHOSEN: Mapping[str, Any] = {
    "task": "examples/digits.py:Digits",
    "simulation.clients": 4,
    "plan.accumulation_steps": 2,
    "plan.micro_batch_size": 4,
    "rounds": 3,
}
# What the rows of rounds.jsonl must not show: figures of a device's own examples.
HIDDEN = ("loss", "noise_scale", "gradient_variance", "squared_gradient", "heterogeneity")


def test_a_private_row_has_no_loss_for_people_or_trackers(tmp_path: Path) -> None:
    rounds: list[RoundRow] = []
    settings = load(None, {**CHOSEN, "rounds": 1, "privacy.noise_multiplier": 3.0, "out": tmp_path})
    run_engine(settings, on_round=rounds.append, resume=False)
    (row,) = rounds
    assert row.loss_text() == "loss hidden"
    assert "loss" not in row.figures()
    assert row.figures()["epsilon"] == row.epsilon


def rows_of(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    rounds: list[RoundRow] = []
    settings = load(None, {**CHOSEN, "out": folder, **changes})
    run_engine(settings, on_round=rounds.append, resume=changes.get("rounds", 3) != 3)
    return read_rows(folder)


@pytest.mark.parametrize("unit", ["device", "example"])
@pytest.mark.parametrize("mode", ["off", "semi-honest"])
def test_a_private_run_writes_its_epsilon_and_nothing_of_the_training(
    tmp_path: Path, mode: str, unit: str
) -> None:
    rows = rows_of(
        tmp_path,
        **{"privacy.epsilon": 5.0, "privacy.unit": unit, "secure.aggregation": mode},
    )
    epsilons = [row["epsilon"] for row in rows]
    assert epsilons == sorted(epsilons)
    assert 0 < epsilons[-1] <= 5.0
    assert mode != "off" or epsilons[-1] == pytest.approx(5.0, rel=0.01)
    for row in rows:
        assert [row[name] for name in HIDDEN] == [None] * len(HIDDEN)
        assert not [name for name in row["metrics"] if name.startswith("train_")]
        assert "test_accuracy" in row["metrics"]
        assert row["clients"] == []
        assert len(row["masked_clients"]) == row["num_clients"] == 4
        assert row["num_examples"] == row["weight"] == 4 * 8
        assert row["num_examples_left_out"] == 0
        assert not row["num_clipped"]
        assert row["privacy_unit"] == unit
    written = json.loads((tmp_path / PRIVACY_FILE).read_text())
    assert (written["epsilon"], written["unit"]) == (epsilons[-1], unit)
    assert not list(tmp_path.rglob("*.privacy.json"))  # a simulated device keeps none


def test_a_resumed_run_goes_on_with_what_was_spent(tmp_path: Path) -> None:
    rows_of(tmp_path, **{"privacy.noise_multiplier": 3.0})
    rows = rows_of(tmp_path, **{"privacy.noise_multiplier": 3.0, "rounds": 5})
    events = json.loads((tmp_path / PRIVACY_FILE).read_text())["sums"]
    assert events == [{"noise_multiplier": 3.0, "count": 5}]
    epsilons = [row["epsilon"] for row in rows]
    assert len(set(epsilons)) == 5
    assert epsilons == sorted(epsilons)


@pytest.mark.parametrize(
    ("first", "then", "says"),
    [
        ({}, {"privacy.epsilon": 2.0}, "had no noise so far"),
        ({"privacy.noise_multiplier": 3.0}, {}, "would have none"),
        (
            {"privacy.noise_multiplier": 3.0, "privacy.unit": "example"},
            {"privacy.noise_multiplier": 3.0},
            "for each example so far",
        ),
    ],
)
def test_a_run_has_noise_in_all_rounds_or_in_none(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any], says: str
) -> None:
    """An epsilon of the later rounds alone would be shown as the run's."""
    rows_of(tmp_path, **first)
    with pytest.raises(SettingsError, match=says):
        rows_of(tmp_path, **then, rounds=5)


@pytest.mark.parametrize("left", [None, 2])
def test_a_resumed_run_does_not_forget_what_it_spent(tmp_path: Path, left: int | None) -> None:
    """The file is lost, or one of an earlier time was brought back."""
    rows_of(tmp_path, **{"privacy.noise_multiplier": 3.0})
    file = tmp_path / PRIVACY_FILE
    if left is None:
        file.unlink()
    else:
        file.write_text(json.dumps({"sums": [{"noise_multiplier": 3.0, "count": left}]}))
    with pytest.raises(CheckpointCorrupt, match="spent"):
        rows_of(tmp_path, **{"privacy.noise_multiplier": 3.0, "rounds": 5})


def test_two_private_runs_have_other_noise_with_the_same_seed(tmp_path: Path) -> None:
    metrics = []
    for name in ("one", "other"):
        rows = rows_of(tmp_path / name, **{"privacy.noise_multiplier": 3.0, "rounds": 3})
        metrics.append([row["metrics"]["test_loss"] for row in rows])
    assert metrics[0] != metrics[1]


@pytest.mark.parametrize("mode", ["off", "semi-honest"])
def test_a_clip_norm_that_follows_a_quantile_is_written_and_resumed(
    tmp_path: Path, mode: str
) -> None:
    chosen = {"privacy.noise_multiplier": 3.0, "secure.aggregation": mode}
    chosen |= {"privacy.clip": 0.01, "privacy.clip_quantile": 0.7}
    rows_of(tmp_path, **chosen)
    rows = rows_of(tmp_path, **chosen, rounds=5)
    assert rows[0]["clip_norm"] == 0.01
    for row, after in itertools.pairwise(rows):  # also from round 3 to 4, over the restart
        expected = next_clip(row["clip_norm"], share=row["clip_share"], quantile=0.7)
        assert after["clip_norm"] == pytest.approx(expected)
    assert len({row["clip_share"] for row in rows}) == 5
    fixed = rows_of(tmp_path / "fixed", **{"privacy.noise_multiplier": 3.0, "rounds": 1})
    assert rows[0]["epsilon"] == pytest.approx(fixed[0]["epsilon"], rel=1e-6) or mode != "off"
    assert (fixed[0]["clip_norm"], fixed[0]["clip_share"]) == (1.0, None)


def test_a_run_with_correlated_noise_counts_each_device_s_rounds_and_is_resumed(
    tmp_path: Path,
) -> None:
    chosen = {"privacy.noise_multiplier": 3.0, "privacy.bands": 3, "simulation.clients": 6}
    chosen |= {"cohort.size": 2, "rounds": 5}
    settings = load(None, {**CHOSEN, **chosen, "out": tmp_path})
    run_engine(settings.model_copy(update={"rounds": 3}), on_round=lambda row: None, resume=False)
    run_engine(settings, on_round=lambda row: None, resume=True)
    rows = read_rows(tmp_path)
    taken = [{client["name"] for client in row["masked_clients"]} for row in rows]
    assert [len(names) for names in taken] == [2] * 5
    assert not any(taken[at] & taken[at + back] for back in (1, 2) for at in range(5 - back))
    epsilons = [row["epsilon"] for row in rows]
    assert len(set(epsilons[:3])) == 1  # each device was in one sum
    assert epsilons[0] < epsilons[3] == epsilons[4]
