"""A shared folder as the store of a run's state: on one machine, or on a network's file system.

A small file NAME is kept as NAME.00000001, NAME.00000002, ...: the highest number is its content.
Replacing it means to link a complete file to the next number, which fails if that exists (link(2)
is atomic on local disks and over NFS). So two writers never both succeed, and no lock is held that
a stopped process could keep. The first and the last ``NUM_KEPT`` numbers stay, and of the others
the lowest are removed first. So a writer that was stopped for long, and links to a number that was
removed meanwhile, finds that the number before it is gone.

Others may write in the folder, as they can on many file servers. So what is read is a regular file
of a size that it may have, by its own descriptor and never through a link.

Nothing follows from what a network's file system may tell from a cache (names, attributes): whether
a number is there is found out by linking, which the file system's server does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from headwater.common.system.atomic_file import NO_FOLLOW, OWNER_ONLY, make_private_folder

NUM_KEPT = 8
NUM_READS, READ_SECONDS = 50, 0.02  # a list of names may be old for longer: the caller asks again
DIGITS = 12
NUMBER = re.compile(rf"[0-9]{{{DIGITS}}}")
MAX_SMALL_BYTES = 4 << 20
_BINARY: int = getattr(os, "O_BINARY", 0)
NEW = ".new-"
FILES = "files"


class SharedFolder:
    """A store in a folder that all servers of the run reach; only its owner may read it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Return the content and number of a small file; None if there is none."""
        for _ in range(NUM_READS):
            numbers = self._numbers(name)
            if not numbers:
                return None
            # Otherwise it was removed since it was listed, and there are higher ones.
            with contextlib.suppress(FileNotFoundError), _stale_is_missing():
                with _opened(self._path(name, numbers[-1])) as file:
                    content = file.read(MAX_SMALL_BYTES + 1)
                if len(content) > MAX_SMALL_BYTES:
                    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), file.name)
                return content, str(numbers[-1])
            time.sleep(READ_SECONDS)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self._folder))

    def write_if_unchanged(self, name: str, content: bytes, version: str | None) -> str | None:
        """Link the content to the next number; None if that, or a higher one, exists or did."""
        number = int(version or 0) + 1
        make_private_folder(self._folder)
        new = self._folder / f"{NEW}{secrets.token_hex(8)}"
        try:
            _write(new, content)
            try:
                os.link(new, self._path(name, number))
            except FileExistsError:
                return None
        finally:
            new.unlink(missing_ok=True)
        if number > 1 and not self._is_there(self._path(name, number - 1)):
            self._path(name, number).unlink(missing_ok=True)
            return None
        numbers = self._numbers(name)
        if numbers[-1] > number:
            return None
        for old in numbers[1:-NUM_KEPT]:
            self._path(name, old).unlink(missing_ok=True)
        return str(number)

    def upload(self, name: str, file: Path) -> None:
        """Copy a file, and force it to disk before it has its name."""
        make_private_folder(self._folder)
        make_private_folder(self._folder / FILES)
        self._check_files()
        new = self._folder / f"{NEW}{secrets.token_hex(8)}"
        try:
            with file.open("rb") as source, open(_create(new), "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
                copy.flush()
                os.fsync(copy.fileno())
            new.replace(self._folder / FILES / name)
        finally:
            new.unlink(missing_ok=True)

    def download(self, name: str, file: Path) -> None:
        """Copy a stored file to a path."""
        self._check_files()
        stored = self._folder / FILES / name
        with _stale_is_missing(), _opened(stored) as source, file.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)

    def stored(self) -> list[str]:
        """Return the names of the stored files."""
        folder = self._folder / FILES
        if not folder.exists():
            return []
        self._check_files()
        return sorted(os.listdir(folder))

    def remove(self, name: str) -> None:
        """Remove a stored file."""
        self._check_files()
        (self._folder / FILES / name).unlink(missing_ok=True)

    def _check_files(self) -> None:
        """Check that the stored files are in this folder, and not where a link leads.

        Raises:
            OSError: the folder is a link.
        """
        folder = self._folder / FILES
        if folder.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))

    def _path(self, name: str, number: int) -> Path:
        return self._folder / f"{name}.{number:0{DIGITS}}"

    def _is_there(self, path: Path) -> bool:
        """Return whether a file exists, by linking it: a cache may still have one that is gone."""
        link = self._folder / f"{NEW}{secrets.token_hex(8)}"
        try:
            with _stale_is_missing():
                os.link(path, link)
        except FileNotFoundError:
            return False
        link.unlink(missing_ok=True)
        return True

    def _numbers(self, name: str) -> list[int]:
        """Return the numbers of a small file, the lowest first."""
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        parts = (one.rpartition(".") for one in names)
        own = (end for start, _, end in parts if start == name)
        return sorted(int(end) for end in own if NUMBER.fullmatch(end))


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read.

    Raises:
        OSError: it is a link, or a FIFO or device, which might never end.
    """
    descriptor = os.open(path, os.O_RDONLY | NO_FOLLOW | getattr(os, "O_NONBLOCK", 0) | _BINARY)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        yield file


def _create(path: Path) -> int:
    """Create a file that only its owner reads, and return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)


def _write(path: Path, content: bytes) -> None:
    with open(_create(path), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _stale_is_missing() -> Iterator[None]:
    """Say of a file that another server has removed meanwhile, as NFS says it, that it is gone.

    Raises:
        FileNotFoundError: it is.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error
        raise
