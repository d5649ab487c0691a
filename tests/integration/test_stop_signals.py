"""Two SIGTERMs in a row, as ``timeout`` sends them, end each command in order."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from headwater.common.system import stop_signals
from headwater.server.operations.run_lock import read_server_state
from tests.processes import (
    GatedTask,
    Process,
    Processes,
    assert_tidy,
    port_of,
    rows,
    until,
    write_task,
)

pytestmark = pytest.mark.slow

WORK = ("--accumulation-steps", 6, "--micro-batch-size", 8)


def repeat_for_long() -> None:
    """Let a second signal count as a repeat however slow the machine is."""
    stop_signals.REPEAT_SECONDS = 600.0


def repeat_never() -> None:
    """Let a second signal count as a new request however fast it comes."""
    stop_signals.REPEAT_SECONDS = 0.0


def ask_to_stop(process: Process, by: signal.Signals = signal.SIGTERM) -> None:
    process.kill(by)


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGHUP])  # the latter: a closed terminal
def test_a_client_that_is_asked_twice_at_once_sends_what_it_has(
    by: signal.Signals, tmp_path: Path
) -> None:
    task = write_task(tmp_path, open_for=2)
    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 1, *WORK, "--min-clients", 1, task=task.spec)
        parts = ("--num-parts", 1)
        client = processes.client(
            port_of(server), 0, *parts, task=task.spec, prepare=repeat_for_long
        )
        task.wait_until_reached()
        ask_to_stop(client, by)
        client.wait_for("stopping: what is summed")
        ask_to_stop(client, by)
        task.open()
        for process in (client, server):
            process.succeed()
        assert client.text().count("stopping: what is summed") == 1
    (row,) = rows(tmp_path / "out")
    assert row["clients"][0]["reason"] == "asked to stop"


def test_a_client_that_is_asked_again_later_ends_at_once(tmp_path: Path) -> None:
    task = write_task(tmp_path, open_for=2)
    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 1, *WORK, "--min-clients", 1, task=task.spec)
        parts = ("--num-parts", 1)
        client = processes.client(port_of(server), 0, *parts, task=task.spec, prepare=repeat_never)
        task.wait_until_reached()
        ask_to_stop(client)
        client.wait_for("stopping: what is summed")
        ask_to_stop(client)
        assert client.wait() == 130
        assert "second request to stop: ending at once" in client.text()


def test_a_server_that_is_asked_twice_at_once_keeps_its_rounds(tmp_path: Path) -> None:
    task, out = write_task(tmp_path), tmp_path / "out"
    task.open()
    with Processes(tmp_path) as processes:
        flags = ("--rounds", 100_000, *WORK, "--min-clients", 1)
        server = processes.server(*flags, task=task.spec, prepare=repeat_for_long)
        processes.client(port_of(server), 0, "--num-parts", 1, task=task.spec)
        until(lambda: (out / "rounds.jsonl").exists() and len(rows(out)) > 1, what=server.text)
        for _ in range(2):
            ask_to_stop(server)
        assert server.wait() == 130
        assert_tidy(server)
        assert "stopped; committed rounds are kept" in server.text()
    assert (out / "model.safetensors").exists()
    assert not read_server_state(out).is_up


@pytest.mark.parametrize("engine", ["in-process", "grpc"])
def test_a_simulator_that_is_asked_twice_at_once_keeps_its_rounds(
    engine: str, tmp_path: Path
) -> None:
    task, out = write_task(tmp_path), tmp_path / "out"
    task.open()
    with Processes(tmp_path) as processes:
        flags = ("--rounds", 100_000, *WORK, "--clients", 2, "--engine", engine, "--out", out)
        simulator = processes.start(
            "simulation", *flags, "--task", task.spec, prepare=repeat_for_long
        )
        until(lambda: (out / "rounds.jsonl").exists() and len(rows(out)) > 1, what=simulator.text)
        for _ in range(2):
            ask_to_stop(simulator)
        assert simulator.wait() == 130
        assert_tidy(simulator)
        assert "stopped; committed rounds are kept" in simulator.text()
    assert (out / "model.safetensors").exists()


def write_held_task(folder: Path) -> GatedTask:
    """Write a task whose first micro-batch waits, on whichever simulated device it comes."""
    task = write_task(folder, open_for=0)
    path = folder / "task.py"
    text = path.read_text()
    path.write_text(text.replace("len(labels) == 8 and self.part == 0", "self.part >= 0"))
    assert path.read_text() != text
    return task


@pytest.mark.parametrize("module", ["server", "simulation"])
def test_a_run_that_is_stopped_before_its_first_round_speaks_of_no_committed_rounds(
    module: str, tmp_path: Path
) -> None:
    task, out = write_held_task(tmp_path), tmp_path / "out"
    with Processes(tmp_path) as processes:
        if module == "server":
            process = processes.server(*WORK, "--min-clients", 1, task=task.spec)
            process.wait_for("listening")
        else:
            flags = ("--clients", 2, "--compute", "one-by-one", "--out", out, "--task", task.spec)
            process = processes.start("simulation", *WORK, *flags)
            task.wait_until_reached()
        ask_to_stop(process)
        assert process.wait() == 130
        assert_tidy(process)
        assert re.search("(?m)^stopped(?!;)", process.text()), process.text()
        assert "committed" not in process.text()
