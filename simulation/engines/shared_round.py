"""The current round, shared by the server and the devices' processes of ``--engine grpc``.

A request to describe itself does not tell a device which round it is for. A simulated device needs
the round, which determines whether it is on battery. So the number is in a file of eight bytes that
all processes map. It is written before the messages of its round are sent, and read after one of
them has arrived, so no lock is needed.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

NUMBER = struct.Struct("<Q")


class SharedRound:
    """The last round whose plans were sent; 0 before the first."""

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        """Map the file; the process that writes the number creates it."""
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
