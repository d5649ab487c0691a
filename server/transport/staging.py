"""Staging of an upload until it is complete: in RAM below a limit, in an unlinked file above.

No byte of an upload is added to the sum before all bytes have arrived and their SHA-256 is correct.
"""

from __future__ import annotations

import hashlib
import hmac
import mmap
import os
import tempfile
import threading
from pathlib import Path
from typing import IO

from headwater.common.errors import CorruptUpdate, StateError
from headwater.common.transport.limits import CHUNK_BYTES


class StagingMemory:
    """Counts the RAM that all uploads hold together; safe to call from any thread."""

    def __init__(self, limit_bytes: int, *, spool_folder: Path | None = None) -> None:
        """Set the limit; uploads beyond it go to unlinked files in ``spool_folder``.

        The default folder is the system's for temporary files, which may itself be in RAM.
        """
        self.limit_bytes = limit_bytes
        self.spool_folder = spool_folder
        self.held_bytes = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Reserve memory; return False if it would exceed the limit."""
        with self._lock:
            has_room = self.held_bytes + num_bytes <= self.limit_bytes
            self.held_bytes += num_bytes if has_room else 0
            return has_room

    def give_back(self, num_bytes: int) -> None:
        """Release memory that ``take`` reserved."""
        with self._lock:
            self.held_bytes -= num_bytes


class StagedUpload:
    """One upload in progress."""

    def __init__(self, memory: StagingMemory, *, num_bytes: int, sha256: bytes) -> None:
        """Reserve RAM or disk for the whole upload.

        Raises:
            StateError: the disk has no room for the spool file.
        """
        self.num_bytes = num_bytes
        self.sha256 = sha256
        self.received = 0
        self.num_starts = self._started_at = 0
        self._memory = memory
        self._digest = hashlib.sha256()
        self._data: bytearray | mmap.mmap = bytearray()
        self._spool: IO[bytes] | None = None
        self.is_in_ram = memory.take(num_bytes)
        if self.is_in_ram:
            # An anonymous mapping returns its pages at once; freed heap blocks would stay with us.
            self._data = mmap.mmap(-1, num_bytes) if num_bytes else bytearray()
        else:
            self._spool = _spool(num_bytes, memory.spool_folder)

    def note_start(self) -> int:
        """Note that the upload starts or continues; return how often it did so at this byte."""
        self.num_starts = 1 + (self.num_starts if self.received == self._started_at else 0)
        self._started_at = self.received
        return self.num_starts

    def add(self, offset: int, data: bytes) -> None:
        """Append the next chunk.

        Raises:
            CorruptUpdate: the chunk is out of order, too long or empty.
            StateError: the disk is full; only where its blocks cannot be allocated beforehand.
        """
        end = self.received + len(data)
        if offset != self.received or not data or len(data) > CHUNK_BYTES or end > self.num_bytes:
            raise CorruptUpdate(
                f"received a chunk of {len(data):,} bytes at offset {offset:,}, expected offset "
                f"{self.received:,} of {self.num_bytes:,} bytes"
            )
        if self._spool is None:
            self._data[self.received : end] = data
        else:
            self._write(self._spool.fileno(), offset, data)
        self._digest.update(data)
        self.received = end

    def _write(self, file: int, offset: int, data: bytes) -> None:
        """Write all the data; one system call may write a part of it, as on a full disk."""
        left = memoryview(data)
        try:
            os.lseek(file, offset, os.SEEK_SET)
            while left:
                left = left[os.write(file, left) :]
        except OSError as error:
            raise _no_room(self.num_bytes, self._memory.spool_folder, error) from error

    @property
    def is_whole(self) -> bool:
        """Whether every byte has arrived."""
        return self.received == self.num_bytes

    def verify(self) -> None:
        """Check the complete upload's digest.

        Raises:
            CorruptUpdate: it is not the announced digest.
        """
        if not hmac.compare_digest(self._digest.digest(), self.sha256):
            raise CorruptUpdate("the SHA-256 of the upload is not the announced one")

    def view(self) -> memoryview:
        """Return the upload's bytes, valid until ``release``; a spool file is mapped only here."""
        if self._spool is not None:
            return memoryview(mmap.mmap(self._spool.fileno(), self.num_bytes))
        return memoryview(self._data)

    def release(self) -> None:
        """Release the memory; a second call does nothing."""
        if self.is_in_ram:
            self._memory.give_back(self.num_bytes)
            self.is_in_ram = False
        if self._spool is not None:
            self._spool.close()
        self._data = bytearray()

    def __del__(self) -> None:
        self.release()


def _spool(num_bytes: int, folder: Path | None) -> IO[bytes]:
    """Open an unnamed file with its blocks allocated, so that no later write can fail."""
    file: IO[bytes] | None = None
    try:
        file = tempfile.TemporaryFile(prefix="headwater-", dir=folder)  # noqa: SIM115 - open until release
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        else:
            file.truncate(num_bytes)
    except OSError as error:
        if file is not None:
            file.close()
        raise _no_room(num_bytes, folder, error) from error
    return file


def _no_room(num_bytes: int, folder: Path | None, error: OSError) -> StateError:
    return StateError(
        f"no room for an upload of {num_bytes:,} bytes in {folder or tempfile.gettempdir()}: "
        f"{error.strerror}",
        remedy="free space there, or raise server.staging_bytes",
    )
