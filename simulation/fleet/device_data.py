"""Names simulated devices after their own files and folders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from headwater.common.errors import SettingsError

MAX_NAME = 100  # characters; the wire allows 128, and a state file's name holds more than this one


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
