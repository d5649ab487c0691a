"""Reads JSON and TOML of any origin, and durations; what nests too deeply is a wrong text."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from headwater.common.errors import SettingsError, StateError

MAX_DEPTH = 100
MAX_SECONDS = 10 * 365 * 86_400.0
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"
# A key of 20,000 parts in 40 kB takes tomllib eight seconds: its time grows with their square.
DEEP_KEY = re.compile(
    rf"""^[ \t\[]*(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{MAX_DEPTH}}}""", re.MULTILINE
)


def json_of(text: str | bytes) -> Any:
    """Return what a JSON text holds.

    Raises:
        ValueError: it is no JSON, has a number of thousands of digits, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def result_in(file: Path, *, absent: StateError) -> dict[str, Any]:
    """Return the result that a run has written into a file of JSON.

    Raises:
        StateError: it cannot be read; or ``absent``, if there is no such file.
    """
    try:
        found: dict[str, Any] = json_of(file.read_bytes())
    except FileNotFoundError:
        raise absent from None
    except (OSError, ValueError) as error:
        raise StateError(f"{file} cannot be read: {error}") from error
    return found


def toml_of(text: str) -> dict[str, Any]:
    """Return the tree of a TOML text.

    Raises:
        TOMLDecodeError: as ``json_of``.
    """
    if DEEP_KEY.search(text):
        raise tomllib.TOMLDecodeError(TOO_DEEP)
    try:
        tree = tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError(TOO_DEEP) from None
    except ValueError as error:  # of a number; a TOMLDecodeError is one too
        raise tomllib.TOMLDecodeError(str(error)) from None
    level: list[Any] = [tree]
    for _ in range(MAX_DEPTH):
        level = [
            part
            for one in level
            for part in (one.values() if isinstance(one, dict) else one)
            if isinstance(part, dict | list)
        ]
        if not level:
            return tree
    raise tomllib.TOMLDecodeError(TOO_DEEP)


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as 90s, 30m, 12h or 90d.

    Raises:
        SettingsError: it is malformed, or longer than ten years.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    seconds = float(match[1]) * SECONDS[match[2]] if match else 0.0
    if not 0 < seconds <= MAX_SECONDS:
        raise SettingsError(
            f"expected a duration, found {text[:40]!r}", remedy="write 90s, 30m, 12h or 90d"
        )
    return seconds
