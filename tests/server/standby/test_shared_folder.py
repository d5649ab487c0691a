"""A shared folder as a store: of two writers one succeeds, however long the other stood still."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from headwater.common.errors import SettingsError
from headwater.server.standby.shared_folder import NUM_KEPT, SharedFolder
from headwater.server.standby.state_store import StateStore, open_store

OWN_STORES = """
from pathlib import Path
from headwater.server.standby.shared_folder import SharedFolder


class Whole(SharedFolder):
    def __init__(self):
        super().__init__(Path({folder!r}))


class Half:
    def read(self, name):
        return None
"""


def test_of_two_writers_who_saw_the_same_version_one_succeeds(tmp_path: Path) -> None:
    one, other = SharedFolder(tmp_path / "shared"), SharedFolder(tmp_path / "shared")
    assert one.read("term") is None
    version = one.write_if_unchanged("term", b"a", None)
    assert other.write_if_unchanged("term", b"b", None) is None
    assert other.read("term") == (b"a", version)
    later = other.write_if_unchanged("term", b"b", version)
    assert one.write_if_unchanged("term", b"c", version) is None
    assert one.read("term") == (b"b", later)


@pytest.mark.parametrize("num_missed", [1, NUM_KEPT - 1, NUM_KEPT, 3 * NUM_KEPT])
def test_a_writer_who_missed_any_number_of_versions_changes_nothing(
    num_missed: int, tmp_path: Path
) -> None:
    store = SharedFolder(tmp_path)
    old = version = store.write_if_unchanged("term", b"0", None)
    for number in range(num_missed):
        version = store.write_if_unchanged("term", b"%d" % number, version)
        assert version is not None
    assert store.write_if_unchanged("term", b"stale", old) is None
    assert store.read("term") == (b"%d" % (num_missed - 1), version)


class OldNames(SharedFolder):
    """A folder on a network's file system, which lists old names and the one just written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._known = super()._numbers("term")

    def _numbers(self, name: str) -> list[int]:
        own = self._known[-1] + 1
        return [*self._known, *([own] if self._path(name, own).exists() else [])]


@pytest.mark.parametrize("num_missed", [1, NUM_KEPT - 1, NUM_KEPT, 3 * NUM_KEPT])
def test_a_writer_whose_list_of_names_is_old_changes_nothing(
    num_missed: int, tmp_path: Path
) -> None:
    store = SharedFolder(tmp_path)
    first = store.write_if_unchanged("term", b"0", None)
    version = old = store.write_if_unchanged("term", b"0", first)
    late = OldNames(tmp_path)
    for number in range(num_missed):
        version = store.write_if_unchanged("term", b"%d" % number, version)
        assert version is not None
    assert late.write_if_unchanged("term", b"late", old) is None
    assert late.write_if_unchanged("term", b"a new run", None) is None
    assert store.read("term") == (b"%d" % (num_missed - 1), version)
    assert store.write_if_unchanged("term", b"next", version) is not None


def test_stored_files_come_back_whole_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    store, source, copy = SharedFolder(tmp_path / "shared"), tmp_path / "source", tmp_path / "copy"
    source.write_bytes(bytes(range(256)) * 9_000)
    assert store.stored() == []
    store.upload("1-1-model", source)
    store.download("1-1-model", copy)
    assert copy.read_bytes() == source.read_bytes()
    assert store.stored() == ["1-1-model"]
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "shared/files/1-1-model").stat().st_mode) == 0o600
    store.remove("1-1-model")
    store.remove("1-1-model")
    with pytest.raises(FileNotFoundError):
        store.download("1-1-model", copy)


def test_a_file_that_another_server_removes_while_it_is_read_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS says so by an error of its own, with which a standby would have ended."""

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    store = SharedFolder(tmp_path / "shared")
    monkeypatch.setattr(shutil, "copyfile", stale)
    with pytest.raises(FileNotFoundError):
        store.download("1-1-model", tmp_path / "copy")


def test_a_user_s_own_class_is_a_store_and_one_that_lacks_a_method_is_refused(
    tmp_path: Path,
) -> None:
    file = tmp_path / "stores.py"
    file.write_text(OWN_STORES.format(folder=str(tmp_path)))
    assert isinstance(open_store(f"{file}:Whole"), StateStore)
    assert isinstance(open_store(str(tmp_path / "shared")), SharedFolder)
    with pytest.raises(SettingsError, match=r"has no download, remove, stored, upload, write_if"):
        open_store(f"{file}:Half")
