"""The state file of a device is its owner's alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from headwater.client.flower.state_file import StateFile


@pytest.mark.parametrize("umask", [0, 0o077])
def test_only_the_owner_may_read_a_device_s_state(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "state" / "nas-7.json"
    before = os.umask(umask)
    try:
        StateFile(path).write({"pace": {"base": 1.0, "each": 1.0}})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_later_term_is_kept_beside_the_entries_of_an_instruction(tmp_path: Path) -> None:
    path, speed = tmp_path / "nas-7.json", {"pace": {"base": 1.0, "each": 1.0}}
    file = StateFile(path)
    file.write(speed)
    assert file.term == 0
    file.write_term(3)
    file.write({})  # what a thread of an instruction has prepared before
    again = StateFile(path)
    assert again.read() == {}
    assert again.term == 3
