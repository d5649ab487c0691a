"""A run whose folder is removed ends with one line that says so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.processes import Processes, assert_tidy, port_of, rows, until, write_task

pytestmark = pytest.mark.slow

FLAGS = ("--rounds", "forever", "--accumulation-steps", 1, "--micro-batch-size", 8)


@pytest.mark.parametrize("module", ["server", "simulation"])
def test_a_run_whose_folder_is_removed_ends_with_one_line(module: str, tmp_path: Path) -> None:
    task, out = write_task(tmp_path).spec, tmp_path / "out"
    with Processes(tmp_path) as processes:
        if module == "server":
            run = processes.server(*FLAGS, "--min-clients", 1, task=task)
            processes.client(port_of(run), 0, task=task)
        else:
            run = processes.start(module, *FLAGS, "--clients", 2, "--out", out, "--task", task)
        until(lambda: (out / "rounds.jsonl").exists() and len(rows(out)) > 1, what=run.text)
        shutil.rmtree(out, ignore_errors=True)  # the run may write into it meanwhile
        assert run.wait() == 1
        assert_tidy(run)
        lines = [line for line in run.text().splitlines() if "keeps part on the task" not in line]
        errors = [line for line in lines if "Gone" in line or "WARNING" in line]
        assert len(errors) == 1
        assert errors[0].startswith("RunFolderGone: ")
        assert "please report" not in run.text()
        assert "--resume" not in run.text()
