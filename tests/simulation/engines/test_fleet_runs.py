"""Runs on a fleet's file: availability, jitter, batteries, virtual time and idle time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.operations.round_log import read_rows
from headwater.simulation.fleet.fleet_spec import fleet_spec, with_fleet
from headwater.simulation.fleet.random_events import is_on_battery
from headwater.simulation.run import run_engine

UNSTEADY = """
[[device]]
profile = "laptop"
count = 2
examples_per_second = 400
jitter = 0.2
on_battery = 0.4

[[device]]
count = 4
examples_per_second = 50
memory_bytes = 400_000_000
upload_bytes_per_second = 1_000_000
availability = [0.5, 0.7]
"""


def on_fleet(path: Path, out: Path, **overrides: Any) -> Settings:
    chosen = {"threads": 1, "out": out, "simulation.fleet": path, **overrides}
    return with_fleet(load(None, chosen))


def unsteady(folder: Path, out: str, *, rounds: int, **overrides: Any) -> Settings:
    path = folder / "unsteady.toml"
    path.write_text(UNSTEADY)
    chosen: dict[str, Any] = {
        "task": "tests/tasks.py:TwoLayers",
        "rounds": rounds,
        "optimizer.name": "sgd",
        "optimizer.learning_rate": 0.01,
        "plan.effective_batch_size": 40,
    }
    return on_fleet(path, folder / out, **chosen, **overrides)


def run(settings: Settings, *, resume: bool = False) -> list[dict[str, Any]]:
    assert settings.out is not None
    run_engine(settings, on_round=lambda _: None, resume=resume)
    return read_rows(settings.out)


def comparable_rows(rows: list[dict[str, Any]]) -> list[Any]:
    """Return each round's clients with examples, seconds and reasons, without measured values."""
    keys = ["name", "num_examples", "micro_batch_size", "seconds", "step_seconds", "peak_bytes"]
    keys += ["plan", "reason"]
    return [[{key: client[key] for key in keys} for client in row["clients"]] for row in rows]


@pytest.mark.slow
def test_a_run_is_a_function_of_the_seed(tmp_path: Path) -> None:
    first = comparable_rows(run(unsteady(tmp_path, "first", rounds=4)))
    assert comparable_rows(run(unsteady(tmp_path, "again", rounds=4))) == first
    assert comparable_rows(run(unsteady(tmp_path, "other", rounds=4, seed=1))) != first


@pytest.mark.slow
def test_a_fleet_with_jitter_resumed_after_every_round_equals_the_uninterrupted_run(
    tmp_path: Path,
) -> None:
    whole = comparable_rows(run(unsteady(tmp_path, "whole", rounds=5)))
    for rounds in range(1, 6):
        broken = run(unsteady(tmp_path, "broken", rounds=rounds), resume=rounds > 1)
    assert comparable_rows(broken) == whole
    assert (tmp_path / "whole" / MODEL).read_bytes() == (tmp_path / "broken" / MODEL).read_bytes()


def test_exactly_the_connected_devices_are_invited(tmp_path: Path) -> None:
    rows = run(unsteady(tmp_path, "run", rounds=8))
    cohorts = [{client["name"] for client in row["clients"]} for row in rows]
    assert all({"0", "1"} <= cohort for cohort in cohorts)
    assert all(row["num_invited"] == len(row["clients"]) for row in rows)
    assert len({frozenset(cohort) for cohort in cohorts}) > 1
    assert set.union(*cohorts) == {str(part) for part in range(6)}


def test_a_round_waits_until_enough_devices_are_connected(tmp_path: Path) -> None:
    rows = run(unsteady(tmp_path, "run", rounds=4, **{"cohort.min_clients": 5}))
    assert all(row["num_invited"] >= 5 for row in rows)


def test_jitter_differs_between_micro_batches_rounds_and_devices(tmp_path: Path) -> None:
    chosen = {"plan.accumulation_steps": 3, "plan.micro_batch_size": 4}
    rows = run(unsteady(tmp_path, "run", rounds=2, **chosen))
    seconds = [
        second
        for row in rows
        for client in row["clients"]
        if client["name"] in "01"
        for second in client["step_seconds"]
    ]
    assert len(set(seconds)) == len(seconds) == 2 * 2 * 3


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_device_on_battery_stops_at_its_share_and_gets_a_smaller_quota_next_time(
    tmp_path: Path, share: float
) -> None:
    path = tmp_path / "one.toml"
    path.write_text(
        "[[device]]\nexamples_per_second = 50\nmemory_bytes = 400_000_000\n"
        "upload_bytes_per_second = 1_000_000\non_battery = 0.5\ncount = 3\n"
    )
    chosen = {
        "task": "tests/tasks.py:TwoLayers",
        "rounds": 12,
        "plan.effective_batch_size": 18,
        "plan.micro_batch_size": 1,
        "client.battery_share": share,
        "optimizer.name": "sgd",
        "optimizer.learning_rate": 0.001,
    }
    settings = on_fleet(path, tmp_path / "out", **chosen)
    clients = [client for row in run(settings) for client in row["clients"]]
    cut_short = [client for client in clients if client["reason"] == "on battery"]
    reduced = [
        client for client in clients if "giving 50% of its time on battery" in client["plan"]
    ]
    assert bool(cut_short) == bool(reduced) == (share < 1)
    for row in read_rows(tmp_path / "out"):
        drawn = {
            p: is_on_battery(fleet_spec(settings), p, round_number=row["round"]) for p in range(3)
        }
        for client in row["clients"]:
            if client["reason"] == "on battery":
                assert drawn[int(client["name"])]


def test_a_round_of_ten_hours_is_reported_in_virtual_seconds(tmp_path: Path) -> None:
    path = tmp_path / "slow.toml"
    path.write_text(
        "[[device]]\nexamples_per_second = 0.0005\nmemory_bytes = 400_000_000\n"
        "upload_bytes_per_second = 100_000\nmicro_batch_seconds = 60\ncount = 5\n"
    )
    chosen = {
        "task": "tests/tasks.py:TwoLayers",
        "rounds": 3,
        "plan.accumulation_steps": 18,
        "plan.micro_batch_size": 1,
        "optimizer.name": "sgd",
        "optimizer.learning_rate": 0.001,
    }
    rows = run(on_fleet(path, tmp_path / "out", **chosen))
    # The first round: eighteen examples of 2,000 s and 60 s each, and the transfers.
    assert rows[0]["slowest_client_seconds"] == pytest.approx(18 * 2060, abs=1)
    assert rows[0]["slowest_client_seconds"] > 10 * 3600
    assert rows[0]["num_examples"] == 5 * 18


@pytest.mark.parametrize(
    "way",
    [
        {"simulation.compute": "one-by-one"},
        {"simulation.compute": "fused"},
        {"secure.aggregation": "semi-honest"},
        pytest.param({"simulation.engine": "grpc"}, marks=pytest.mark.slow),
    ],
)
def test_a_round_with_a_late_device_lasts_to_its_deadline(
    tmp_path: Path, way: dict[str, object]
) -> None:
    path, faults = tmp_path / "fleet.toml", tmp_path / "faults.toml"
    path.write_text(
        "[[device]]\nexamples_per_second = 100\nmemory_bytes = 4_000_000_000\n"
        "upload_bytes_per_second = 1_000_000\ncount = 5\n"
    )
    faults.write_text(
        "[[slow_link]]\ndevices = [1]\nfactor = 100000\nfirst_round = 2\nlast_round = 2\n"
    )
    chosen = {
        "task": "examples/digits.py:Digits",
        "rounds": 2,
        "plan.accumulation_steps": 2,
        "plan.micro_batch_size": 4,
        "cohort.deadline_seconds": 7.0,
        "cohort.min_clients": 3,
        "simulation.faults": faults,
        "secure.min_members": 3,
    }
    rows = run(on_fleet(path, tmp_path / "out", **chosen, **way))
    assert [row["num_clients"] for row in rows] == [5, 4]
    assert rows[0]["virtual_seconds"] == rows[0]["slowest_client_seconds"] < 1
    assert rows[1]["virtual_seconds"] == 7.0
    assert rows[1]["slowest_client_seconds"] < 1


@pytest.mark.slow
def test_the_command_prints_the_idle_time_and_resumes_from_the_recorded_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "unsteady.toml"
    path.write_text(UNSTEADY)
    command = [sys.executable, "-m", "headwater.simulation", "--out", str(tmp_path / "out")]
    start = ["--task", "tests/tasks.py:TwoLayers", "--fleet", str(path), "--rounds", "2"]
    start += ["--effective-batch-size", "64"]
    for arguments in (start, ["--resume", "--rounds", "3"]):
        result = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=560, check=False
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert "  idle        " in result.stdout
        assert "  memory      device " in result.stdout
    assert len(read_rows(tmp_path / "out")) == 3
