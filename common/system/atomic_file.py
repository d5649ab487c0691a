"""A file that is at every moment all of the old content or all of the new, whatever fails."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

OWNER_ONLY = 0o600
READABLE = 0o644


@contextlib.contextmanager
def whole_file(path: Path, *, mode: int | None = None) -> Iterator[Path]:
    """Yield an empty file beside ``path``; once it is written, force it to disk and rename it.

    It has ``mode`` from the first byte on, or what the process's umask leaves. When this returns,
    the new content is on the disk under its name. If anything is raised meanwhile, ``path`` is as
    it was, and nothing lies beside it; a kill leaves ``NAME.part``, which the next write replaces.
    There may be one writer of a file at a time.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(part, flags, 0o666 if mode is None else mode)
    try:
        try:
            if mode is not None:
                os.fchmod(descriptor, mode)  # whatever the umask
        finally:
            os.close(descriptor)
        yield part
        _force(part)
        part.replace(path)
        _force(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: bytes, *, mode: int | None = None) -> None:
    """Put ``content`` in place by ``whole_file``.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    with whole_file(path, mode=mode) as part:
        part.write_bytes(content)


def _force(path: Path) -> None:
    """Have the disk hold what was written to a file, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
