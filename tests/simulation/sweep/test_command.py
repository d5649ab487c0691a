"""Sweeps as a user starts them: complete, interrupted, resumed, and without leftover processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headwater.common.model.trained_model import MODEL
from headwater.server.operations.round_log import read_rows
from headwater.server.rounds.checkpoint import FILE
from headwater.simulation.sweep.worker import LOG, RESULT

PATIENCE_SECONDS = 560
TASK_FILE = """
import os, time
from tests.tasks import TwoLayers

class Slow(TwoLayers):
    def loss_sum(self, model, batch):
        time.sleep(float(os.environ.get("SLOW_SECONDS", "0")))
        while os.path.exists(os.environ.get("HELD_BY", "")):
            time.sleep(0.01)
        if os.path.exists(os.environ.get("DIES_AT", "")):
            os.remove(os.environ["DIES_AT"])
            os._exit(9)
        return super().loss_sum(model, batch)
"""
SWEEP = """
task = "{folder}/slow.py:Slow"
rounds = 30
[simulation]
clients = 2
[optimizer]
name = "sgd"
[plan]
accumulation_steps = 2
micro_batch_size = 4
[sweep]
seeds = [0]
[sweep.grid]
"optimizer.learning_rate" = [0.01, 0.02]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(TASK_FILE)
    (tmp_path / "sweep.toml").write_text(SWEEP.format(folder=tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def end_all_processes() -> Iterator[None]:
    """Kill the processes that a failed test left running."""
    yield
    for process in STARTED:
        if process.poll() is None:
            process.kill()
        process.communicate()
    STARTED.clear()


STARTED: list[subprocess.Popen[str]] = []


def start(folder: Path, out: str, *more: str, **env: str) -> subprocess.Popen[str]:
    file = str(folder / "sweep.toml")
    command = [
        sys.executable,
        "-m",
        "headwater.simulation",
        "sweep",
        file,
        "--out",
        str(folder / out),
    ]
    process = subprocess.Popen(
        [*command, *more],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    STARTED.append(process)
    return process


def output_of(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return output


def models(out: Path) -> dict[str, bytes]:
    found = {str(path.parent.relative_to(out)): path for path in out.glob(f"*/*/{MODEL}")}
    return {name: path.read_bytes() for name, path in found.items()}


def while_running(process: subprocess.Popen[str]) -> Iterator[None]:
    """Yield again and again until the caller breaks; fail if the process ends or time runs out."""
    end = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < end:
        yield
        time.sleep(0.02)
    pytest.fail("the process ended, or took too long")


def interrupt(folder: Path, out: str, signal_number: int) -> subprocess.Popen[str]:
    """Start a sweep, send it a signal in the middle of a run, and wait for its processes to end.

    The signal goes to the sweep alone, not to its workers.
    """
    hold = folder / "hold"
    env = {"SLOW_SECONDS": "0.1", "HELD_BY": str(hold)}
    process = start(folder, out, "--jobs", "1", **env)
    for _ in while_running(process):
        if any(len(read_rows(run)) >= 2 for run in (folder / out).glob("*/*")):
            break
    hold.touch()  # from now on the run cannot finish
    workers = psutil.Process(process.pid).children()
    assert workers
    process.send_signal(signal_number)
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE_SECONDS)
    assert not alive
    hold.unlink()
    return process


@pytest.mark.slow
@pytest.mark.long
def test_an_interrupted_sweep_resumes_to_the_models_of_the_uninterrupted_one(folder: Path) -> None:
    whole = start(folder, "whole", "--jobs", "1")
    output = output_of(whole)
    assert whole.returncode == 0, output
    assert len(models(folder / "whole")) == 2
    assert "learning_rate" in output
    for name in ("points.csv", "runs.csv", "sweep.png"):
        assert (folder / "whole" / name).exists()

    stopped = interrupt(folder, "interrupted", signal.SIGINT)
    assert "the same command goes on" in output_of(stopped)
    assert stopped.returncode == 130
    assert not list((folder / "interrupted").glob(f"*/*/{RESULT}"))

    resumed = start(folder, "interrupted", "--jobs", "2")
    output = output_of(resumed)
    assert resumed.returncode == 0, output
    assert models(folder / "interrupted") == models(folder / "whole")

    written = {path: path.stat().st_mtime_ns for path in (folder / "interrupted").glob("*/*/*")}
    assert "2 of them done already" in output_of(start(folder, "interrupted"))
    assert {
        path: path.stat().st_mtime_ns for path in (folder / "interrupted").glob("*/*/*")
    } == written


@pytest.mark.slow
def test_ctrl_c_while_workers_start_leaves_no_traceback_and_no_process(folder: Path) -> None:
    """The terminal sends SIGINT to the sweep and to the workers, which may still import torch."""
    sweep = start(folder, "out", "--jobs", "2")
    for _ in while_running(sweep):
        if len(workers := psutil.Process(sweep.pid).children()) >= 3:  # and a resource tracker
            break
    os.killpg(sweep.pid, signal.SIGINT)
    output = output_of(sweep)
    assert sweep.returncode == 130, output
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE_SECONDS)
    assert not alive


@pytest.mark.slow
def test_the_workers_of_a_killed_sweep_end_and_keep_their_rounds(folder: Path) -> None:
    killed = interrupt(folder, "out", signal.SIGKILL)
    output_of(killed)
    assert killed.returncode == -signal.SIGKILL
    (run,) = (folder / "out").glob("*/*")
    assert (run / FILE).exists()
    assert not (run / RESULT).exists()


@pytest.mark.slow
@pytest.mark.long
def test_a_worker_that_dies_fails_only_its_run_and_the_next_call_repeats_it(folder: Path) -> None:
    (folder / "die").touch()
    first = start(folder, "out", "--jobs", "1", DIES_AT=str(folder / "die"))
    output = output_of(first)
    assert first.returncode == 1, output
    assert output.count("its process ended with status 9") == 2  # when it happens, and at the end
    assert "1 of 2 runs done" in output
    assert output_of(start(folder, "out", "--jobs", "1")).count("whole") == 1
    assert len(models(folder / "out")) == 2


@pytest.mark.slow
@pytest.mark.long
def test_a_diverged_run_is_a_result_and_is_not_repeated(folder: Path) -> None:
    more = ["--grid", "optimizer.learning_rate=0.01,1e38", "--seeds", "3", "--jobs", "1"]
    first = start(folder, "out", *more)
    output = output_of(first)
    assert first.returncode == 0, output
    assert "1 diverged" in output
    assert len(list((folder / "out").glob(f"*/seed-3/{LOG}"))) == 2
    assert "2 of them done already" in output_of(start(folder, "out", *more))


@pytest.mark.slow
@pytest.mark.long
def test_a_second_sweep_in_one_folder_and_bad_arguments_are_refused(folder: Path) -> None:
    hold = folder / "hold"
    hold.touch()
    first = start(folder, "out", "--jobs", "1", HELD_BY=str(hold))
    for _ in while_running(first):
        if list((folder / "out").glob(f"*/*/{LOG}")):
            break
    second = start(folder, "out")
    assert "another process executes the sweep" in output_of(second)
    assert second.returncode == 2
    first.send_signal(signal.SIGINT)
    output_of(first)
    assert first.returncode == 130
    for given, message in (
        (["--seeds", "a"], "expected numbers"),
        (["--grid", "rounds"], "KEY=VALUE"),
        (["--grid", "rounds=0"], "rounds (--rounds): "),
    ):
        bad = start(folder, "out", *given)
        assert message in output_of(bad)
        assert bad.returncode == 2
