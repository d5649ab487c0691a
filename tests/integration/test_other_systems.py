"""Client, server and simulator without what Windows lacks: ``tests/without_posix``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.server.operations.run_lock import read_server_state
from tests.processes import ROOT, Processes, model_digest, port_of, write_task

pytestmark = pytest.mark.slow

SETTINGS = (
    *("--rounds", 2, "--accumulation-steps", 2, "--micro-batch-size", 8),
    *("--optimizer", "adam", "--learning-rate", 0.01, "--threads", 1),
)


@pytest.fixture
def without_posix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take it away from all processes that are started from now on."""
    path = os.pathsep.join([str(ROOT / "tests" / "without_posix"), str(ROOT)])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("PYTHONWARNDEFAULTENCODING", "1")
    # torch asks who the user is, which Windows says by a variable.
    monkeypatch.setenv("USERNAME", "somebody")


@pytest.mark.usefixtures("without_posix")
def test_every_way_of_running_makes_the_same_model(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    task.open()
    with Processes(tmp_path) as processes:
        ways = {
            "workers": ("--workers", 2, "--compute", "one-by-one"),
            "processes": ("--engine", "grpc"),
        }
        for name, flags in ways.items():
            out = ("--out", tmp_path / name, "--task", task.spec)
            more = (*SETTINGS, "--clients", 2, *flags, *out)
            process = processes.start("simulation", *more, as_command=True)
            process.succeed()
        server = processes.server(
            *SETTINGS,
            "--min-clients",
            2,
            "--out",
            tmp_path / "network",
            task=task.spec,
            as_command=True,
        )
        port = port_of(server)
        assert read_server_state(tmp_path / "network").is_up
        spool = ("--spool", tmp_path / "spool")
        clients = [
            processes.client(port, part, *spool, task=task.spec, as_command=True)
            for part in range(2)
        ]
        for process in (server, *clients):
            process.succeed()
    assert len({model_digest(tmp_path / name) for name in (*ways, "network")}) == 1


@pytest.mark.usefixtures("without_posix")
def test_the_test_takes_away_what_it_says(tmp_path: Path) -> None:
    """Otherwise the test above would show nothing."""
    program = (
        "import os\n"
        "assert not hasattr(os, 'fork')\n"
        "for name in ('fcntl', 'resource', 'pwd', 'termios'):\n"
        "    try:\n"
        "        __import__(name)\n"
        "    except ImportError:\n"
        "        continue\n"
        "    raise AssertionError(name)\n"
        "from headwater.client.memory.process_limits import MemoryLimits\n"
        "assert {limit.source for limit in MemoryLimits().all()} == {'machine'}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
