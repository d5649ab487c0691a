"""The engine grpc: real server and client processes, compared with the devices in process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from headwater.common.errors import SettingsError
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.operations.round_log import read_rows
from headwater.server.operations.status import read_status
from headwater.server.rounds import checkpoint
from headwater.simulation.engines.grpc import CLIENTS, MAX_CLIENTS, check_engine
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.run import run_engine
from tests.processes import Process, Processes, until
from tests.python_tasks import REMEMBERING, SIGNS

DIGITS = ("--task", "examples/digits.py:Digits", "--optimizer", "adam", "--learning-rate", 0.01)
DIGITS_SET = {
    "task": "examples/digits.py:Digits",
    "optimizer.name": "adam",
    "optimizer.learning_rate": 0.01,
    "threads": 1,
}
# Values that depend on the machine: seconds, and bytes on the wire.
OF_THE_MACHINE = (
    "seconds",
    "seconds_split",
    "updates_per_hour",
    "ended_at",
    "bytes_up",
    "bytes_down",
)

FLEET = """
[[device]]
count = 6
examples_per_second = 50
memory_bytes = 400_000_000
upload_bytes_per_second = 1_000_000
jitter = 0.2
on_battery = 0.5
availability = [1, 0.6, 0.6]

[[device]]
count = 2
examples_per_second = 0.5
memory_bytes = 400_000_000
upload_bytes_per_second = 100_000
on_battery = 0.5
availability = [1, 1, 0]

[[liar]]
devices = [0]
kind = "sign-flipped"

[[liar]]
devices = [1]
kind = "nan"
chance = 0.5

[[slow_link]]
devices = [2]
factor = 20
first_round = 2

[[dropout]]
share = 0.5
chance = 0.3
"""


def on_the_wire(processes: Processes, *settings: object) -> None:
    """Run a simulation with client processes, which must succeed."""
    out = processes.folder / "wire"
    processes.run("simulation", "--engine", "grpc", "--out", out, *settings).succeed()


def in_process(folder: Path, overrides: dict[str, Any]) -> None:
    """Run the same settings in this process, one device after another."""
    out = folder / "here"
    settings = load(None, {**overrides, "simulation.compute": "one-by-one", "out": out})
    run_engine(with_fleet(settings), on_round=lambda row: None, resume=False)


def comparable_rows(out: Path) -> list[Any]:
    """Return the rows of a run, without the values that its machine has measured."""
    rows = [dict(row) for row in read_rows(out)]
    for row in rows:
        for key in OF_THE_MACHINE:
            del row[key]
        row["clients"] = sorted(row["clients"], key=lambda client: int(client["name"]))
        row["not_evaluated"] = sorted(row["not_evaluated"])  # without the words of each engine
    return rows


def assert_same(folder: Path) -> None:
    """Check that both runs made the same plans, and the same model bit for bit."""
    assert comparable_rows(folder / "wire") == comparable_rows(folder / "here")
    models = [(folder / name / MODEL).read_bytes() for name in ("wire", "here")]
    assert models[0] == models[1]


@pytest.mark.slow
def test_twenty_client_processes_give_the_model_and_the_plans_of_twenty_in_process(
    tmp_path: Path,
) -> None:
    with Processes(tmp_path) as processes:
        on_the_wire(processes, *DIGITS, "--clients", 20, "--rounds", 3)
    in_process(tmp_path, {**DIGITS_SET, "simulation.clients": 20, "rounds": 3})
    assert_same(tmp_path)
    assert [len(row["clients"]) for row in comparable_rows(tmp_path / "wire")] == [20, 20, 20]


def started(processes: Processes, *settings: object) -> tuple[Process, list[psutil.Process]]:
    """Start a run; return its engine and its child processes, after the first committed round."""
    out = processes.folder / "wire"
    more = ("--engine", "grpc", "--no-check", "--out", out)
    engine = processes.start("simulation", *settings, *more)

    def has_counted() -> bool:
        assert engine.poll() is None, engine.text()
        return (out / checkpoint.FILE).exists()

    until(has_counted, what=engine.text)
    return engine, psutil.Process(engine.pid).children(recursive=True)


def process_of(device: str, below: list[psutil.Process]) -> psutil.Process:
    """Return the process that writes a device's log."""
    of_log = f"/{device}.log"
    (found,) = [one for one in below if os.readlink(f"/proc/{one.pid}/fd/1").endswith(of_log)]
    return found


def wait_for_the_end_of(processes: list[psutil.Process]) -> None:
    def runs(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:  # it ended in between
            return False

    until(lambda: not any(map(runs, processes)), what=lambda: f"the end of {processes}")


@pytest.mark.slow
def test_a_run_resumed_after_a_client_was_killed_equals_the_run_in_process_with_all_faults(
    tmp_path: Path,
) -> None:
    """Batteries, jitter, availability, liars, slow links, dropouts and deadlines are the same."""
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEET)
    settings = (
        *DIGITS, "--fleet", fleet, "--deadline", 3, "--dropout", 0.1, "--cohort-size", 5,
        "--evaluate-on-devices",
    )  # fmt: skip
    with Processes(tmp_path) as processes:
        engine, below = started(processes, *settings, "--rounds", 100_000)
        process_of("7", below).kill()
        assert engine.wait() == 1, engine.text()
        assert "ConnectionLost: the process of device 7 was ended by SIGKILL" in engine.text()
        wait_for_the_end_of(below)
        rounds = max(len(comparable_rows(tmp_path / "wire")) + 3, 12)
        on_the_wire(processes, "--resume", "--rounds", rounds)
    overrides = {
        **DIGITS_SET,
        "simulation.fleet": fleet,
        "rounds": rounds,
        "cohort.deadline_seconds": 3,
        "simulation.dropout": 0.1,
        "cohort.size": 5,
        "evaluation.on_devices": True,
    }
    in_process(tmp_path, overrides)
    assert_same(tmp_path)
    rows = comparable_rows(tmp_path / "wire")
    assert not any(row["num_aborted"] for row in rows)
    assert any(row["left_out"] for row in rows)
    assert len({row["num_invited"] for row in rows}) > 1
    refused = [reason for row in rows for reason in row["refused"].values()]
    assert any(reason.startswith("NonFiniteUpdate") for reason in refused)
    assert any("has vanished" in reason for reason in refused)


@pytest.mark.slow
def test_status_names_the_awaited_device_and_no_process_survives_a_killed_engine(
    tmp_path: Path,
) -> None:
    with Processes(tmp_path) as processes:
        engine, below = started(processes, *DIGITS, "--clients", 4, "--rounds", 100_000)
        assert len(below) == 5
        out, last = tmp_path / "wire", process_of("3", below)
        last.suspend()
        until(lambda: read_status(out)["awaited"] == ["3"], what=lambda: str(read_status(out)))
        last.resume()
        engine.kill()
        wait_for_the_end_of(below)
        status = read_status(out)
        assert (status["is_up"], status["command"]) == (False, "headwater-simulate")
        logs = list((tmp_path / "wire" / CLIENTS).glob("*.log"))
        assert len(logs) == 5
        assert not any("Traceback" in log.read_text() for log in logs)


@pytest.mark.slow
def test_the_client_algorithm_is_tried_before_the_first_round(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REMEMBERING)
    with Processes(tmp_path) as processes:
        refused = processes.run(
            "simulation", "--engine", "grpc", "--clients", 2, "--rounds", 1,
            "--task", SIGNS, "--out", tmp_path / "a",
            "--client-algorithm", tmp_path / "mine.py:Remembering",
        )  # fmt: skip
        assert (
            "AlgorithmBroken: the client algorithm Remembering made two vectors" in refused.text()
        )
    assert refused.poll() == 1


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"simulation.clients": MAX_CLIENTS + 1}, "allows 1,000; --clients is 1,001"),
        ({"simulation.compute": "fused"}, "--compute fused computes many devices"),
        ({"tls.ca": "ca.pem"}, "without TLS"),
        ({"cohort.return_seconds": 1}, "cohort.return_seconds has no effect"),
    ],
)
def test_unsupported_settings_are_refused_before_any_process_starts(
    chosen: dict[str, Any], message: str
) -> None:
    settings: Settings = load(None, {"simulation.engine": "grpc", **chosen})
    with pytest.raises(SettingsError, match=message) as refused:
        check_engine(settings)
    assert refused.value.remedy
