"""Reads the settings from keyword arguments, for the functions of the Python API.

Every flag of the command is a keyword, with underscores: ``learning_rate=0.01`` is
``--learning-rate 0.01``. The functions name the most used ones in their signatures, for editors and
type checkers, and take the others as ``**flags``. Settings without a flag go by their dotted keys.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from headwater.common.settings.introspection import all_settings, branches, keyword_of
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load_run
from headwater.common.user_code.run_scope import PREFIX

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

OBJECTS = ("task", "optimizer", "client_algorithm", "feature")
"""The keywords that may be Python objects instead of texts."""
COMMANDS = {
    "simulate": "simulate",
    "compare": "simulate",
    "serve": "server",
    "take_part": "client",
}
"""The command of each function."""
FLAGS = "flags"
NO_SETTINGS = ("settings", "observer", "resume", "progress", FLAGS)
"""The arguments that are no settings."""

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

    def names(self, value: Any) -> str | None:
        """Return the name of a text or an object; of a list of them all, joined by commas."""
        if isinstance(value, list | tuple):
            return ",".join(self.name(one) or "" for one in value)
        return self.name(value)


def api_function(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a function of the Python API name what was meant by an unknown keyword.

    Raises:
        TypeError: there is no such keyword, as Python would raise it.
    """
    name, named = function.__name__, inspect.signature(function).parameters.keys() - {FLAGS}

    @functools.wraps(function)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not kwargs.keys() <= named:
            names = [*named, *(keyword_keys(COMMANDS[name]).keys() - named)]
            for word in kwargs:
                if word not in names:
                    from headwater.common.settings.suggestions import keyword_hint

                    hint = keyword_hint(word, names, COMMANDS[name])
                    raise TypeError(f"headwater.{name}() has no keyword {word}{hint}")
        if len(args) > 1:
            like = "model=net, examples=data_set, loss=..." if "model" in named else "rounds=50"
            raise TypeError(
                f"headwater.{name}() takes one argument without a name, the task: write the others "
                f"by name, as in {like}"
            )
        return function(*args, **kwargs)

    return checked


class Call:
    """A call of a function of the Python API: its settings, and the Python objects among them."""

    def __init__(self, function: str, arguments: Mapping[str, Any]) -> None:
        """``arguments`` are all of the function's, by name; one that was not given is None.

        ``flags`` among them are the keywords that the function's signature does not name.
        """
        arguments = {**arguments, **arguments[FLAGS]}
        objects, keys = Objects(), keyword_keys(COMMANDS[function])
        self._source = f"headwater.{function}()"
        self._resume = bool(arguments.get("resume", False))
        self._settings: GivenSettings = arguments["settings"]
        self._keywords = {
            keys[name]: objects.names(value) if name in OBJECTS else _text(value)
            for name, value in arguments.items()
            if name not in NO_SETTINGS and value is not None
        }
        self.objects = objects.by_name

    @property
    def file(self) -> Path | None:
        """The file of settings, if there is one."""
        others = self._settings
        return Path(others) if isinstance(others, str | Path) else None

    @property
    def given(self) -> dict[str, Any]:
        """What is given by dotted keys; keywords win over the argument ``settings``."""
        others = self._settings
        table = {} if others is None or isinstance(others, str | Path) else others
        return dict(_flat(table, "")) | self._keywords

    def settings(self) -> Settings:
        """Return the settings; what is given wins over a file's.

        Raises:
            SettingsError: as ``sources.load_run``.
        """
        return load_run(self.file, self.given, resume=self._resume, source=self._source)


def keyword_keys(command: str) -> dict[str, str]:
    """Return the dotted key of each keyword of a command: simulate, server or client."""
    return {
        keyword_of(setting.flag): setting.key
        for setting in all_settings().values()
        if command in setting.commands
    }


def _text(value: Any) -> Any:
    """Return a path as text, as a settings file has it; other values as they are."""
    if isinstance(value, list):
        return [_text(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; a table of arguments stays one value."""
    for key, value in table.items():
        if isinstance(value, Mapping) and prefix + key in branches():
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, _text(value)
