"""An atomically written file has its old or its new content, and its mode from the start."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from headwater.common.system.atomic_file import (
    OWNER_ONLY,
    READABLE,
    atomic_writer,
    make_private_folder,
    write_atomically,
)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_new_content_replaces_the_old(tmp_path: Path) -> None:
    write_atomically(tmp_path / "kept", b"old")
    write_atomically(tmp_path / "kept", b"new")
    assert (tmp_path / "kept").read_bytes() == b"new"
    assert names(tmp_path) == {"kept"}


def test_after_any_failure_only_the_old_content_is_there(tmp_path: Path) -> None:
    def cut_off() -> None:
        with atomic_writer(tmp_path / "kept") as part:
            part.write_bytes(b"half")
            raise KeyboardInterrupt

    write_atomically(tmp_path / "kept", b"old")
    with pytest.raises(KeyboardInterrupt):
        cut_off()
    assert (tmp_path / "kept").read_bytes() == b"old"
    assert names(tmp_path) == {"kept"}


def test_leftovers_of_a_kill_are_replaced(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"another's")
    (tmp_path / "kept.part").symlink_to(elsewhere)
    write_atomically(tmp_path / "kept", b"new")
    assert elsewhere.read_bytes() == b"another's"
    assert names(tmp_path) == {"kept", "elsewhere"}


@pytest.mark.parametrize("umask", [0o000, 0o077])
@pytest.mark.parametrize("mode", [OWNER_ONLY, READABLE])
def test_the_file_has_its_mode_before_it_has_content(tmp_path: Path, mode: int, umask: int) -> None:
    before = os.umask(umask)
    try:
        with atomic_writer(tmp_path / "kept", mode=mode) as part:
            assert stat.S_IMODE(part.stat().st_mode) == mode
        assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == mode
    finally:
        os.umask(before)


def test_a_missing_folder_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "nowhere" / "kept", b"")


@pytest.mark.skipif(os.name != "posix", reason="no mode bits")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277, 0o777])
def test_a_private_folder_is_its_owner_s_alone_at_any_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_private_folder(tmp_path / "certs")
    finally:
        os.umask(before)
    assert (tmp_path / "certs").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    folder.mkdir()
    folder.chmod(0o750)
    make_private_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o750


def test_a_file_in_the_place_of_a_private_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "certs").write_text("")
    with pytest.raises(FileExistsError):
        make_private_folder(tmp_path / "certs")
