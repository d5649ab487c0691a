"""A run keeps dated versions of its model, one a period, and an index of them."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import headwater
from headwater.client.app import client_app
from headwater.common.errors import SettingsError, StateError
from headwater.common.settings.schema import Settings
from headwater.server.features import versions_every
from headwater.server.flower.grid_fleet import GridFleet
from headwater.server.rounds.checkpoint import run_position
from headwater.server.rounds.evaluation import is_due
from headwater.server.rounds.round_loop import run
from headwater.server.rounds.round_row import RoundRow
from headwater.server.rounds.run_state import Training
from headwater.server.succession.model_versions import (
    INDEX,
    ModelVersions,
    period_of,
    read_index,
)
from headwater.simulation.engines.message_grid import InProcessGrid
from headwater.simulation.fleet.virtual_hardware import virtual_hardware
from headwater.simulation.sweep.grid import Sweep, plan_runs
from tests.round_rows import row


class Calendar:
    """A clock that shows the day that a test sets."""

    def __init__(self, day: str) -> None:
        self.day = day

    def __call__(self) -> float:
        return dt.datetime.fromisoformat(f"{self.day}T12:00:00+00:00").timestamp()


def settings(folder: Path, **changes: Any) -> Settings:
    return Settings.model_validate(
        {"task": "tests/tasks.py:TwoLayers", "rounds": "forever", "out": folder, **changes}
    )


def begun(training: Training, clock: Calendar, round_number: int = 0) -> ModelVersions:
    versions = ModelVersions(training, clock=clock)
    versions.started(training.settings, round_number=round_number, model=training.image.model)
    return versions


def train(training: Training) -> None:
    with torch.no_grad():
        training.image.values_P.add_(1.0)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "versions").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("every", "day", "period"),
    [
        ("day", "2026-11-23", "2026-11-23"),
        ("week", "2026-11-23", "2026-W48"),
        ("week", "2027-01-03", "2026-W53"),
        ("week", "2027-01-04", "2027-W01"),
        ("month", "2026-11-23", "2026-11"),
    ],
)
def test_a_period_has_the_calendar_s_name(every: str, day: str, period: str) -> None:
    assert period_of(every, Calendar(day)()) == period


@pytest.mark.parametrize(
    ("rounds", "chosen", "every"),
    [
        ("forever", None, "week"),
        (10, None, "never"),
        (10, "day", "day"),
        ("forever", "never", "never"),
    ],
)
def test_only_a_run_without_a_last_round_writes_versions_by_itself(
    rounds: Any, chosen: Any, every: str
) -> None:
    assert versions_every(Settings(rounds=rounds, versions={"every": chosen})) == every


def test_the_first_round_of_a_new_week_is_a_version_and_no_other(tmp_path: Path) -> None:
    training, clock = Training(settings(tmp_path), run_id=1), Calendar("2026-11-20")
    versions = begun(training, clock)
    wanted = {}
    for number, day in enumerate(["11-20", "11-22", "11-23", "11-24", "12-14", "12-07"], start=1):
        train(training)
        clock.day = f"2026-{day}"
        versions.on_round(row(number, "pi"))
        wanted[number] = training.image.values_P.clone()
    assert files(tmp_path) == ["2026-W48.safetensors", "2026-W51.safetensors"]
    index = read_index(tmp_path)
    assert index is not None
    assert [(one["file"], one["round"]) for one in index.versions] == [
        ("2026-W48.safetensors", 3),
        ("2026-W51.safetensors", 5),
    ]
    for one in index.versions:
        path = tmp_path / "versions" / one["file"]
        assert one["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        model = headwater.load_model(path)
        found = torch.cat([each.detach().flatten() for each in model.parameters()])
        assert torch.equal(found, wanted[one["round"]])


def test_a_restart_neither_repeats_a_version_nor_skips_one(tmp_path: Path) -> None:
    training, clock = Training(settings(tmp_path), run_id=1), Calendar("2026-11-20")
    begun(training, clock)
    clock.day = "2026-11-23"
    begun(training, clock, 4).on_round(row(5, "pi"))
    before = (tmp_path / "versions" / "2026-W48.safetensors").read_bytes()
    train(training)
    begun(training, clock, 5).on_round(row(6, "pi"))
    assert (tmp_path / "versions" / "2026-W48.safetensors").read_bytes() == before
    clock.day = "2026-11-30"
    begun(training, clock, 6).on_round(row(7, "pi"))
    assert files(tmp_path) == ["2026-W48.safetensors", "2026-W49.safetensors"]


def test_the_oldest_versions_beyond_the_number_to_keep_are_deleted(tmp_path: Path) -> None:
    chosen = settings(tmp_path, versions={"every": "day", "kept": 2})
    training, clock = Training(chosen, run_id=1), Calendar("2026-11-20")
    versions = begun(training, clock)
    for number in range(1, 5):
        clock.day = f"2026-11-2{number}"
        versions.on_round(row(number, "pi"))
    assert files(tmp_path) == ["2026-11-23.safetensors", "2026-11-24.safetensors"]
    index = read_index(tmp_path)
    assert index is not None
    assert len(index.versions) == 2


def test_a_version_that_cannot_be_written_is_written_in_the_next_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training, clock = Training(settings(tmp_path), run_id=1), Calendar("2026-11-20")
    versions = begun(training, clock)
    clock.day = "2026-11-23"
    blocked = tmp_path / "versions" / "2026-W48.safetensors.part"
    blocked.mkdir()  # no file of this name can be made
    with caplog.at_level(logging.WARNING):
        versions.on_round(row(1, "pi"))
    assert "version 2026-W48 is not written yet" in caplog.text
    blocked.rmdir()
    versions.on_round(row(2, "pi"))
    assert files(tmp_path) == ["2026-W48.safetensors"]


@pytest.mark.parametrize(
    "text", ["", "{}", '{"every": "week", "period": "a", "versions": [{"file": "../model"}]}']
)
def test_a_damaged_index_ends_the_start_with_a_remedy(tmp_path: Path, text: str) -> None:
    training = Training(settings(tmp_path), run_id=1)
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions" / INDEX).write_text(text)
    with pytest.raises(StateError, match="cannot be read") as caught:
        begun(training, Calendar("2026-11-20"))
    assert caught.value.remedy.startswith("delete it")


def test_a_run_without_end_stops_after_a_committed_round_and_goes_on_as_if_it_had_not(
    tmp_path: Path,
) -> None:
    def trained(folder: str, *, until: int | None, resume: bool, rounds: Any) -> None:
        chosen = settings(
            tmp_path / folder,
            rounds=rounds,
            simulation={"clients": 2},
            plan={"accumulation_steps": 2, "micro_batch_size": 4},
        )
        (tmp_path / folder).mkdir(exist_ok=True)
        grid = InProcessGrid(client_app(virtual_hardware), chosen)
        run_id, _ = run_position(chosen.out, resume=resume)
        grid.enter_run(run_id)

        def on_round(found: RoundRow) -> None:
            if found.round == until:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) if until else contextlib.nullcontext():
            training = Training(chosen, run_id=run_id)
            run(training, GridFleet(grid), on_round=on_round, resume=resume)

    trained("endless", until=3, resume=False, rounds="forever")
    trained("endless", until=5, resume=True, rounds="forever")
    trained("straight", until=None, resume=False, rounds=5)
    models = [
        headwater.load_model(tmp_path / folder / "model.safetensors").state_dict()
        for folder in ("endless", "straight")
    ]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[1])
    endless = settings(tmp_path, evaluation={"every_rounds": 2})
    assert [is_due(endless, round_number=number) for number in range(1, 5)] == [False, True] * 2


def test_a_sweep_refuses_a_run_without_end_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--rounds forever has no result"):
        plan_runs({"rounds": "forever"}, Sweep(), {}, out=tmp_path)
