"""Masked asynchronous rounds: a session for each model in the buffer, and the clear step's sum."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.common.secagg.protocol import PHASES
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.asynchronous.staleness import times_of
from headwater.simulation.fleet.fleet_spec import with_fleet
from tests.simulation.engines.test_asynchronous import ALL_EXAMPLES, NUM_EXAMPLES, Versions, run
from tests.tasks import TwoLayers, gradient_sum

SLOW, FAST = {"0", "1", "2"}, {"3", "4", "5"}  # three more fast ones are in a larger fleet
DEVICE = (
    "[[device]]\ncount = {count}\nexamples_per_second = {rate}\nmicro_batch_seconds = 0.01\n"
    "upload_bytes_per_second = 1_000_000\nmemory_bytes = 2_000_000_000\n"
)
AWAY = "[[absence]]\ndevices = [{devices}]\nlast_round = 1\nseconds = {seconds}\n"


def settings_of(folder: Path, faults: str = "", /, num_fast: int = 3, **chosen: Any) -> Settings:
    """Return settings for three slow devices, which answer after 1.5 s, and fast ones: 0.5 s."""
    folder.mkdir(parents=True)
    devices = DEVICE.format(count=3, rate=20) + DEVICE.format(count=num_fast, rate=160)
    (folder / "fleet.toml").write_text(devices + faults)
    given = {
        "task": "tests/tasks.py:TwoLayers",
        "rounds": 8,
        "threads": 1,
        "check_task": False,
        "simulation.fleet": folder / "fleet.toml",
        "optimizer.name": "sgd",
        "optimizer.learning_rate": 0.001,
        "asynchronous.is_on": True,
        "asynchronous.buffer": 3,
        "secure.aggregation": "semi-honest",
        **ALL_EXAMPLES,
        **chosen,
    }
    return with_fleet(load(None, given))


def summed(row: dict[str, Any]) -> set[str]:
    """Return the clients whose updates are in a row's step."""
    return {client["name"] for client in row["masked_clients"]}


def check_steps(rows: list[dict[str, Any]], versions: Versions) -> None:
    """Check each step against the clear step of the same buffer, worked out by hand."""
    for row, (before_P, after_P) in zip(rows, pairwise(versions.models), strict=True):
        above_P, below = np.zeros(len(before_P)), 0
        for name in summed(row):
            version = row["model_versions"][name]
            own = TwoLayers().train_examples(data=None, part=int(name), num_parts=9)
            times = times_of(row["round"] - 1 - version, 0.5)
            above_P += times * gradient_sum(versions.models[version], own, range(NUM_EXAMPLES))
            below += times * NUM_EXAMPLES
        expected_P = before_P.double().numpy() - 0.001 * above_P / below
        # The ring's error in the mean, 2^-30 clip bounds of 2^8 for each of six devices, is a
        # thousandth of that in the step: far below the rounding of float32 parameters.
        assert after_P.numpy() == pytest.approx(expected_P, rel=2**-20, abs=2**-20)
        assert row["num_examples"] == row["weight"] == NUM_EXAMPLES * len(summed(row))
        assert row["discounted_weight"] == below / 1024


def test_each_masked_step_is_the_clear_step_of_the_same_buffer(tmp_path: Path) -> None:
    versions = Versions()
    rows = run(settings_of(tmp_path / "run", rounds=5), observer=versions)
    check_steps(rows, versions)
    late = next(row for row in rows if summed(row) & SLOW)
    assert summed(late) == SLOW
    assert late["staleness_max"] == late["round"] - 1 >= 2


def test_a_step_may_have_updates_of_several_models_each_in_a_session_of_its_own(
    tmp_path: Path,
) -> None:
    versions = Versions()
    away = AWAY.format(devices="6, 7, 8", seconds=1.2)
    chosen = {"asynchronous.buffer": 6, "rounds": 3}
    rows = run(settings_of(tmp_path / "run", away, num_fast=6, **chosen), observer=versions)
    check_steps(rows, versions)
    second = {name: rows[1]["model_versions"][name] for name in summed(rows[1])}
    assert second == dict.fromkeys("678", 0) | dict.fromkeys("345", 1)


def test_a_late_update_that_is_alone_at_its_model_is_refused_and_its_device_goes_on(
    tmp_path: Path,
) -> None:
    versions = Versions()
    away = AWAY.format(devices="3", seconds=1.2)
    rows = run(settings_of(tmp_path / "run", away, num_fast=4, rounds=6), observer=versions)
    check_steps(rows, versions)
    refusing = next(row for row in rows if "3" in row["refused"])
    assert refusing["refused"]["3"].startswith("TooFewOfModel: 3: fewer than 3 masked updates")
    assert any("3" in summed(row) for row in rows[refusing["round"] :])


@pytest.mark.parametrize("phase", [phase.action for phase in PHASES])
def test_a_dropout_in_any_phase_costs_no_other_update(tmp_path: Path, phase: str) -> None:
    versions = Versions()
    faults = f'[[dropout]]\ndevices = [4]\nlast_round = 1\nchance = 1\nphase = "{phase}"\n'
    mode = "active" if phase == "consistency" else "semi-honest"  # which has no such phase
    chosen = {"asynchronous.buffer": 8, "rounds": 2, "secure.aggregation": mode}
    rows = run(settings_of(tmp_path / "run", faults, num_fast=6, **chosen), observer=versions)
    check_steps(rows, versions)
    # Once its masked vector has arrived, a device is in the sum whatever happens to it.
    is_in = phase in ("consistency", "unmask")
    assert ("4" in summed(rows[0]), "4" in rows[0]["refused"]) == (is_in, True)
    assert len(summed(rows[0])) == 8 - (not is_in)
    assert "4" in rows[1]["model_versions"]


@pytest.mark.slow
def test_a_masked_run_is_the_same_in_each_bit_when_it_is_repeated(tmp_path: Path) -> None:
    models = Versions(), Versions()
    for name, observer in zip(("first", "second"), models, strict=True):
        run(settings_of(tmp_path / name, rounds=4), observer=observer)
    assert all(map(torch.equal, models[0].models, models[1].models))


@pytest.mark.slow
def test_a_resumed_run_opens_sessions_of_new_plans_alone(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "run", rounds=4, out=tmp_path / "run")
    versions = Versions()
    rows = run(settings, observer=versions)
    rows += run(
        settings.model_copy(update={"rounds": 7}), observer=(later := Versions()), resume=True
    )
    assert [row["round"] for row in rows] == [*range(1, 8)]
    versions.models += later.models[1:]
    check_steps(rows, versions)
    assert all(version >= 4 for row in rows[4:] for version in row["model_versions"].values())
