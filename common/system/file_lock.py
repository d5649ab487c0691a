"""Locks on open files, which the system releases however the process ends.

``flock`` locks the open file on Linux and macOS. On Windows ``msvcrt.locking`` locks one byte,
which other processes can then neither read nor write; it lies far behind a file's content.
"""

from __future__ import annotations

import os

from headwater.common.system.portability import optional_module

fcntl, msvcrt = optional_module("fcntl"), optional_module("msvcrt")

LOCKED_BYTE = 1 << 30


def try_lock(descriptor: int, *, is_shared: bool = False) -> bool:
    """Lock an open file; return False if another descriptor has locked it.

    Shared locks exclude only exclusive ones; Windows has none, and there they are exclusive.
    Closing the descriptor, or the end of the process, releases the lock.
    """
    if fcntl is not None:
        kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
    os.lseek(descriptor, LOCKED_BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except OSError:
        return False
    return True
