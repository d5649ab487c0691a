"""The keys of suspended updates: in memory, and in the hands of their user alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from headwater.client.masked_rounds.suspended_keys import (
    KeyFile,
    SimulatedKey,
    is_in_memory,
    memory_folder,
)
from headwater.common.errors import StateError
from tests.masked import RUN

KEYS = "headwater.client.masked_rounds.suspended_keys"


def test_a_folder_is_in_memory_if_the_mount_table_says_tmpfs(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n"
        "2 1 0:2 / /run rw - tmpfs tmpfs rw\n"
        "3 2 8:2 / /run/media\\040disk rw - ext4 /dev/sdb1 rw\n"
    )
    assert is_in_memory(Path("/run/user/1000"), table)
    assert not is_in_memory(Path("/run/media disk/a"), table)
    assert not is_in_memory(Path("/home"), table)
    assert not is_in_memory(Path("/run"), tmp_path / "none")


def test_the_folder_in_memory_belongs_to_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(
        f"{KEYS}.is_in_memory",
        lambda folder: folder == tmp_path,
    )
    folder = memory_folder()
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    with pytest.raises(StateError, match="this user alone"):
        memory_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(StateError):
        memory_folder()
    monkeypatch.setattr(f"{KEYS}.is_in_memory", lambda folder: False)
    with pytest.raises(StateError, match="no folder in memory") as caught:
        memory_folder()
    assert "runtime=" in caught.value.remedy


def test_a_new_key_replaces_the_old_one_and_follows_no_link(
    tmp_path: Path,
) -> None:
    key = KeyFile(name="d0", run_id=RUN, folder=tmp_path / "keys")
    first = bytes(key.make().reveal())
    assert bytes(key.make().reveal()) != first
    path = next((tmp_path / "keys").iterdir())
    path.unlink()
    (tmp_path / "mine").write_bytes(b"x" * 32)
    path.symlink_to(tmp_path / "mine")
    key.make()
    assert (tmp_path / "mine").read_bytes() == b"x" * 32
    assert not path.is_symlink()


def test_simulated_keys_need_no_file_and_differ() -> None:
    found = {
        bytes(SimulatedKey(name=name, run_id=run).make().reveal())
        for name in ("0", "1")
        for run in (1, 2)
    }
    assert len(found) == 4
    again = SimulatedKey(name="0", run_id=1)
    again.erase()
    assert bytes(again.read().reveal()) in found


def test_this_machine_keeps_keys_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if not is_in_memory(Path("/dev/shm")):
        pytest.skip("this machine has no folder in memory")
    assert memory_folder() == Path("/dev/shm") / f"headwater-{os.geteuid()}"
