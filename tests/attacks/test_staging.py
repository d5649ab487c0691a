"""Staged uploads: integrity, memory accounting and a full disk."""

from __future__ import annotations

import errno
import hashlib
import os

import pytest

from headwater.common.errors import CorruptUpdate, StateError
from headwater.server.transport.staging import StagedUpload, StagingMemory

DATA = bytes(range(256)) * 16


def staged(memory: StagingMemory) -> StagedUpload:
    """Return an upload that has arrived."""
    upload = StagedUpload(memory, num_bytes=len(DATA), sha256=hashlib.sha256(DATA).digest())
    for offset in range(0, len(DATA), 1000):
        upload.add(offset, DATA[offset : offset + 1000])
    return upload


@pytest.mark.parametrize("limit_bytes", [0, len(DATA) - 1, len(DATA)])
def test_an_upload_is_unchanged_in_ram_and_on_disk(limit_bytes: int) -> None:
    memory = StagingMemory(limit_bytes)
    upload = staged(memory)
    upload.verify()
    assert upload.is_whole
    assert bytes(upload.view()) == DATA
    assert upload.is_in_ram == (limit_bytes >= len(DATA))


def test_memory_released_twice_is_returned_once() -> None:
    memory = StagingMemory(2 * len(DATA))
    first, second = staged(memory), staged(memory)
    assert memory.held_bytes == 2 * len(DATA)
    first.release()
    first.release()
    assert memory.held_bytes == len(DATA)
    second.release()
    assert memory.held_bytes == 0


def test_a_third_upload_is_staged_on_disk_if_ram_holds_two() -> None:
    memory = StagingMemory(2 * len(DATA))
    uploads = [staged(memory) for _ in range(3)]
    assert [upload.is_in_ram for upload in uploads] == [True, True, False]
    uploads[0].release()
    assert staged(memory).is_in_ram


def test_a_full_disk_is_reported_before_any_byte_is_written() -> None:
    with pytest.raises(StateError, match="no room for an upload"):
        StagedUpload(StagingMemory(0), num_bytes=2**62, sha256=b"")


def test_a_chunk_that_the_system_writes_in_parts_is_written_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:300]))
    upload = staged(StagingMemory(0))
    assert bytes(upload.view()) == DATA


def test_a_disk_that_fills_during_an_upload_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StateError, match=r"no room for an upload .* No space left"):
        staged(StagingMemory(0))


def test_one_flipped_bit_is_detected() -> None:
    upload = StagedUpload(StagingMemory(0), num_bytes=2, sha256=hashlib.sha256(b"ab").digest())
    upload.add(0, b"ac")
    with pytest.raises(CorruptUpdate, match="SHA-256"):
        upload.verify()
