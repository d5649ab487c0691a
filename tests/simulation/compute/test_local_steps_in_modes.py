"""Local steps of many devices in one pass equal those of one device after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.common.errors import SettingsError
from tests.simulation.compute.compared_modes import (
    FLEET,
    BadExample,
    ManyParameters,
    Mlp,
    Random,
    Tokens,
    assert_equals_one_by_one,
    model_in,
    run,
    spec,
)

EPOCHS: dict[str, Any] = {
    "plan.accumulation_steps": None,
    "plan.micro_batch_size": None,
    "optimizer.learning_rate": 1.0,
    "local.epochs": 3,
    "local.batch_size": 6,
}


@pytest.mark.slow
@pytest.mark.parametrize("task", [Mlp, BadExample])
def test_local_steps_in_one_pass_equal_one_by_one(tmp_path: Path, task: type) -> None:
    rows, _ = assert_equals_one_by_one(tmp_path, "vectorised", task=spec(task), **EPOCHS)
    numbers = {client["accumulation_steps"] for client in rows[0]["clients"]}
    assert min(numbers) == 3  # of five examples
    assert 3 * 7 in numbers  # of forty


@pytest.mark.slow
def test_local_steps_of_tokens_by_an_optimizer_with_state_equal_one_by_one(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {
        "local.arguments": {"momentum": 0.9, "nesterov": True},
        "local.proximal": 0.1,
        "local.learning_rate": 0.01,
    }
    assert_equals_one_by_one(tmp_path, "vectorised", task=spec(Tokens), **EPOCHS, **chosen)


@pytest.mark.slow
def test_local_steps_of_a_planned_fleet_equal_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET)
    chosen: dict[str, Any] = {
        **EPOCHS,
        "local.epochs": None,
        "local.steps": 6,
        "simulation.fleet": path,
        "simulation.clients": 7,
        "cohort.deadline_seconds": 0.5,
        "cohort.weighting": "dataset",
    }
    rows, _ = assert_equals_one_by_one(tmp_path, "vectorised", **chosen)
    numbers = {client["accumulation_steps"] for row in rows for client in row["clients"]}
    assert len(numbers) > 2


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ({"local.optimizer": "adafactor"}, "adafactor computes with a whole tensor at once"),
        ({"task": spec(ManyParameters)}, "local steps of 72,005 parameters are no faster"),
        ({"task": spec(Random)}, "draws random numbers"),
    ],
)
def test_local_steps_that_no_pass_can_take_are_taken_one_by_one_with_the_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    chosen: dict[str, Any],
    why: str,
) -> None:
    monkeypatch.setattr("headwater.simulation.compute.modes.MAX_ONE_BY_ONE", 2)
    given = {**EPOCHS, "local.epochs": 1, "local.learning_rate": 0.01, "rounds": 1, **chosen}
    run(tmp_path / "auto", "auto", **given)
    output = capsys.readouterr().out
    assert "devices are computed one by one: " in output
    assert why in output
    run(tmp_path / "alone", "one-by-one", **given)
    assert torch.equal(model_in(tmp_path / "auto"), model_in(tmp_path / "alone"))


def test_auto_takes_the_local_steps_of_many_devices_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headwater.simulation.compute.modes.MAX_ONE_BY_ONE", 2)
    run(tmp_path / "auto", "auto", **{**EPOCHS, "rounds": 1})
    assert "vectorised: many in a pass, each with parameters of its own" in capsys.readouterr().out
    with pytest.raises(SettingsError, match="as --compute vectorised has it"):
        run(tmp_path / "fused", "fused", **EPOCHS)
