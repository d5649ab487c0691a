"""The lock and heartbeat of a run's folder: at most one process writes there, and a sign of life.

The system releases the lock however the process ends, so no stale lock remains, and neither two
servers nor two simulators can share a run. The heartbeat is the lock file's modification time: it
needs no space on a full disk, and stops when the server's event loop no longer responds.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.common.errors import SettingsError, StateError, system_remedy
from headwater.common.parsed_text import json_of
from headwater.common.system.atomic_file import OWNER_ONLY, make_private_folder
from headwater.common.system.file_lock import try_lock
from headwater.common.wording import in_shell

FILE = "server.lock"
SERVER = "headwater-server"
SIMULATE = "headwater-simulate"
COMMANDS = (SERVER, SIMULATE)
FOLLOWS_QUEUE = "follows_queue"
"""The key of a server's info that says whether it serves the runs of the queue too."""
TAKES_ORDERS = "takes_orders"
"""The key of a process's info that says whether it takes orders, as a server does."""
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
    def takes_orders(self) -> bool:
        """Whether the process, if it runs, is a server; a simulator without one takes no orders."""
        return bool(self.info.get(TAKES_ORDERS, True))

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
            SettingsError: another process has locked it.
            StateError: it cannot be written.
        """
        self._path = folder / FILE
        for _ in range(TRIES):
            self._file = _opened(self._path)
            if try_lock(self._file) and _is_at(self._file, self._path):
                return
            os.close(self._file)
            time.sleep(TRY_SECONDS)
        raise _locked_error(folder)

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


@contextmanager
def locked_without_server(folder: Path | None) -> Iterator[None]:
    """Lock the folder of a run without a server, if it has one; the lock file goes with the block.

    Raises:
        SettingsError, StateError: see ``RunLock``.
    """
    if folder is None:
        yield
        return
    try:
        make_private_folder(folder)
    except OSError as error:
        if not folder.is_dir():  # else the lock says what is wrong with it
            raise _cannot_write(folder, error) from error
    lock = RunLock(folder)
    try:
        with contextlib.suppress(OSError):  # a full disk: the lock holds without them
            lock.write_info({"pid": os.getpid(), "command": SIMULATE, TAKES_ORDERS: False})
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows removes no open file
            (folder / FILE).unlink()
        lock.release()


def _opened(path: Path) -> int:
    try:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        return os.open(path, flags, OWNER_ONLY)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> StateError:
    return StateError(
        f"cannot write {path}: {error.strerror}",
        remedy=system_remedy(str(error)) or "choose another --out",
    )


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file still has its name; the process that held it may have removed it."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _locked_error(folder: Path) -> SettingsError:
    state = read_server_state(folder)
    drain = f"or end that server: headwater-server drain --out {in_shell(folder)}"
    stop = "wait for its end, or stop it with Ctrl-C: its committed rounds are kept"
    number = state.info.get("pid", "unknown")
    return SettingsError(
        f"another process writes here: a run goes on in {folder} (process {number})",
        remedy=f"choose another --out, {drain if state.takes_orders else stop}",
    )


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
