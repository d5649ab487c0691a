"""Copies of large vectors: in RAM up to a limit, beyond it in unlinked files.

The pages of a file can leave the RAM, so that copies which wait for hours do not end the process
for want of memory. The files are in the system's folder for temporary files (``TMPDIR``), which
must be on a disk for that.
"""

from __future__ import annotations

import mmap
import tempfile
import weakref

import numpy as np
from numpy.typing import NDArray

from headwater.common.errors import StateError

Bytes = NDArray[np.uint8]


class BoundedMemory:
    """Makes copies; those that nobody refers to any more do not count."""

    def __init__(self, ram_bytes: int) -> None:
        """Set the limit. A single copy may be larger than that."""
        self._ram_bytes = ram_bytes
        self._in_ram: list[weakref.ref[Bytes]] = []

    @property
    def ram_bytes(self) -> int:
        """The bytes of RAM that living copies take."""
        self._in_ram = [one for one in self._in_ram if one() is not None]
        living = (one() for one in self._in_ram)
        return sum(copy.nbytes for copy in living if copy is not None)

    def copy(self, data: memoryview) -> Bytes:
        """Return a copy of the bytes of ``data``, which it does not refer to.

        Raises:
            StateError: the disk has no room for the file.
        """
        held_bytes = self.ram_bytes
        if not held_bytes or held_bytes + data.nbytes <= self._ram_bytes or not data.nbytes:
            kept = np.frombuffer(data.cast("B"), np.uint8).copy()
            self._in_ram.append(weakref.ref(kept))
            return kept
        try:
            with tempfile.TemporaryFile(prefix="headwater-") as file:
                file.write(data)  # not truncated to its length: a full disk is then an error here
                file.flush()
                memory = mmap.mmap(file.fileno(), data.nbytes)  # stays valid without the file
        except OSError as error:
            raise StateError(
                f"no room for {data.nbytes:,} bytes in {tempfile.gettempdir()}: {error.strerror}",
                remedy="free space there, or set TMPDIR to a folder on a larger disk",
            ) from error
        return np.frombuffer(memory, np.uint8)
