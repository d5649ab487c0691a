"""Where an upload waits until it is whole: in RAM below a limit, in an unlinked file above.

Nothing of an upload touches the sum before every byte of it is here and its SHA-256 is right.
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
    """Counts the bytes that uploads hold in RAM, over all of them and over threads."""

    def __init__(self, limit_bytes: int, *, spool_folder: Path | None = None) -> None:
        """Set the limit; beyond it uploads go to unlinked files in ``spool_folder``.

        Where it is not given they go to the system's folder for temporary files, which may be RAM.
        """
        self.limit_bytes = limit_bytes
        self.spool_folder = spool_folder
        self.held_bytes = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Take room; False if there is not so much."""
        with self._lock:
            has_room = self.held_bytes + num_bytes <= self.limit_bytes
            self.held_bytes += num_bytes if has_room else 0
            return has_room

    def give_back(self, num_bytes: int) -> None:
        """Give back what ``take`` took."""
        with self._lock:
            self.held_bytes -= num_bytes


class StagedUpload:
    """One upload on its way in."""

    def __init__(self, room: StagingMemory, *, num_bytes: int, sha256: bytes) -> None:
        """Make room.

        Raises:
            StateError: the disk has no room for the spool file.
        """
        self.num_bytes = num_bytes
        self.sha256 = sha256
        self.received = 0
        self._room = room
        self._digest = hashlib.sha256()
        self._memory: bytearray | mmap.mmap = bytearray()
        self._spool: IO[bytes] | None = None
        self.is_in_ram = room.take(num_bytes)
        if self.is_in_ram:
            # Pages of its own, which go back at once: freed blocks of the heap would stay with us.
            self._memory = mmap.mmap(-1, num_bytes) if num_bytes else bytearray()
        else:
            self._spool = _spool(num_bytes, room.spool_folder)

    def add(self, offset: int, data: bytes) -> None:
        """Take the next chunk.

        Raises:
            CorruptUpdate: it is not the next, too long, or empty.
        """
        end = self.received + len(data)
        if offset != self.received or not data or len(data) > CHUNK_BYTES or end > self.num_bytes:
            raise CorruptUpdate(
                f"a chunk of {len(data):,} bytes at {offset:,}, where {self.received:,} of "
                f"{self.num_bytes:,} bytes had come"
            )
        if self._spool is None:
            self._memory[self.received : end] = data
        else:
            os.pwrite(self._spool.fileno(), data, offset)
        self._digest.update(data)
        self.received = end

    @property
    def is_whole(self) -> bool:
        """Whether every byte has come."""
        return self.received == self.num_bytes

    def verify(self) -> None:
        """Check the whole upload.

        Raises:
            CorruptUpdate: its digest is not the announced one.
        """
        if not hmac.compare_digest(self._digest.digest(), self.sha256):
            raise CorruptUpdate("the SHA-256 of the upload is not the one that was announced")

    def view(self) -> memoryview:
        """Return the upload's memory, valid until ``release``; a spool file is mapped only here."""
        if self._spool is not None:
            return memoryview(mmap.mmap(self._spool.fileno(), self.num_bytes))
        return memoryview(self._memory)

    def release(self) -> None:
        """Give the memory back; calling it again does nothing."""
        if self.is_in_ram:
            self._room.give_back(self.num_bytes)
            self.is_in_ram = False
        if self._spool is not None:
            self._spool.close()
        self._memory = bytearray()

    def __del__(self) -> None:
        self.release()


def _spool(num_bytes: int, folder: Path | None) -> IO[bytes]:
    """Open a file that has no name; its blocks are taken now, so that no later write can fail."""
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
        raise StateError(
            f"no room for an upload of {num_bytes:,} bytes in {folder or tempfile.gettempdir()}: "
            f"{error.strerror}",
            remedy="free space there, or raise server.staging_bytes",
        ) from error
    return file
