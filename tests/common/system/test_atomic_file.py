"""A file is all of the old content or all of the new, with its mode from the start."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from headwater.common.system.atomic_file import OWNER_ONLY, READABLE, whole_file, write_whole


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_new_content_takes_the_place_of_the_old(tmp_path: Path) -> None:
    write_whole(tmp_path / "kept", b"old")
    write_whole(tmp_path / "kept", b"new")
    assert (tmp_path / "kept").read_bytes() == b"new"
    assert names(tmp_path) == {"kept"}


def test_whatever_fails_meanwhile_the_old_content_stays_alone(tmp_path: Path) -> None:
    def cut_off() -> None:
        with whole_file(tmp_path / "kept") as part:
            part.write_bytes(b"half")
            raise KeyboardInterrupt

    write_whole(tmp_path / "kept", b"old")
    with pytest.raises(KeyboardInterrupt):
        cut_off()
    assert (tmp_path / "kept").read_bytes() == b"old"
    assert names(tmp_path) == {"kept"}


def test_what_a_kill_left_is_replaced_whatever_it_is(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"another's")
    (tmp_path / "kept.part").symlink_to(elsewhere)
    write_whole(tmp_path / "kept", b"new")
    assert elsewhere.read_bytes() == b"another's"
    assert names(tmp_path) == {"kept", "elsewhere"}


@pytest.mark.parametrize("umask", [0o000, 0o077])
@pytest.mark.parametrize("mode", [OWNER_ONLY, READABLE])
def test_it_has_its_mode_before_anything_is_in_it(tmp_path: Path, mode: int, umask: int) -> None:
    before = os.umask(umask)
    try:
        with whole_file(tmp_path / "kept", mode=mode) as part:
            assert stat.S_IMODE(part.stat().st_mode) == mode
        assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == mode
    finally:
        os.umask(before)


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "nowhere" / "kept", b"")
