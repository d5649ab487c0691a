"""Locks on open files, with the system's function and with a stand-in for Windows'."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.common.system import file_lock
from headwater.common.system.file_lock import LOCKED_BYTE, try_lock


@pytest.fixture
def descriptors(tmp_path: Path) -> Iterator[tuple[int, int]]:
    (tmp_path / "lock").write_text("content", encoding="utf-8")
    opened = [os.open(tmp_path / "lock", os.O_RDWR) for _ in range(2)]
    yield opened[0], opened[1]
    for descriptor in opened:
        os.close(descriptor)


class WindowsLocks:
    """``msvcrt`` as far as it locks: one byte at a descriptor's position, for that descriptor."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        """The descriptor that has the lock, by the byte."""

    def locking(self, descriptor: int, mode: int, num_bytes: int) -> None:
        assert (mode, num_bytes) == (self.LK_NBLCK, 1)
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        if self.locked.setdefault(position, descriptor) != descriptor:
            raise PermissionError(13, "Permission denied")


def test_a_file_is_locked_once(descriptors: tuple[int, int]) -> None:
    first, second = descriptors
    assert try_lock(first)
    assert not try_lock(second)
    assert not try_lock(second, is_shared=True)


def test_shared_locks_exclude_only_exclusive_ones(descriptors: tuple[int, int]) -> None:
    first, second = descriptors
    assert try_lock(first, is_shared=True)
    assert try_lock(second, is_shared=True)
    assert not try_lock(second)


def test_on_windows_a_byte_behind_the_content_is_locked(
    descriptors: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows refuses to let others read a locked byte, and the content must stay readable."""
    first, second = descriptors
    windows = WindowsLocks()
    monkeypatch.setattr(file_lock, "fcntl", None)
    monkeypatch.setattr(file_lock, "msvcrt", windows)
    assert try_lock(first)
    assert not try_lock(second)
    assert windows.locked == {LOCKED_BYTE: first}
