"""Runs on a fleet's file: who is there, how long it takes, and how long the devices wait."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from client.resident import Identity, Resident
from common.settings import Settings, load
from server.metrics import read_rows
from server.rounds import MODEL
from simulation.engines import run_engine
from simulation.fleet import SimulatedMachine, idle_line, idle_time
from simulation.profiles import device_of, with_fleet

ROOT = Path(__file__).parents[2]
SIXTEENFOLD = ROOT / "examples" / "fleets" / "sixteenfold.toml"

UNSTEADY = """
[[device]]
profile = "laptop"
count = 2
jitter = 0.2

[[device]]
count = 4
examples_per_second = 50
memory_bytes = 400_000_000
upload_bytes_per_second = 1_000_000
availability = 0.5
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
        "optimizer.learning_rate": 0.01,
        "plan.effective_batch_size": 40,
    }
    return on_fleet(path, folder / out, **chosen, **overrides)


def run(settings: Settings, *, resume: bool = False) -> list[dict[str, Any]]:
    assert settings.out is not None
    run_engine(settings, on_round=lambda _: None, resume=resume)
    return read_rows(settings.out)


def told(rows: list[dict[str, Any]]) -> list[Any]:
    """Return what the virtual devices did, round by round: who, how much, how long, and why."""
    keys = ("name", "num_examples", "micro_batch_size", "seconds", "step_seconds", "plan", "reason")
    return [[{key: client[key] for key in keys} for client in row["clients"]] for row in rows]


def test_a_run_is_a_function_of_the_seed(tmp_path: Path) -> None:
    first = told(run(unsteady(tmp_path, "first", rounds=4)))
    assert told(run(unsteady(tmp_path, "again", rounds=4))) == first
    assert told(run(unsteady(tmp_path, "other", rounds=4, seed=1))) != first


def test_an_unsteady_fleet_stopped_after_every_round_equals_the_unbroken_run(
    tmp_path: Path,
) -> None:
    whole = told(run(unsteady(tmp_path, "whole", rounds=5)))
    for rounds in range(1, 6):
        broken = run(unsteady(tmp_path, "broken", rounds=rounds), resume=rounds > 1)
    assert told(broken) == whole
    assert (tmp_path / "whole" / MODEL).read_bytes() == (tmp_path / "broken" / MODEL).read_bytes()


def test_devices_that_are_away_are_not_invited_and_the_others_always_are(tmp_path: Path) -> None:
    rows = run(unsteady(tmp_path, "run", rounds=8))
    cohorts = [{client["name"] for client in row["clients"]} for row in rows]
    assert all({"0", "1"} <= cohort for cohort in cohorts)
    assert all(row["num_invited"] == len(row["clients"]) for row in rows)
    assert len({frozenset(cohort) for cohort in cohorts}) > 1
    assert set.union(*cohorts) == {str(part) for part in range(6)}


def test_a_round_waits_until_enough_devices_are_there(tmp_path: Path) -> None:
    rows = run(unsteady(tmp_path, "run", rounds=4, **{"cohort.min_clients": 5}))
    assert all(row["num_invited"] >= 5 for row in rows)


def test_jitter_differs_by_micro_batch_by_round_and_by_device(tmp_path: Path) -> None:
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


def row_of(*clients: tuple[int, float, str, str]) -> dict[str, Any]:
    keys = ("num_examples", "seconds", "plan", "reason")
    return {"round": 1, "clients": [dict(zip(keys, one, strict=True)) for one in clients]}


def test_idle_time_leaves_out_who_was_bound_and_counts_them_apart() -> None:
    idle = idle_time(
        row_of(
            (40, 3.0, "speed-bound: 40 examples", "quota"),
            (20, 4.0, "speed-bound: 20 examples", "quota"),
            (9, 1.0, "all its 9 examples; micro-batch as set", "quota"),
            (5, 1.0, "speed-bound: 40 examples", "epoch end"),
            (1, 7.0, "speed-bound: 1 examples", "quota"),
        )
    )
    assert idle.share == 1 - 3.5 / 4
    assert (idle.num_free, idle.num_bound_by_data, idle.num_bound_by_one_example) == (2, 2, 1)
    assert idle.one_example_seconds == 7.0


def test_a_round_in_which_all_were_bound_has_no_idle_time() -> None:
    row = row_of((9, 1.0, "all its 9 examples", "quota"))
    assert idle_time(row).share is None
    assert idle_line([row]) == "no device that was free to be given more or less"


SYNTHETIC = {
    "task": "examples/synthetic.py:Synthetic",
    "rounds": 5,
    "optimizer.learning_rate": 0.01,
    "evaluation.every_rounds": 5,
}
NUM_DEVICES, SPREAD, FEWEST_EXAMPLES = 60, 16, 500


@functools.cache
def sixteenfold(folder: Path, kind: str) -> tuple[Settings, list[dict[str, Any]]]:
    plans = {"planned": {"plan.effective_batch_size": 6000}, "K 6": {"plan.accumulation_steps": 6}}
    settings = on_fleet(SIXTEENFOLD, folder / kind, **SYNTHETIC, **plans[kind])
    return settings, run(settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sixteenfold")


def test_the_sixteenfold_fleet_is_sixteenfold_in_speed_and_in_memory() -> None:
    settings = on_fleet(SIXTEENFOLD, Path("unused"))
    devices = [device_of(settings, part) for part in range(settings.simulation.clients)]
    speeds = [one.examples_per_second or 0.0 for one in devices]
    memories = [one.memory_bytes for one in devices]
    assert len(devices) == NUM_DEVICES
    assert max(speeds) == SPREAD * min(speeds)
    assert max(memories) == SPREAD * min(memories)


def test_planned_devices_idle_five_percent_at_most_behind_the_third_round(folder: Path) -> None:
    _, rows = sixteenfold(folder, "planned")
    for row in rows[3:]:
        idle = idle_time(row)
        assert idle.share is not None
        assert idle.share <= 0.05
        assert idle.num_free == NUM_DEVICES


def test_with_a_fixed_k_the_same_devices_idle_half_of_the_round(folder: Path) -> None:
    _, rows = sixteenfold(folder, "K 6")
    for row in rows[3:]:
        assert (idle_time(row).share or 0.0) > 0.5


@pytest.mark.parametrize("kind", ["planned", "K 6"])
def test_no_device_is_planned_beyond_its_memory(folder: Path, kind: str) -> None:
    settings, rows = sixteenfold(folder, kind)
    task = str(settings.task)
    resident = Resident(task, replace_batch_norm=False, check_task=False)
    num_bound = 0
    for part in range(0, NUM_DEVICES, 2):
        identity = Identity(name=str(part), data=None, part=part, num_parts=NUM_DEVICES)
        assert len(resident.examples(identity)) >= FEWEST_EXAMPLES
        device = device_of(settings, part)
        machine = SimulatedMachine(device, resident.image.layout.num_parameters)
        speed = resident.measure(identity, machine)
        for row in rows:
            size = row["clients"][part]["micro_batch_size"]
            assert row["clients"][part]["name"] == str(part)
            assert size == 1 or speed.base_bytes + size * speed.bytes_per_example <= (
                device.memory_bytes
            )
            num_bound += "memory-bound" in row["clients"][part]["plan"]
    assert num_bound > 0 or kind != "planned"


@pytest.mark.slow
def test_the_command_prints_the_idle_time_and_resumes_from_the_file_it_recorded(
    tmp_path: Path,
) -> None:
    path = tmp_path / "unsteady.toml"
    path.write_text(UNSTEADY)
    command = [sys.executable, "-m", "simulation", "--out", str(tmp_path / "out")]
    start = ["--task", "tests/tasks.py:TwoLayers", "--fleet", str(path), "--rounds", "2"]
    for arguments in (start, ["--resume", "--rounds", "3"]):
        result = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=120, check=False
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert "  idle        " in result.stdout
    assert len(read_rows(tmp_path / "out")) == 3
