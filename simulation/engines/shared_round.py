"""The round that a simulated world is at, where server and devices are processes of their own.

A device that is asked to describe itself is not told for which round: over the wire none needs to
be. A simulated one does, as chance decides in which rounds it is on battery. So this number lies in
a file of eight bytes that all processes map. It is written before the messages of its round leave,
and read when one of them has come: no lock is needed.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

NUMBER = struct.Struct("<Q")


class SharedRound:
    """The last round whose plans were sent; 0 before the first."""

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        """Map the file, made anew by the process that writes."""
        if is_new:
            path.write_bytes(NUMBER.pack(0))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), NUMBER.size)

    @property
    def number(self) -> int:
        """The round."""
        return int(NUMBER.unpack_from(self._memory)[0])

    @number.setter
    def number(self, number: int) -> None:
        NUMBER.pack_into(self._memory, 0, number)
