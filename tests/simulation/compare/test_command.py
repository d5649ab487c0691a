"""Comparisons as a user starts them: refused, interrupted, continued, and the advice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

import headwater
from headwater.common.errors import SettingsError
from headwater.common.settings.sources import load
from headwater.simulation.cli import app
from headwater.simulation.compare.flags import CHOSEN
from headwater.simulation.compare.record import RECORD
from headwater.simulation.sweep.worker import RESULT
from tests.tasks import TwoLayers

PATIENCE_SECONDS = 900  # for 26 runs, which take twenty seconds of a core
TASK_FILE = """
import os, time
from tests.tasks import TwoLayers

class Slow(TwoLayers):
    def loss_sum(self, model, batch):
        while os.path.exists(os.environ.get("HELD_BY", "")):
            time.sleep(0.01)
        return super().loss_sum(model, batch)
"""


def refused(*words: str) -> str:
    """Return what a comparison says that is refused before anything runs."""
    ended = CliRunner().invoke(app, ["compare", *words], env={"COLUMNS": "200"})
    assert ended.exit_code == 2, ended.output
    return ended.output


def test_the_help_shows_a_simulation_s_flags_without_those_that_it_chooses() -> None:
    ended = CliRunner().invoke(app, ["compare", "--help-all"], env={"COLUMNS": "80"})
    assert ended.exit_code == 0
    for flag in ("--fleet", "--partition", "--cohort-size", "--local-batch-size", "--budget"):
        assert f"\n  {flag} " in ended.output
    for flag in ("--rounds", "--algorithm", "--learning-rate", "--local-epochs", "--seed"):
        assert f"\n  {flag} " not in ended.output


def test_each_setting_that_it_chooses_exists() -> None:
    from headwater.common.settings.introspection import all_settings

    assert set(CHOSEN) <= set(all_settings())


def test_flags_that_it_chooses_are_refused_with_what_to_use() -> None:
    assert "--rounds is set" in (said := refused("--rounds", "5"))
    assert "--budget rounds=N" in said
    assert "--learning-rate is set" in refused("--lr", "0.1")
    assert "--algorithm is set" in refused("--set", "local.algorithm=fedavg")


def test_a_wrong_budget_or_seed_is_refused() -> None:
    assert "expected rounds=N" in refused("--budget", "50")
    assert "expected numbers" in refused("--seeds", "a")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_an_interrupted_comparison_shows_what_is_done_and_the_same_command_or_call_ends_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "slow.py").write_text(TASK_FILE)
    hold, out = tmp_path / "hold", tmp_path / "out"
    command = [sys.executable, "-m", "headwater.simulation", "compare", "--jobs", "1"]
    command += ["--task", f"{tmp_path}/slow.py:Slow", "--clients", "2", "--out", str(out)]
    command += ["--budget", "rounds=2", "--seeds", "0", "--micro-batch-size", "4"]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            env=os.environ | {"HELD_BY": str(hold)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    first = start()
    try:
        end = time.monotonic() + PATIENCE_SECONDS
        while not list(out.glob(f"*/*/{RESULT}")):
            assert first.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        hold.touch()  # from now on no further run can end
        workers = psutil.Process(first.pid).children()
        first.send_signal(signal.SIGINT)
        said, _ = first.communicate(timeout=PATIENCE_SECONDS)
    finally:
        first.kill()
    assert first.returncode == 130, said
    assert "the same command goes on" in said
    assert not psutil.wait_procs(workers, timeout=PATIENCE_SECONDS)[1]
    num_done = len(list(out.glob(f"*/*/{RESULT}")))
    assert not json.loads((out / RECORD).read_text())["is_done"]

    hold.unlink()
    second = start()
    try:
        said, _ = second.communicate(timeout=PATIENCE_SECONDS)
    finally:
        second.kill()
    assert second.returncode == 0, said
    assert f"{num_done} run" in said
    assert "done already" in said
    record = json.loads((out / RECORD).read_text())
    assert record["is_done"]
    assert said.rstrip().endswith(record["advice"])
    assert record["advice"].startswith("Use --algorithm ")
    assert f"headwater simulate --config {out}/best.toml" in said
    assert load(out / "best.toml", {}).task == f"{tmp_path}/slow.py:Slow"
    assert (out / "compare.png").exists()

    written = {path: path.stat().st_mtime_ns for path in out.glob("*/*/*")}
    called = headwater.compare(
        f"{tmp_path}/slow.py:Slow",
        clients=2,
        budget="rounds=2",
        seeds=[0],
        out=out,
        settings={"plan.micro_batch_size": 4},
        progress=False,
    )
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/*/*")} == written
    assert [called.metric, called.advice, called.target] == [
        record[name] for name in ("metric", "advice", "target")
    ]
    assert {"exact", "fedavg E=1", "diloco"} <= called.flags.keys()
    assert "--learning-rate" in called.flags["exact"]


def test_a_call_refuses_what_the_command_refuses_and_objects_of_its_process() -> None:
    with pytest.raises(SettingsError, match="--rounds is set"):
        headwater.compare("tests/tasks.py:TwoLayers", rounds=5, progress=False)
    with pytest.raises(SettingsError, match="processes of their own"):
        headwater.compare(TwoLayers, progress=False)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no keyword clints; did you mean clients"):
        headwater.compare("tests/tasks.py:TwoLayers", clints=3)


@pytest.mark.slow
@pytest.mark.long
def test_a_quick_call_leaves_algorithms_out_and_writes_the_best_settings(tmp_path: Path) -> None:
    """With which a simulation that asks for advice trains; it finds the comparison done."""
    out = tmp_path / "compare"
    found = headwater.compare(
        "tests/tasks.py:TwoLayers",
        clients=2,
        quick=True,
        out=out,
        settings={"plan.micro_batch_size": 4},
        progress=False,
    )
    assert [len(one["runs"]) for one in found.record["algorithms"]].count(1) <= 5
    assert found.record["seeds"] == [0]
    words = ["--task", "tests/tasks.py:TwoLayers", "--clients", "2", "--micro-batch-size", "4"]
    given = ["--rounds", "2", "--out", str(tmp_path)]
    ended = CliRunner().invoke(app, [*words, "--advise", *given])
    assert ended.exit_code == 0, ended.output
    assert "done already" in ended.output
    best, used = (load(one, {}) for one in (out / "best.toml", tmp_path / "settings.toml"))
    assert used.num_rounds == 2
    assert (used.local, used.optimizer) == (best.local, best.optimizer)
