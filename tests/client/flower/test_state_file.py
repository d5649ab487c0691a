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
