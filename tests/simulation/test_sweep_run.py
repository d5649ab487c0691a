"""Sweeps as one starts them: kept, cut, taken up again, and with nothing left running."""

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

from headwater.server.rounds.checkpoint import FILE
from headwater.server.rounds.round_row import read_rows
from headwater.server.rounds.run import MODEL
from headwater.simulation.sweep.worker import LOG, RESULT

PATIENCE_SECONDS = 240
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
def nothing_is_left() -> Iterator[None]:
    """End what a failed test left running."""
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
    )
    STARTED.append(process)
    return process


def said(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return output


def models(out: Path) -> dict[str, bytes]:
    found = {str(path.parent.relative_to(out)): path for path in out.glob(f"*/*/{MODEL}")}
    return {name: path.read_bytes() for name, path in found.items()}


def waited(process: subprocess.Popen[str]) -> Iterator[None]:
    """Yield until it is enough, as long as the process runs and patience lasts."""
    end = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < end:
        yield
        time.sleep(0.02)
    pytest.fail("what was waited for did not come")


def cut(folder: Path, out: str, how: int) -> subprocess.Popen[str]:
    """Start a sweep, send it a signal in the middle of a run, and wait for its processes to end.

    They are in sessions of their own: the signal comes to the sweep alone.
    """
    hold = folder / "hold"
    env = {"SLOW_SECONDS": "0.1", "HELD_BY": str(hold)}
    process = start(folder, out, "--jobs", "1", **env)
    for _ in waited(process):
        if any(len(read_rows(run)) >= 2 for run in (folder / out).glob("*/*")):
            break
    hold.touch()  # from here on the run does not end by itself
    workers = psutil.Process(process.pid).children()
    assert workers
    process.send_signal(how)
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE_SECONDS)
    assert not alive
    hold.unlink()
    return process


@pytest.mark.slow
def test_a_sweep_that_was_cut_goes_on_to_the_models_of_the_unbroken_one(folder: Path) -> None:
    whole = start(folder, "whole", "--jobs", "1")
    output = said(whole)
    assert whole.returncode == 0, output
    assert len(models(folder / "whole")) == 2
    assert "learning_rate" in output
    for name in ("points.csv", "runs.csv", "sweep.png"):
        assert (folder / "whole" / name).exists()

    stopped = cut(folder, "cut", signal.SIGINT)
    assert "the same command goes on" in said(stopped)
    assert stopped.returncode == 130
    assert not list((folder / "cut").glob(f"*/*/{RESULT}"))

    resumed = start(folder, "cut", "--jobs", "2")
    output = said(resumed)
    assert resumed.returncode == 0, output
    assert models(folder / "cut") == models(folder / "whole")

    written = {path: path.stat().st_mtime_ns for path in (folder / "cut").glob("*/*/*")}
    assert "2 runs are done" in said(start(folder, "cut"))
    assert {path: path.stat().st_mtime_ns for path in (folder / "cut").glob("*/*/*")} == written


@pytest.mark.slow
def test_the_processes_of_a_sweep_that_is_killed_end_and_keep_their_rounds(folder: Path) -> None:
    killed = cut(folder, "out", signal.SIGKILL)
    said(killed)
    assert killed.returncode == -signal.SIGKILL
    (run,) = (folder / "out").glob("*/*")
    assert (run / FILE).exists()
    assert not (run / RESULT).exists()


@pytest.mark.slow
def test_a_process_that_dies_costs_its_run_which_the_next_call_does(folder: Path) -> None:
    (folder / "die").touch()
    first = start(folder, "out", "--jobs", "1", DIES_AT=str(folder / "die"))
    output = said(first)
    assert first.returncode == 1, output
    assert output.count("its process ended with status 9") == 2  # as it happens, and at the end
    assert "1 of 2 runs are done" in output
    assert said(start(folder, "out", "--jobs", "1")).count("whole") == 1
    assert len(models(folder / "out")) == 2


@pytest.mark.slow
def test_runs_that_diverge_are_a_result_and_are_not_tried_again(folder: Path) -> None:
    more = ["--grid", "optimizer.learning_rate=0.01,1e38", "--seeds", "3", "--jobs", "1"]
    first = start(folder, "out", *more)
    output = said(first)
    assert first.returncode == 0, output
    assert "1 diverged" in output
    assert len(list((folder / "out").glob(f"*/seed-3/{LOG}"))) == 2
    assert "2 runs are done" in said(start(folder, "out", *more))


@pytest.mark.slow
def test_two_sweeps_in_one_folder_are_refused_and_bad_input_is_named(folder: Path) -> None:
    first = start(folder, "out", "--jobs", "1", SLOW_SECONDS="0.1")
    for _ in waited(first):
        if list((folder / "out").glob(f"*/*/{LOG}")):
            break
    second = start(folder, "out")
    assert "another process is at the sweep" in said(second)
    assert second.returncode == 2
    first.send_signal(signal.SIGINT)
    said(first)
    assert first.returncode == 130
    for given, named in (
        (["--seeds", "a"], "expected numbers"),
        (["--grid", "rounds"], "KEY=VALUE"),
        (["--grid", "rounds=0"], "rounds: "),
    ):
        bad = start(folder, "out", *given)
        assert named in said(bad)
        assert bad.returncode == 2
