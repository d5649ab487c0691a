"""Whether a server runs in a folder, seen from another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.common.errors import SettingsError, StateError
from headwater.server.operations.run_lock import (
    FILE,
    FRESH_SECONDS,
    RunLock,
    locked_without_server,
    read_server_state,
)
from tests.processes import ROOT

HOLD = """
import sys, time
from pathlib import Path
from headwater.server.operations.run_lock import RunLock
held = RunLock(Path(sys.argv[1]))
held.write_info({"pid": 7})
print("held", flush=True)
time.sleep(600)
"""


def test_a_folder_without_a_server_is_down(tmp_path: Path) -> None:
    seen = read_server_state(tmp_path)
    assert (seen.is_up, seen.is_well, seen.heartbeat_seconds) == (False, False, None)


def test_a_server_is_up_until_it_unlocks_the_folder(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    held.write_info({"address": "a rather long address", "pid": 1})
    held.write_info({"pid": 2})
    held.beat()
    seen = read_server_state(tmp_path)
    assert seen.is_well
    assert seen.info == {"pid": 2}
    held.release()
    assert not read_server_state(tmp_path).is_up


def test_a_server_with_an_old_heartbeat_is_not_well(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    os.utime(tmp_path / FILE, (1000.0, 1000.0))
    assert read_server_state(tmp_path, now=1000.0 + FRESH_SECONDS - 1).is_well
    late = read_server_state(tmp_path, now=1000.0 + FRESH_SECONDS)
    assert late.is_up
    assert not late.is_well
    # A clock that was set back makes no negative age.
    assert read_server_state(tmp_path, now=900.0).heartbeat_seconds == 0.0
    held.release()


@pytest.mark.slow
def test_a_killed_server_leaves_no_lock_behind(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert read_server_state(tmp_path).is_up
        with pytest.raises(SettingsError, match="another process writes here"):
            RunLock(tmp_path)
        other.kill()
        other.wait()
    assert not read_server_state(tmp_path).is_up
    RunLock(tmp_path).release()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot write"):
        RunLock(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StateError, match=r"cannot write .*file.run"),
        locked_without_server(tmp_path / "file" / "run"),
    ):
        pass
