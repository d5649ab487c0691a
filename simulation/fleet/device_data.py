"""Finds the devices' own files and folders by a pattern, and names the devices after them."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from headwater.common.errors import MissingData, SettingsError
from headwater.common.wording import natural

MAX_NAME = 100  # characters; the wire allows 128, and a state file's name holds more than this one
MAX_SHOWN = 3


def find_device_data(data: str | Sequence[str], *, source: str, folder: Path) -> tuple[str, ...]:
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
    return folder / Path(data).expanduser()


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


def device_names(paths: Sequence[str]) -> tuple[str, ...]:
    """Return a name for each device: its file's name without the suffix, or its folder's name.

    If all files have the same name, as in ``devices/*/data.csv``, it is the name of the last folder
    in which they differ. Letters that a device's name cannot have become ``-``.

    Raises:
        SettingsError: two names are the same.
    """
    steps = [_steps(Path(path)) for path in paths]
    place = 1
    shortest = min(map(len, steps))
    while place < shortest and len({step[-place] for step in steps}) == 1 < len(steps):
        place += 1
    names = tuple(_valid(step[-place]) or f"device-{number}" for number, step in enumerate(steps))
    by_name: dict[str, str] = {}
    for name, path in zip(names, paths, strict=True):
        if name in by_name:
            raise SettingsError(
                f"{by_name[name]} and {path} would both be the data of a device named {name}",
                remedy="rename one of them, or use a pattern that matches one file or folder a "
                "device",
            )
        by_name[name] = path
    return names


def _steps(path: Path) -> tuple[str, ...]:
    return (*path.parts[:-1], path.name if path.is_dir() else path.stem)


def _valid(text: str) -> str:
    return re.sub(r"^[^A-Za-z0-9]+", "", re.sub(r"[^A-Za-z0-9._-]+", "-", text))[:MAX_NAME]
