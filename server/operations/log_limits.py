"""Bounds the size of the logs of a run that does not end.

A run of ``--rounds forever`` writes a row a round for years. Its rows are in at most two files: a
full one is renamed and replaces the one before. Folders of event files lose their oldest files. A
run of a given number of rounds keeps all of its rows.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import BinaryIO, TextIO

log = logging.getLogger(__name__)

MAX_ROWS_BYTES = 32 * 2**20
"""The size from which a file of rows is renamed: some 8,000 rounds of ten devices."""
MAX_EVENT_BYTES = 16 * 2**20
"""The size from which a new event file is begun."""
MAX_FOLDER_BYTES = 64 * 2**20
"""The size of a folder of event files above which its oldest files are deleted."""


def older_file(path: Path) -> Path:
    """Return the file with the rows before those of ``path``: rounds.jsonl, rounds.older.jsonl."""
    return path.with_name(f"{path.stem}.older{path.suffix}")


def tables_beside(path: Path) -> Path:
    """Return the file with the tables of the rows in ``path``: of rounds.jsonl, rounds.tables."""
    return path.with_suffix(".tables")


class RowsFile:
    """Appends lines to a file; with ``is_bounded`` it is renamed before it exceeds a size.

    A row's table is in the file beside it, which is made for the first one and renamed with it.
    """

    def __init__(self, path: Path, *, is_bounded: bool, max_bytes: int = MAX_ROWS_BYTES) -> None:
        """Open the file.

        Raises:
            OSError: it cannot be written.
        """
        self._path = path
        self._max_bytes = max_bytes if is_bounded else None
        self._has_room = False
        """Whether a table was written, whose line follows."""
        self._file = self._open()
        self._tables: BinaryIO | None = None

    def _open(self) -> TextIO:
        return self._path.open("a", encoding="utf-8", newline="\n")

    def write_table(self, table: bytes) -> int:
        """Append a table to the file beside, and return where it is; its line must be next.

        Raises:
            OSError: the disk is full.
        """
        self._make_room(len(table))
        if self._tables is None:
            self._tables = tables_beside(self._path).open("ab")
        at = self._tables.tell()
        self._tables.write(table)
        self._tables.flush()
        self._has_room = True
        return at

    def write(self, line: str) -> None:
        """Append a line, and pass it on to the system.

        Raises:
            OSError: the disk is full.
        """
        if not self._has_room:
            self._make_room(len(line))
        self._has_room = False
        self._file.write(line + "\n")
        self._file.flush()

    def _make_room(self, num_bytes: int) -> None:
        """Rename the files if so many more bytes would exceed the size."""
        tables = tables_beside(self._path)
        size = self._file.tell() + (tables.stat().st_size if tables.exists() else 0)
        if self._max_bytes is None or not size or size + num_bytes < self._max_bytes:
            return
        self.close()
        older = older_file(self._path)
        if older.exists():
            log.warning("%s is full: the rows of %s are deleted", self._path, older.name)
        self._path.replace(older)
        tables_beside(older).unlink(missing_ok=True)
        if tables.exists():
            tables.replace(tables_beside(older))
        self._file = self._open()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._tables is not None:
            self._tables.close()
            self._tables = None


def delete_oldest(folder: Path, *, max_bytes: int = MAX_FOLDER_BYTES) -> list[str]:
    """Delete the oldest files of a folder until the rest has ``max_bytes``; return their names.

    The newest file stays, whatever its size.
    """
    files = sorted(
        ((path.stat(), path) for path in folder.iterdir() if path.is_file()),
        key=lambda one: (one[0].st_mtime_ns, one[1].name),
    )
    total, deleted = sum(stat.st_size for stat, _ in files), []
    for stat, path in files[:-1]:
        if total <= max_bytes:
            break
        path.unlink(missing_ok=True)
        total -= stat.st_size
        deleted.append(path.name)
    return deleted
