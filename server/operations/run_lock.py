"""The lock and heartbeat of a run's folder: at most one server, and a sign that it is alive.

The system releases the lock however the process ends, so no stale lock remains, and two servers
cannot share a run. The heartbeat is the lock file's modification time: it needs no space on a full
disk, and stops when the server's event loop no longer responds.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.common.errors import SettingsError, StateError
from headwater.common.parsed_text import json_of
from headwater.common.system.atomic_file import OWNER_ONLY
from headwater.common.system.file_lock import try_lock
from headwater.server.operations.sqlite_history import FILE as HISTORY

FILE = "server.lock"
SERVER = "headwater-server"
COMMANDS = (SERVER, "headwater-simulate")
FOLLOWS_QUEUE = "follows_queue"
"""The key of a server's info that says whether it serves the runs of the queue too."""
# A process that tests the lock holds it for an instant.
TRIES, TRY_SECONDS = 20, 0.05
FRESH_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerState:
    """The state of a folder's server, as another process sees it."""

    is_up: bool
    heartbeat_seconds: float | None
    """Seconds since the last heartbeat; None if there never was one."""
    info: dict[str, Any]

    @property
    def command(self) -> str:
        """The command that, with ``--resume``, continues the run after its server has ended."""
        told = self.info.get("command")  # from a file in the folder, which somebody may have sent
        return told if told in COMMANDS else SERVER

    @property
    def follows_queue(self) -> bool:
        """Whether the server, if it runs, serves the runs of the queue after this one."""
        return not self.is_up or bool(self.info.get(FOLLOWS_QUEUE, True))

    @property
    def is_well(self) -> bool:
        """Whether the server runs and its heartbeat is recent."""
        seconds = self.heartbeat_seconds
        return self.is_up and seconds is not None and seconds < FRESH_SECONDS


class RunLock:
    """This process's exclusive lock on a folder, until ``release``."""

    def __init__(self, folder: Path) -> None:
        """Lock the folder.

        Raises:
            SettingsError: another server has locked it.
            StateError: it cannot be written.
        """
        try:
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            self._file = os.open(folder / FILE, flags, OWNER_ONLY)
        except OSError as error:
            raise StateError(
                f"cannot write {folder / FILE}: {error.strerror}", remedy="choose another --out"
            ) from error
        self._path = folder / FILE
        for _ in range(TRIES):
            if try_lock(self._file):
                return
            time.sleep(TRY_SECONDS)
        os.close(self._file)
        raise SettingsError(
            f"another server runs in {folder}",
            remedy="choose another --out, or end that server: headwater-server drain --out DIR",
        )

    def write_info(self, info: dict[str, Any]) -> None:
        """Write facts about this server for other processes; OSError on a full disk."""
        data = json.dumps(info).encode()
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        os.write(self._file, data)

    def beat(self) -> None:
        """Renew the heartbeat."""
        os.utime(self._file if os.utime in os.supports_fd else self._path)

    def release(self) -> None:
        """Unlock the folder."""
        os.close(self._file)


def read_server_state(folder: Path, *, now: float | None = None) -> ServerState:
    """Return whether a server runs in ``folder``, and its facts.

    Raises:
        StateError: the lock file exists and may not be read.
    """
    try:
        file = os.open(folder / FILE, os.O_RDONLY)
    except FileNotFoundError:
        return ServerState(is_up=False, heartbeat_seconds=None, info={})
    except OSError as error:
        raise StateError(
            f"cannot read {folder / FILE}: {error.strerror}",
            remedy="run the command as the user that the server runs as",
        ) from error
    try:
        heartbeat = os.fstat(file).st_mtime
        try:
            info = json_of(os.read(file, 65_536) or b"{}")
        except ValueError:
            info = {}  # the server is writing it
        is_up = not try_lock(file, is_shared=True)
    finally:
        os.close(file)
    age = max((time.time() if now is None else now) - heartbeat, 0.0)
    info = info if isinstance(info, dict) else {}
    return ServerState(is_up=is_up, heartbeat_seconds=age, info=info)


def check_run(folder: Path) -> None:
    """Check that a server has run in the folder.

    Raises:
        SettingsError: it holds neither a lock nor a history.
    """
    if not any((folder / name).exists() for name in (FILE, HISTORY)):
        problem = "holds no run of a server" if folder.is_dir() else "is not a folder"
        raise SettingsError(f"{folder} {problem}", remedy="name the server's own folder: --out DIR")
