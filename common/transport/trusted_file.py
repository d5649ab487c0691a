"""Reads the files on which a promise rests: keys, certificates, an allow-list, a state folder.

Whoever can change an allow-list decides whom a device masks with. So such a file belongs to this
user or to root, no other user may write it, and a key no other user may read (root's may be read by
its group, as mounted secrets are). Only regular files are read: a FIFO would wait for its writer. A
link counts if it is this user's or root's, and so does what it leads to. Windows has no such
owners and modes, and nothing is checked there.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path


class UntrustedFile(OSError):
    """Another user may read or change a file; ``strerror`` says who, and what to do."""

    def __init__(self, path: Path, why: str, remedy: str) -> None:
        super().__init__(0, f"{why}; {remedy}", str(path))


def read_trusted(path: Path, *, is_secret: bool = False) -> bytes:
    """Return the bytes of a file.

    Raises:
        UntrustedFile: it is no regular file, or other users have rights that the module names.
        OSError: it cannot be read.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UntrustedFile(path, "it is no regular file", "name the file itself")
        _check(path, found, is_secret=is_secret)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def check_folder(folder: Path) -> None:
    """Check a folder in which others must change nothing; one that does not exist is none.

    Raises:
        UntrustedFile: see ``read_trusted``.
        OSError: it cannot be looked at.
    """
    if folder.exists():
        _check(folder, folder.stat(), is_secret=False)


def _check(path: Path, found: os.stat_result, *, is_secret: bool) -> None:
    if sys.platform == "win32" or not hasattr(os, "geteuid"):
        return
    trusted, mode = (0, os.geteuid()), stat.S_IMODE(found.st_mode)
    for one in (path.lstat(), found):
        if one.st_uid not in trusted:
            raise UntrustedFile(
                path, f"it belongs to user {one.st_uid}", f"chown it to user {trusted[1]}"
            )
    hidden = 0o007 if found.st_uid == 0 != trusted[1] else 0o077
    if mode & 0o022:
        raise UntrustedFile(path, f"others may change it ({mode:03o})", f"chmod go-w {path}")
    if is_secret and mode & hidden:
        raise UntrustedFile(path, f"others may read it ({mode:03o})", f"chmod 600 {path}")
