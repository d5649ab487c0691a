"""Takes away what Windows lacks, in each process that has this folder in its PYTHONPATH.

Python runs it before anything else. The standard library's own POSIX code is loaded first, because
it stays in use; our code finds no module, function or file that only POSIX has. ``msvcrt`` is the
one thing that is added: locks, by Windows' function.
"""

from __future__ import annotations

import asyncio
import builtins
import io
import multiprocessing.connection
import multiprocessing.popen_spawn_posix
import multiprocessing.resource_tracker
import os
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from typing import Any

import fcntl  # isort: skip
import psutil

LOADED = (
    psutil,
    multiprocessing.popen_spawn_posix,
    multiprocessing.resource_tracker,
    subprocess,
    tempfile,
)
MODULES = ("fcntl", "resource", "pwd", "grp", "termios")
OS_NAMES = (
    *("O_NOFOLLOW", "O_CLOEXEC", "fork", "forkpty", "fchmod", "pread", "pwrite", "geteuid"),
    *("killpg", "setpgrp", "memfd_create", "sched_getaffinity", "set_blocking", "posix_fallocate"),
)
SIGNAL_NAMES = ("SIGUSR1", "SIGUSR2", "SIGHUP")
LINUX_FOLDERS = ("/proc", "/sys", "/dev/shm")
FRAMES = 5  # between our code and ``open``: pathlib's


def lock(descriptor: int, mode: int, num_bytes: int) -> None:
    """Lock an open file, as ``msvcrt.locking`` with LK_NBLCK."""
    assert (mode, num_bytes) == (2, 1)
    real_flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def caller(depth: int) -> str:
    return str(sys._getframe(depth).f_globals.get("__name__", ""))


def is_ours(depth: int = 2) -> bool:
    """Return whether code of ours calls, and not psutil for us."""
    names = []
    frame = sys._getframe(depth)
    for _ in range(FRAMES):
        names.append(frame.f_globals.get("__name__", ""))
        if frame.f_back is None:
            break
        frame = frame.f_back
    return any(n.startswith("headwater") for n in names) and not any("psutil" in n for n in names)


def hidden(path: Any) -> bool:
    return str(path).startswith(LINUX_FOLDERS) and is_ours(3)


def open_file(file: Any, *arguments: Any, **named: Any) -> Any:
    if hidden(file):
        raise FileNotFoundError(2, "No such file or directory", str(file))
    mode = arguments[0] if arguments else named.get("mode", "r")
    has_encoding = "b" in mode or named.get("encoding") is not None
    assert has_encoding or not caller(2).startswith("headwater."), f"{file}: no encoding is named"
    return real_open(file, *arguments, **named)


def open_descriptor(path: Any, *arguments: Any, **named: Any) -> int:
    if hidden(path):
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return real_os_open(path, *arguments, **named)


def no_signal_handler(*_: object) -> None:
    raise NotImplementedError


real_flock, real_open, real_os_open = fcntl.flock, io.open, os.open
windows_locks: Any = types.ModuleType("msvcrt")
windows_locks.LK_NBLCK, windows_locks.locking = 2, lock
sys.modules["msvcrt"] = windows_locks
for name in MODULES:
    sys.modules[name] = None  # type: ignore[assignment] # so an import of it raises ImportError
for owner, names in ((os, OS_NAMES), (signal, SIGNAL_NAMES)):
    for name in names:
        if hasattr(owner, name):
            delattr(owner, name)
setattr(asyncio.SelectorEventLoop, "add_signal_handler", no_signal_handler)  # noqa: B010 - mypy
builtins.open = io.open = open_file
os.open = open_descriptor
# Windows' default is another encoding than UTF-8: where none is named, text changes on its way.
warnings.filterwarnings("error", category=EncodingWarning, module=r"headwater\.")
