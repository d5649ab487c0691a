"""What a command writes is its user's alone; a shared record names no file beyond its folder."""

from __future__ import annotations

import json
import os
import stat
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import headwater
from headwater.common.errors import CheckpointCorrupt
from headwater.server.standby.term_record import TermRecord
from tests.processes import Processes, port_of
from tests.python_tasks import SIGNS

UMASK: dict[str, Any] = {"prepare": partial(os.umask, 0)}
"""Start a command under a umask that takes nothing away."""


def for_others(folder: Path) -> list[str]:
    """Return what others may read, write or enter, of all that lies in a folder."""
    found = [folder, *folder.rglob("*")]
    assert len(found) > 5
    return [str(path) for path in found if stat.S_IMODE(path.lstat().st_mode) & 0o077]


PLAN = ("--task", SIGNS, "--accumulation-steps", 2, "--micro-batch-size", 4, "--rounds", 2)


@pytest.mark.slow
def test_a_simulation_s_files_are_its_user_s(tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = ("--clients", 3, "--local-parameters", "2.*", "--out", out)
    with Processes(tmp_path / "logs") as processes:
        processes.run("simulation", *PLAN, *more, **UMASK).succeed()
    assert for_others(out) == []


@pytest.mark.slow
def test_a_server_s_and_a_client_s_files_are_their_users(tmp_path: Path) -> None:
    states = [tmp_path / f"state{part}" for part in range(2)]
    with Processes(tmp_path / "logs") as processes:
        served = ("--min-clients", 2, "--out", tmp_path / "out")
        server = processes.server(*PLAN[2:], *served, task=SIGNS, **UMASK)
        clients = [
            processes.client(port_of(server), part, "--state", state, task=SIGNS, **UMASK)
            for part, state in enumerate(states)
        ]
        for process in (server, *clients):
            process.succeed()
    assert for_others(tmp_path / "out") == []
    for state in states:
        assert [p for p in state.rglob("*") if stat.S_IMODE(p.stat().st_mode) & 0o077] == []


def test_a_call_from_python_leaves_its_caller_s_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        headwater.simulate(SIGNS, clients=2, rounds=1, out=tmp_path / "out", progress=False)
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert for_others(tmp_path / "out") == []


RECORD: dict[str, Any] = {"term": 1, "files": {"model": "1-1-model"}, "log_pieces": ["1-2-log"]}


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"../../etc/cron.d/x": "1-1-x"}},
        {"files": {"/etc/passwd": "1-1-x"}},
        {"files": {"a/./b": "1-1-x"}},
        {"files": {"a//b": "1-1-x"}},
        {"files": {"a\\..\\b": "1-1-x"}},
        {"files": {"a\0b": "1-1-x"}},
        {"files": {"": "1-1-x"}},
        {"files": {"model": "../1-1-model"}},
        {"files": {"model": "/etc/passwd"}},
        {"files": {"model": 3}},
        {"files": ["model"]},
        {"log_pieces": ["../../x"]},
    ],
    ids=str,
)
def test_a_shared_record_names_no_file_beyond_its_folder(change: dict[str, Any]) -> None:
    assert TermRecord.of(json.dumps(RECORD).encode()).files == {"model": "1-1-model"}
    with pytest.raises(CheckpointCorrupt):
        TermRecord.of(json.dumps(RECORD | change).encode())
