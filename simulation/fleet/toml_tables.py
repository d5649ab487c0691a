"""Files of TOML tables that describe a simulation: read once, and every mistake named.

A message names the file, the table by its number from 1, as one counts them, and the key.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from headwater.common.errors import SettingsError

REMEDY = "see docs/fleet.md for the file's keys and their ranges"

Tables = TypeVar("Tables", bound=BaseModel)


def read_tables(path: Path, kind: type[Tables], *, what: str) -> Tables:
    """Read a file into ``kind``; ``what`` is what an error calls it.

    Raises:
        SettingsError: the file is not there, is not TOML, or has a wrong, missing or unknown key.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"cannot read the {what} {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not a TOML file: {error}") from error
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        is_clear = first["type"] == "missing" or isinstance(first["input"], dict)
        given = "" if is_clear else f" (found {first['input']!r:.200})"
        said = first["msg"].lower().removeprefix("value error, ")
        raise wrong(path, f"{_place(first['loc'])}: {said}{given}") from error


def wrong(path: Path, what: str) -> SettingsError:
    """Return the error that says what is wrong with a file."""
    return SettingsError(f"{path}: {what}", remedy=REMEDY)


def _place(loc: tuple[int | str, ...]) -> str:
    if len(loc) < 2:
        return ".".join(map(str, loc))
    table, at, *keys = loc
    number = at + 1 if isinstance(at, int) else at
    return ": ".join([f"{table} number {number}", *map(str, keys)])
