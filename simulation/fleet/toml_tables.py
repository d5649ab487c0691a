"""Reads TOML files that describe a simulation, and names every mistake in them.

A message names the file, the table by its number from 1, and the key.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from headwater.common.errors import SettingsError
from headwater.common.parsed_text import toml_of

REMEDY = "see docs/fleet.md for the file's keys and their ranges"

Tables = TypeVar("Tables", bound=BaseModel)


def read_tables(path: Path, kind: type[Tables], *, name: str) -> Tables:
    """Read a file as a ``kind``; errors call the file ``name``.

    Raises:
        SettingsError: the file does not exist, is not TOML, or has a wrong, missing or unknown key.
    """
    try:
        tree = toml_of(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the {name} {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not a TOML file: {error}") from error
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        is_clear = first["type"] == "missing" or isinstance(first["input"], dict)
        value = "" if is_clear else f" (found {first['input']!r:.200})"
        message = first["msg"].lower().removeprefix("value error, ")
        raise file_error(path, f"{_place(first['loc'])}: {message}{value}") from error


def file_error(path: Path, message: str) -> SettingsError:
    """Return the error for a mistake in a file."""
    return SettingsError(f"{path}: {message}", remedy=REMEDY)


def _place(loc: tuple[int | str, ...]) -> str:
    """Return the place of a mistake, like ``device number 2: jitter``."""
    if len(loc) < 2:
        return ".".join(map(str, loc))
    table, index, *keys = loc
    number = index + 1 if isinstance(index, int) else index
    return ": ".join([f"{table} number {number}", *map(str, keys)])
