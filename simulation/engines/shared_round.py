"""The current round, shared by the server and the devices' processes of ``--engine grpc``.

A request to describe itself does not tell a device which round it is for. A simulated device needs
the round, which determines whether it is on battery. So the number is in a file that all processes
map. It is written before the messages of its round are sent, and read after one of them has
arrived, so no lock is needed. In the same file each device notes the round in which it described
itself last, for the checkpoint; in a resumed run it describes itself the first time as it did then.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

NUMBER = struct.Struct("<Q")


class SharedRound:
    """The last round whose plans were sent; 0 before the first."""

    def __init__(self, path: Path, *, new_for: int | None = None) -> None:
        """Map the file; the process that writes the number creates it, for so many devices."""
        if new_for is not None:
            path.write_bytes(NUMBER.pack(0) * (1 + new_for))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    @property
    def number(self) -> int:
        """The round."""
        return int(NUMBER.unpack_from(self._memory)[0])

    @number.setter
    def number(self, number: int) -> None:
        NUMBER.pack_into(self._memory, 0, number)

    def described(self, part: int) -> int:
        """Return the round in which a device described itself last; 0: it has not."""
        return int(NUMBER.unpack_from(self._memory, NUMBER.size * (1 + part))[0])

    def note_described(self, part: int, number: int) -> None:
        """Note the round in which a device describes itself."""
        NUMBER.pack_into(self._memory, NUMBER.size * (1 + part), number)
