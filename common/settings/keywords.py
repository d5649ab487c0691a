"""Reads the settings from keyword arguments, for the functions of the Python API.

A keyword is a flag of the command with underscores: ``learning_rate=0.01`` is ``--learning-rate
0.01``. All other settings go by their dotted keys, as ``--set`` takes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headwater.common.settings.introspection import all_settings, branches
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load_run

PREFIX = "python:"
"""Begins the name of a Python object in the settings, as in ``python:MyTask``."""

GivenSettings = Mapping[str, Any] | str | Path | None
"""Settings by dotted keys or nested tables, or a TOML file of settings."""


class Objects:
    """The Python objects of one call, by the names that its settings give them."""

    def __init__(self) -> None:
        self.by_name: dict[str, object] = {}

    def name(self, value: Any) -> str | None:
        """Return a text as it is, and a unique name for any other object but None."""
        if value is None or isinstance(value, str | Path):
            return None if value is None else str(value)
        kind = value if hasattr(value, "__name__") else type(value)
        name = first = f"{PREFIX}{kind.__name__}"
        number = 1
        while self.by_name.get(name, value) is not value:
            number += 1
            name = f"{first}-{number}"
        self.by_name[name] = value
        return name


def keyword_keys(command: str) -> dict[str, str]:
    """Return the dotted key of each keyword of a command: simulate, server or client."""
    return {
        setting.flag.removeprefix("--").partition("/")[0].replace("-", "_"): setting.key
        for setting in all_settings().values()
        if command in setting.commands
    }


def settings_of(
    function: str,
    command: str,
    keywords: Mapping[str, Any],
    settings: GivenSettings,
    *,
    resume: bool = False,
) -> Settings:
    """Return the settings of a call of ``function``; keywords win over ``settings``.

    A keyword whose value is None counts as not given.

    Raises:
        SettingsError: as ``sources.load_run``.
    """
    keys = keyword_keys(command)
    is_file = isinstance(settings, str | Path)
    table = {} if settings is None or isinstance(settings, str | Path) else settings
    given = dict(_flat(table, ""))
    given |= {keys[name]: value for name, value in keywords.items() if value is not None}
    file = Path(str(settings)) if is_file else None
    return load_run(file, given, resume=resume, source=f"headwater.{function}()")


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; a table of arguments stays one value."""
    for key, value in table.items():
        if isinstance(value, Mapping) and prefix + key in branches():
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
