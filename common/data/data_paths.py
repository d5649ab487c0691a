"""Finds the files and folders that a pattern or a list names."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from headwater.common.errors import MissingData
from headwater.common.user_code.bundled_examples import expanded
from headwater.common.wording import natural

MAX_SHOWN = 3


def find_data(data: str | Sequence[str], *, source: str, folder: Path) -> tuple[str, ...]:
    """Return the paths that a pattern or a list of paths names, so that 2 comes before 10.

    A relative path starts in ``folder``; ``source`` is the flag or key that errors name. A path
    that exists is taken as it is, even if it contains ``*``, ``?`` or ``[``. As in a shell, ``*``
    matches no hidden file, and ``**`` any depth of folders.

    Raises:
        MissingData: a path does not exist, or nothing matches.
    """
    if not isinstance(data, str):
        missing = [one for one in data if not _path(one, folder).exists()]
        if missing or not data:
            text = f"{missing[0]} does not exist" if missing else "the list is empty"
            raise MissingData(
                f"{source}: {text}",
                remedy="correct the list of files and folders; a relative path starts in "
                f"{folder.resolve()}",
            )
        return tuple(str(_path(one, folder)) for one in data)
    path = _path(data, folder)
    if path.exists():
        return (str(path),)
    found = [Path(match) for match in glob.glob(str(path), recursive=True)]
    if data.endswith("/"):  # as in a shell
        found = [path for path in found if path.is_dir()]
    if not found:
        raise _nothing_found(data, path, source)
    return tuple(map(str, sorted(found, key=lambda path: natural(str(path)))))


def _path(data: str, folder: Path) -> Path:
    return folder / expanded(data)


def _nothing_found(data: str, path: Path, source: str) -> MissingData:
    """Return the error for a pattern without a match; it shows what is there instead."""
    above = path.parent
    while glob.has_magic(str(above)) or not above.is_dir():
        above = above.parent
    names = (below.name for below in above.iterdir())
    there = sorted(name for name in names if not name.startswith("."))
    shown = ", ".join(there[:MAX_SHOWN]) + (", ..." if len(there) > MAX_SHOWN else "")
    text = f"nothing matches {data}" if glob.has_magic(data) else f"{data} does not exist"
    return MissingData(
        f"{source}: {text}; {above.resolve()} has {shown or 'no files'}",
        remedy="name a file or folder, or in quotes a pattern with one match a device, as in "
        "'devices/*.csv'",
    )
