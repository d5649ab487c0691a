"""A server tells of a lost device, of its return, and of the end of its run."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Processes, port_of, until, write_task

pytestmark = pytest.mark.slow

PLAN = ("--accumulation-steps", 1, "--micro-batch-size", 8, "--min-clients", 1)


def test_a_lost_device_its_return_and_the_end_are_told(tmp_path: Path) -> None:
    task, told = write_task(tmp_path).spec, tmp_path / "told"
    code = f"import sys; print(sys.stdin.read(), file=open({str(told)!r}, 'a'))"
    (tmp_path / "server.toml").write_text("[alerts]\nlost_seconds = 1\n")

    def alerts() -> list[dict[str, Any]]:
        lines = told.read_text().splitlines() if told.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def kinds() -> list[tuple[str, str, bool]]:
        return [(one["kind"], one["subject"], one["is_over"]) for one in alerts()]

    with Processes(tmp_path) as processes:
        command = ("--notify", f'{sys.executable} -c "{code}"')
        given = ("--config", tmp_path / "server.toml", "--rounds", "forever", *command)
        server = processes.server(*given, *PLAN, task=task)
        port = port_of(server)
        processes.client(port, 0, task=task)
        lost = processes.client(port, 1, task=task)
        lost.wait_for(": sent ")  # of the first round that it is in
        lost.kill()
        until(lambda: ("device-lost", "1", False) in kinds(), what=server.text)
        processes.client(port, 1, task=task)
        until(lambda: ("device-lost", "1", True) in kinds(), what=server.text)
        server.kill(signal.SIGTERM)
        server.wait()
        until(lambda: ("run-ended", "", False) in kinds(), what=server.text)
        last = alerts()[-1]
        assert last["text"].startswith("out: the run has ended after round ")
        out = ("--out", tmp_path / "out")
        status = processes.complete("server", "status", "--json", *out, status=1)
        assert "1 is away for" in status.stdout


def test_a_target_that_is_none_is_refused_before_the_server_listens(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        server = processes.server("--notify", "$NO_SUCH_VARIABLE", *PLAN, task=task)
        assert server.wait() == 2
        assert "there is no such environment variable" in server.text()
