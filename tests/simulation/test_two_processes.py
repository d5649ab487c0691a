"""A second process in the folder of a simulated run is refused, and the first one goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.processes import Processes, assert_tidy, rows, until, write_task

pytestmark = pytest.mark.slow

PLAN = ("--accumulation-steps", 1, "--micro-batch-size", 8)


def test_no_second_process_writes_to_the_folder_of_a_simulated_run(tmp_path: Path) -> None:
    task, out = write_task(tmp_path).spec, tmp_path / "out"
    flags = (*PLAN, "--clients", 2, "--out", out, "--task", task)
    with Processes(tmp_path) as processes:
        first = processes.start("simulation", *flags, "--rounds", "forever")
        until(lambda: (out / "rounds.jsonl").exists() and len(rows(out)) > 1, what=first.text)
        for module, arguments in (
            ("simulation", (*flags, "--rounds", 3)),
            ("simulation", (*flags, "--rounds", 3, "--resume")),
            ("server", ("--listen", "127.0.0.1:0", "--out", out, "--task", task)),
        ):
            second = processes.run(module, *arguments)
            assert second.wait() == 2
            assert "another process writes here" in second.text()
            assert f"process {first.pid}" in second.text()
            assert "--resume" not in second.text()
        for order in ("status", "pause"):
            refused = processes.run("server", order, "--out", out)
            assert refused.wait() == 2
            assert "a simulation without a server" in refused.text()
        first.kill()  # which leaves the lock's file, and no lock
        first.wait()
        resumed = processes.start(
            "simulation", *flags, "--resume", "--rounds", "forever", "--task", task
        )
        resumed.wait_for("continues after round")
        resumed.kill(signal.SIGINT)
        assert resumed.wait() == 130
        assert_tidy(resumed)
    assert not (out / "server.lock").exists()
