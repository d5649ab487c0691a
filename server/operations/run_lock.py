"""Whether a server runs in a folder: a lock that dies with its process, and a heartbeat.

The kernel lets the lock go however the process ends, so no stale one is left behind, and two
servers cannot share a run. The heartbeat is the lock file's time of change: it needs no space on a
full disk, and stops when the server's event loop does not answer any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.common.errors import SettingsError, StateError

FILE = "server.lock"
SERVER = "headwater-server"
# Someone who looks whether the lock is held holds it for an instant.
TRIES, TRY_SECONDS = 20, 0.05
FRESH_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerState:
    """What is seen of a folder's server from outside."""

    is_up: bool
    heartbeat_seconds: float | None
    """Since the last sign of life; None if there never was one."""
    about: dict[str, Any]

    @property
    def command(self) -> str:
        """What goes on with the run when its server has ended: this, with ``--resume``."""
        return str(self.about.get("command", SERVER))

    @property
    def is_well(self) -> bool:
        """Whether it runs, and showed a sign of life lately."""
        seconds = self.heartbeat_seconds
        return self.is_up and seconds is not None and seconds < FRESH_SECONDS


class RunLock:
    """This process's hold on a folder, until ``release``."""

    def __init__(self, folder: Path) -> None:
        """Take the folder.

        Raises:
            SettingsError: another server has it.
            StateError: it cannot be written.
        """
        try:
            self._file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StateError(
                f"cannot write {folder / FILE}: {error.strerror}", remedy="choose another --out"
            ) from error
        for _ in range(TRIES):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(TRY_SECONDS)
        os.close(self._file)
        raise SettingsError(
            f"another server runs in {folder}",
            remedy="choose another --out, or end that one: headwater-server drain --out DIR",
        )

    def tell(self, about: dict[str, Any]) -> None:
        """Write what others may want to know of this server; OSError if there is no room for it."""
        data = json.dumps(about).encode()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, data, 0)

    def beat(self) -> None:
        """Show a sign of life."""
        os.utime(self._file)

    def release(self) -> None:
        """Let the folder go."""
        os.close(self._file)


def read_server_state(folder: Path, *, now: float | None = None) -> ServerState:
    """Look from outside whether a server runs in ``folder``.

    Raises:
        StateError: the lock is there and may not be read.
    """
    try:
        file = os.open(folder / FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ServerState(is_up=False, heartbeat_seconds=None, about={})
    except OSError as error:
        raise StateError(
            f"cannot read {folder / FILE}: {error.strerror}",
            remedy="look as the user that the server runs as",
        ) from error
    try:
        beat = os.fstat(file).st_mtime
        try:
            about = json.loads(os.pread(file, 65_536, 0) or b"{}")
        except ValueError:
            about = {}  # it is being written
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            is_up = False
        except BlockingIOError:
            is_up = True
    finally:
        os.close(file)
    age = max((time.time() if now is None else now) - beat, 0.0)
    return ServerState(
        is_up=is_up, heartbeat_seconds=age, about=about if isinstance(about, dict) else {}
    )
