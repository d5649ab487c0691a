"""The keys under which updates wait between two messages on Flower's own engines.

The bytes that wait (``client.flower.suspended``) lie in the SuperNode's memory, and whoever reaches its local
port can have them. Their key is in none of it: 32 random bytes for each update, in a file that its
owner alone can read, in a folder whose content is memory (tmpfs) and no disk. It is overwritten and
removed when the update's session is over or the next plan comes, and what was sealed under it is
closed for good then. A key that is left behind, because the run ended in mid-session, opens nothing
once the SuperNode has ended, and is gone when the machine is started anew. Memory may be swapped
out; that is not ours to encrypt.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path
from typing import Protocol

from headwater.common.errors import StateError, UpdateNotHeld
from headwater.common.secagg.keys import KEY_BYTES
from headwater.common.secagg.secret import Secret

MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = ("tmpfs", "ramfs")
FOLDER = "headwater-{uid}"
REMEDY = (
    'name a folder that is in memory in --node-config, runtime="/FOLDER"; one on a disk is taken '
    "too, if it is named"
)


class ParkingKey(Protocol):
    """The key of one device's update, where later processes find it."""

    def check(self) -> None:
        """Check that there is a place for a key.

        Raises:
            StateError: there is none.
        """
        ...

    def make(self) -> Secret:
        """Make a new key in place of any other.

        Raises:
            StateError: there is no place for it.
        """
        ...

    def read(self) -> Secret:
        """Return the key.

        Raises:
            UpdateNotHeld: there is none any more.
        """
        ...

    def erase(self) -> None:
        """Overwrite and remove the key, if there is one.

        Raises:
            StateError: it cannot be removed.
        """
        ...


class KeyFile:
    """A real device's."""

    def __init__(self, *, name: str, run_id: int, folder: Path | None) -> None:
        """``folder`` is the one that the device's operator named; None: one in memory is found."""
        self._name = name
        self._file = f"{name}-{run_id}.key"
        self._chosen = folder

    def check(self) -> None:
        self._path()

    def make(self) -> Secret:
        self.erase()
        key = Secret(os.urandom(KEY_BYTES))
        path = self._path()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "wb") as file:
                file.write(key.reveal())
        except OSError as error:
            raise StateError(f"{path} cannot be written: {error.strerror}") from error
        return key

    def read(self) -> Secret:
        try:
            found = bytearray(self._path().read_bytes())
        except OSError as error:
            raise UpdateNotHeld(
                f"{self._name}: the key to its update of this round is gone"
            ) from error
        return Secret.over(found)

    def erase(self) -> None:
        path = self._path()
        with (
            contextlib.suppress(OSError),  # there is none, or only the name of one
            open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW), "wb") as file,
        ):
            file.write(bytes(KEY_BYTES))
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StateError(f"{path} cannot be removed: {error.strerror}") from error

    def _path(self) -> Path:
        return (self._chosen_folder() if self._chosen is not None else memory_folder()) / self._file

    def _chosen_folder(self) -> Path:
        assert self._chosen is not None
        try:
            self._chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(f"{self._chosen} cannot be made: {error.strerror}") from error
        return self._chosen


class SimulatedKey:
    """A simulated device's: whoever simulates plays all devices, and nothing is hidden from it."""

    def __init__(self, *, name: str, run_id: int) -> None:
        self._seed = f"headwater simulated parking {run_id} {name}".encode()

    def check(self) -> None:
        pass

    def make(self) -> Secret:
        return self.read()

    def read(self) -> Secret:
        return Secret(hashlib.sha256(self._seed).digest())

    def erase(self) -> None:
        pass


def memory_folder() -> Path:
    """Return this user's own folder in memory, made if need be.

    Raises:
        StateError: no such folder can be had.
    """
    told = os.environ.get("XDG_RUNTIME_DIR")
    for parent in ([Path(told)] if told else []) + [Path("/dev/shm")]:
        if not parent.is_dir() or not is_in_memory(parent):
            continue
        folder = parent / FOLDER.format(uid=os.geteuid())
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
        except OSError:
            continue
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise StateError(
                f"{folder} is not this user's alone, and keys are to lie there",
                remedy=f"remove it, or: {REMEDY}",
            )
        return folder
    raise StateError("no folder in memory was found for the keys of masked updates", remedy=REMEDY)


def is_in_memory(folder: Path, mounts: Path = MOUNTS) -> bool:
    """Tell whether a folder's content is memory, by the table of mounts; False if there is none."""
    kinds: dict[Path, str] = {}
    try:
        for line in mounts.read_text().splitlines():
            before, _, behind = line.partition(" - ")
            point = before.split()[4].encode().decode("unicode_escape")
            kinds[Path(point)] = behind.split()[0]  # a later mount covers an earlier one
    except (OSError, IndexError):
        return False
    place = folder.resolve()
    return next((kinds[p] in IN_MEMORY for p in (place, *place.parents) if p in kinds), False)
