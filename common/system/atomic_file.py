"""Writes files atomically: whatever fails, a file has all of its old or all of its new content.

And says of one that somebody sent whether it is a file at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

OWNER_ONLY = 0o600
READABLE = 0o644
PRIVATE = 0o700  # of a folder
OTHERS = 0o077  # the mode bits of all but the owner
NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)  # Windows has neither this nor owners' mode bits


def regular(path: Path) -> Path:
    """Return the path of a file that ends: a FIFO would wait for its writer, a device has no end.

    Raises:
        OSError: it is one of these, or there is no file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path


def keep_private() -> int:
    """Let only this user read what the process makes from now on; return the umask before."""
    before = os.umask(OTHERS)
    os.umask(before | OTHERS)
    return before


@contextlib.contextmanager
def atomic_writer(
    path: Path, *, mode: int | None = None, is_durable: bool = True
) -> Iterator[Path]:
    """Yield an empty file next to ``path``; after the block, sync it to disk and rename it.

    It is not synced if not ``is_durable``: a kill leaves a whole file, a power cut may not.

    The file has ``mode`` from its first byte, or what the process's umask leaves. After the block,
    the new content is on disk under its name. If anything is raised, ``path`` is unchanged and the
    new file is removed; a kill leaves ``NAME.part``, which the next write replaces. A file must
    have one writer at a time.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW
    descriptor = os.open(part, flags, 0o666 if mode is None else mode)
    try:
        try:
            if mode is not None and hasattr(os, "fchmod"):
                os.fchmod(descriptor, mode)  # independent of the umask
        finally:
            os.close(descriptor)
        yield part
        if is_durable:
            _sync(part, os.O_RDWR)  # Windows syncs only what may be written
        part.replace(path)
        if is_durable and os.name == "posix":  # Windows opens no folder
            _sync(path.parent, os.O_RDONLY)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def write_atomically(
    path: Path, content: bytes, *, mode: int | None = None, is_durable: bool = True
) -> None:
    """Write ``content`` by ``atomic_writer``.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    with atomic_writer(path, mode=mode, is_durable=is_durable) as part:
        part.write_bytes(content)


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its owner may enter, whatever the umask; one that exists is kept.

    Raises:
        OSError: it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=PRIVATE)
        folder.chmod(PRIVATE)  # the umask may have taken away the owner's own rights
        return
    folder.mkdir(exist_ok=True)  # raises if a file has the name


def _sync(path: Path, flags: int) -> None:
    """Sync a file's content, or a folder's names, to disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
