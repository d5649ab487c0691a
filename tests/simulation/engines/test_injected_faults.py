"""Runs with injected faults: refused and summed updates, and the summary of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headwater.common.model.parameters import build_model, state_dict
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.common.task import load_task
from headwater.server.operations.round_log import read_rows
from headwater.simulation.fleet.faults import Moment, link_slowdown
from headwater.simulation.fleet.fleet_spec import fleet_spec, with_fleet
from headwater.simulation.reports.fault_summary import fault_lines
from headwater.simulation.run import run_engine

CHOSEN: dict[str, Any] = {
    "task": "tests/tasks.py:TwoLayers",
    "rounds": 3,
    "threads": 1,
    "simulation.clients": 6,
    "plan.accumulation_steps": 2,
    "plan.micro_batch_size": 4,
    "optimizer.name": "sgd",
    "optimizer.learning_rate": 0.01,
}
SECURE = {"secure.aggregation": "semi-honest"}


def settings_of(folder: Path, out: str, faults: str, **chosen: Any) -> Settings:
    path = folder / f"{out}.toml"
    path.write_text(faults)
    named = {"simulation.faults": path} if faults else {}
    return with_fleet(load(None, CHOSEN | named | {"out": folder / out} | chosen))


def run(settings: Settings, *, resume: bool = False) -> list[dict[str, Any]]:
    assert settings.out is not None
    run_engine(settings, on_round=lambda _: None, resume=resume)
    return read_rows(settings.out)


def names(row: dict[str, Any]) -> set[str]:
    return {client["name"] for client in (*row["clients"], *row["masked_clients"])}


def model_of(settings: Settings) -> bytes:
    assert settings.out is not None
    return (settings.out / MODEL).read_bytes()


def step_of(settings: Settings) -> list[float]:
    """Return how far a run of one round moved the model of its seed."""
    assert settings.out is not None
    assert settings.task is not None
    start = build_model(load_task(settings.task), seed=0, batch_norm=None)
    end = load_file(settings.out / MODEL)
    moved = [end[name].double() - was.double() for name, was in state_dict(start).items()]
    return torch.cat([part.flatten() for part in moved]).tolist()


def test_a_non_finite_update_is_refused_and_the_model_equals_that_of_the_other_devices(
    tmp_path: Path,
) -> None:
    text = "[[liar]]\ndevices = [1]\nkind = 'nan'\n[[liar]]\ndevices = [4]\nkind = 'infinite'\n"
    lying = settings_of(tmp_path, "lying", text)
    gone = settings_of(tmp_path, "gone", "[[dropout]]\ndevices = [1, 4]\n")
    for row in run(lying):
        assert names(row) == {"0", "2", "3", "5"}
        assert {name: why.split(":")[0] for name, why in row["refused"].items()} == {
            "1": "NonFiniteUpdate",
            "4": "NonFiniteUpdate",
        }
    for row in run(gone):
        assert {why.split(":")[0] for why in row["refused"].values()} == {"ConnectionLost"}
    assert model_of(lying) == model_of(gone)


@pytest.mark.parametrize("secure", [{}, SECURE], ids=["in clear", "masked"])
def test_sign_flipped_updates_of_a_whole_cohort_are_summed_and_reverse_the_step(
    tmp_path: Path, secure: dict[str, Any]
) -> None:
    text = "[[liar]]\nshare = 1\nkind = 'sign-flipped'\n"
    honest = settings_of(tmp_path, "honest", "", rounds=1, **secure)
    lying = settings_of(tmp_path, "lying", text, rounds=1, **secure)
    (row,), _ = run(lying), run(honest)
    assert names(row) == set("012345")
    # The parameters are of order 1; under masks the mean is off by a step of the ring at most.
    tolerance = 1e-3 if secure else 4e-7
    assert step_of(lying) == pytest.approx([-x for x in step_of(honest)], abs=tolerance)
    assert max(map(abs, step_of(honest))) > 10 * tolerance


def test_a_scaled_update_moves_the_model_by_its_factor(tmp_path: Path) -> None:
    one = {"rounds": 1, "simulation.clients": 1}
    honest = settings_of(tmp_path, "honest", "", **one)
    text = "[[liar]]\ndevices = [0]\nkind = 'scaled'\nfactor = 8\n"
    lying = settings_of(tmp_path, "lying", text, **one)
    run(honest)
    run(lying)
    assert step_of(lying) == pytest.approx([8 * x for x in step_of(honest)], abs=4e-6)


@pytest.mark.parametrize("phase", ["train", "share_keys", "masked_update", "unmask"])
def test_a_device_vanishes_at_the_phase_of_its_fault(tmp_path: Path, phase: str) -> None:
    text = f"[[dropout]]\ndevices = [2]\nphase = '{phase}'\nfirst_round = 2\nlast_round = 2\n"
    rows = run(settings_of(tmp_path, "run", text, **SECURE))
    assert [set(row["refused"]) for row in rows] == [set(), {"2"}, set()]
    assert rows[1]["refused"]["2"].startswith("ConnectionLost: device 2 has vanished")
    # Who vanishes at the last phase has sent its masked update before: it is in the sum.
    assert ("2" in names(rows[1])) == (phase == "unmask")


def test_a_device_that_vanishes_at_the_evaluation_is_summed_but_not_evaluated(
    tmp_path: Path,
) -> None:
    text = "[[dropout]]\ndevices = [2, 3]\nphase = 'evaluate'\n"
    rows = run(settings_of(tmp_path, "run", text, **{"evaluation.on_devices": True}))
    assert all(names(row) == set("012345") for row in rows)
    assert [row["num_held_out_clients"] for row in rows] == [4, 4, 4]


def test_a_slow_link_multiplies_the_transfer_time_in_its_rounds_only(tmp_path: Path) -> None:
    text = "[[slow_link]]\ndevices = [3]\nfactor = 50\nfirst_round = 2\nlast_round = 2\n"
    settings = settings_of(tmp_path, "run", text)
    rows = run(settings)
    first, slow, last = (
        next(client["seconds"] for client in row["clients"] if client["name"] == "3")
        for row in rows
    )
    num_parameters = 3 * 2 + 2 + 2 + 1
    transfer = 2 * 4 * num_parameters / fleet_spec(settings).device(3).upload_bytes_per_second
    assert first == pytest.approx(last, rel=1e-9)
    assert slow - first == pytest.approx(49 * transfer, rel=1e-6)
    moment = Moment(seed=0, num_devices=6, part=3, round=2)
    assert link_slowdown(fleet_spec(settings).faults, moment) == 50


def test_an_update_over_a_link_too_slow_for_the_deadline_is_late(tmp_path: Path) -> None:
    text = "[[slow_link]]\ndevices = [3]\nfactor = 1e6\nfirst_round = 2\nlast_round = 2\n"
    settings = settings_of(tmp_path, "run", text, **{"cohort.deadline_seconds": 1.0})
    rows = run(settings)
    assert rows[1]["refused"]["3"].startswith("LateUpdate")
    assert fault_lines(rows, settings) == [("slow links", "1 device, replies: 1, too late: 1")]


MIXED = """
[[dropout]]
share = 0.5
chance = 0.4

[[slow_link]]
share = 0.5
factor = 4
chance = 0.5

[[liar]]
share = 0.5
kind = "random"
first_round = 2
"""


def comparable_rows(rows: list[dict[str, Any]]) -> list[Any]:
    keys = ("name", "num_examples", "seconds", "loss")
    return [
        [row["refused"], [[client[key] for key in keys] for client in row["clients"]]]
        for row in rows
    ]


@pytest.mark.slow
def test_faults_are_a_function_of_the_seed(tmp_path: Path) -> None:
    runs = [
        comparable_rows(run(settings_of(tmp_path, out, MIXED, rounds=5, seed=seed)))
        for out, seed in (("first", 0), ("again", 0), ("other", 1))
    ]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.slow
def test_a_run_with_faults_resumed_after_every_round_equals_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    whole = settings_of(tmp_path, "whole", MIXED, rounds=5)
    run(whole)
    for rounds in range(1, 6):
        broken = settings_of(tmp_path, "broken", MIXED, rounds=rounds)
        rows = run(broken, resume=rounds > 1)
    assert model_of(broken) == model_of(whole)
    assert comparable_rows(rows) == comparable_rows(read_rows(tmp_path / "whole"))


def test_the_summary_counts_refused_and_summed_updates(tmp_path: Path) -> None:
    text = (
        "[[liar]]\ndevices = [1, 2]\nkind = 'nan'\nlast_round = 2\n"
        "[[liar]]\ndevices = [4]\nkind = 'sign-flipped'\n"
        "[[dropout]]\ndevices = [5, 2]\nfirst_round = 3\n"
    )
    settings = settings_of(tmp_path, "run", text)
    assert fault_lines(run(settings), settings) == [
        (
            "liars",
            "nan: 2 devices, 4 refused (NonFiniteUpdate); sign-flipped: 1 device, 3 went in",
        ),
        ("dropouts", "2 of 18 invitations ended with a lost device"),
    ]


def test_without_faults_the_summary_is_empty(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "run", "", rounds=1)
    assert fault_lines(run(settings), settings) == []
