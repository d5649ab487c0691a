"""The keys that seal suspended updates, each in a file that is in memory and not on a disk.

The sealed bytes (``masked_rounds.suspended_updates``) are in the SuperNode's memory, where any
process that reaches its local port can fetch them. Their key is elsewhere: 32 random bytes per
update, in a file that only its owner can read, in a folder whose content is memory (tmpfs). The key
is overwritten and removed when the update's session ends or the next plan comes; then nothing can
open the bytes. If a run ends in the middle of a session, its key remains. It opens nothing once the
SuperNode has ended, and is gone after a reboot. Swap may still write memory to a disk; that is out
of scope.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from headwater.common.errors import StateError, UpdateNotHeld
from headwater.common.secagg.keys import KEY_BYTES
from headwater.common.secagg.secret import Secret
from headwater.common.system.atomic_file import NO_FOLLOW, make_private_folder

MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = ("tmpfs", "ramfs")
FOLDER = "headwater-{uid}"
REMEDY = (
    'name a folder that is in memory in --node-config, runtime="/FOLDER"; a folder on a disk is '
    "accepted too, if it is named"
)


class KeyFile:
    """A real device's key, in a file."""

    def __init__(self, *, name: str, run_id: int, folder: Path | None) -> None:
        """``folder`` is the operator's choice; None selects ``memory_folder``."""
        self._name = name
        self._file = f"{name}-{run_id}.key"
        self._folder = folder

    def check(self) -> None:
        """Check that there is a folder for the key.

        Raises:
            StateError: there is none. All methods raise this if the file cannot be changed.
        """
        self._path()

    def make(self) -> Secret:
        """Make a new key in place of any other."""
        self.erase()
        key = Secret(os.urandom(KEY_BYTES))
        path = self._path()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o600)
            with open(descriptor, "wb") as file:
                file.write(key.reveal())
        except OSError as error:
            raise StateError(f"{path} cannot be written: {error.strerror}") from error
        return key

    def read(self) -> Secret:
        """Return the key.

        Raises:
            UpdateNotHeld: there is none.
        """
        try:
            return Secret.take(bytearray(self._path().read_bytes()))
        except OSError as error:
            raise UpdateNotHeld(
                f"{self._name}: the key of its update of this round is erased"
            ) from error

    def erase(self) -> None:
        """Overwrite and remove the key, if there is one."""
        path = self._path()
        with (
            contextlib.suppress(OSError),  # there is no such file, or it is a link
            open(os.open(path, os.O_WRONLY | NO_FOLLOW), "wb") as file,
        ):
            file.write(bytes(KEY_BYTES))
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StateError(f"{path} cannot be removed: {error.strerror}") from error

    def _path(self) -> Path:
        if self._folder is None:
            return memory_folder() / self._file
        try:
            make_private_folder(self._folder)
        except OSError as error:
            raise StateError(f"{self._folder} cannot be made: {error.strerror}") from error
        return self._folder / self._file


class SimulatedKey:
    """A simulated client's key, from its name: one party runs all clients, nothing is hidden."""

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
    """Return this user's own folder in memory, made if it does not exist.

    Raises:
        StateError: there is no folder in memory, or others than this user can reach it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    for parent in ([Path(runtime)] if runtime else []) + [Path("/dev/shm")]:
        if not hasattr(os, "geteuid") or not parent.is_dir() or not is_in_memory(parent):
            continue
        folder = parent / FOLDER.format(uid=os.geteuid())
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            entry = folder.lstat()
        except OSError:
            continue
        is_own = entry.st_uid == os.geteuid() and not entry.st_mode & 0o077
        if not stat.S_ISDIR(entry.st_mode) or not is_own:
            raise StateError(
                f"{folder} must belong to this user alone, because it is to hold keys",
                remedy=f"remove it, or: {REMEDY}",
            )
        return folder
    raise StateError("no folder in memory was found for the keys of masked updates", remedy=REMEDY)


def is_in_memory(folder: Path, mounts: Path = MOUNTS) -> bool:
    """Whether the table of mounts says that a folder's content is memory; False without a table."""
    kinds: dict[Path, str] = {}
    try:
        for line in mounts.read_text(encoding="utf-8").splitlines():
            mount, _, filesystem = line.partition(" - ")
            point = mount.split()[4].encode().decode("unicode_escape")
            kinds[Path(point)] = filesystem.split()[0]  # a later mount covers an earlier one
    except (OSError, IndexError):
        return False
    path = folder.resolve()
    return next((kinds[p] in IN_MEMORY for p in (path, *path.parents) if p in kinds), False)
