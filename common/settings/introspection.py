"""Lists every setting with its flag, range and default, as read from the pydantic tree.

``python -m headwater.common.settings.introspection`` prints docs/settings.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from headwater.common.settings.fields import KEYS, LABELS, PAIRS, PATTERNS, PLACES, Branch, Unit
from headwater.common.settings.schema import Settings

# A larger limit only keeps a number within its integer type: not shown.
MAX_SHOWN = 2**31 - 2
LIMITS = {"ge": "at least", "gt": "above", "lt": "below", "le": "at most"}
TYPES = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
MEASURES = {"SECONDS": " of seconds", "BYTES": " of bytes (or as in 4GB)"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueType:
    """The values that a setting may have: types other than None, words of a ``Literal``, limits."""

    types: list[type] = field(default_factory=list)
    choices: list[str | int] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)
    units: list[str] = field(default_factory=list)

    def add(self, annotation: Any, metadata: tuple[Any, ...] = ()) -> None:
        """Add what an annotation and its pydantic metadata allow."""
        for mark in metadata:
            if isinstance(mark, FieldInfo):
                self.add(NoneType, tuple(mark.metadata))
            elif isinstance(mark, Unit):
                self.units.append(mark.name)
            else:
                self.limits.update(
                    {key: getattr(mark, key) for key in LIMITS if hasattr(mark, key)}
                )
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            self.add(arguments[0], arguments[1:])
        elif origin in (Union, UnionType):
            for argument in arguments:
                self.add(argument)
        elif origin is Literal:
            self.choices.extend(arguments)
        elif annotation is not NoneType:
            self.types.append(origin or annotation)

    @property
    def is_repeated(self) -> bool:
        """Whether the flag may be given several times."""
        return self.types == [dict] or not {PATTERNS, PAIRS, PLACES, KEYS, LABELS}.isdisjoint(
            self.units
        )

    @property
    def limits_text(self) -> str:
        """The limits, as in ``above 0, at most 1``; empty without any."""
        return ", ".join(
            f"{word} {self.limits[key]:,.10g}"
            for key, word in LIMITS.items()
            if key in self.limits and self.limits[key] <= MAX_SHOWN
        )

    @property
    def expected(self) -> str:
        """A phrase for an error message, as in ``a number of seconds, above 0``."""
        if not self.types:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.types == [dict]:
            return "a number, true, false, text or a list of numbers"
        words = TYPES.get(self.types[0], "text") + MEASURES.get(self.metavar, "")
        limited = f"{words}, {self.limits_text}" if self.limits_text else words
        return " or ".join([limited, *map(str, self.choices)])

    @property
    def metavar(self) -> str:
        """The word for the value in --help."""
        if not self.types:
            return "|".join(map(str, self.choices))
        types = {int: "N", float: "X", Path: "PATH", dict: "KEY=VALUE"}
        return self.units[0] if self.units else types.get(self.types[0], "TEXT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting: its dotted key, its flag, and the commands that have the flag (maybe none)."""

    key: str
    flag: str
    alias: str
    commands: frozenset[str]
    panel: str
    is_short: bool
    bare: str | None
    default: Any
    meaning: str
    value: ValueType

    @property
    def name(self) -> str:
        """The key and, if it has one, the flag, as in ``rounds (--rounds)``."""
        return f"{self.key} ({self.flag.partition('/')[0]})" if self.commands else self.key


@cache
def all_settings() -> dict[str, Setting]:
    """Return every setting by its dotted key, in the order of the tree."""
    return {found.key: found for found in _walk(Settings, "", {})}


@cache
def branches() -> dict[str, type[Branch]]:
    """Return the branches of the tree by their key."""
    return {
        key: info.annotation
        for key, info in Settings.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, Branch)
    }


def _walk(branch: type[Branch], prefix: str, inherited: dict[str, Any]) -> Iterator[Setting]:
    for key, info in branch.model_fields.items():
        extra = info.json_schema_extra
        assert isinstance(extra, dict), f"{prefix}{key} is not declared by setting()"
        own = inherited | {name: value for name, value in extra.items() if value is not None}
        if not prefix and key in branches():
            yield from _walk(branches()[key], f"{key}.", own)
            continue
        value = ValueType()
        value.add(info.annotation, tuple(info.metadata))
        words = key.replace("_", "-")
        yield Setting(
            key=prefix + key,
            flag=own.get("flag")
            or f"--{words}" + (f"/--no-{words}" if bool in value.types else ""),
            alias=own["alias"],
            commands=frozenset(own["on"].split()),
            panel=own["panel"],
            is_short=own["short"],
            bare=own.get("bare"),
            default=info.get_default(),
            meaning=info.description or "",
            value=value,
        )


def to_markdown() -> str:
    """Return docs/settings.md: every setting with its flag, values, default and meaning."""
    lines = [
        "# Settings",
        "",
        "One TOML file serves all three commands (`--config FILE`); a flag overrides it, and",
        "`--set KEY=VALUE` sets any of these. A run leaves its own in `settings.toml`, to be",
        "repeated from. `make docs` writes this page.",
    ]
    heading = None
    for setting in all_settings().values():
        section, _, key = setting.key.rpartition(".")
        if section != heading:
            heading = section
            lines += ["", f"## [{section}]" if section else "## Top level", ""]
            lines += ["| key | flag | values | default | meaning |", "| --- " * 5 + "|"]
        flag = " ".join(f"`{name}`" for name in (setting.flag, setting.alias) if name)
        flag = flag if setting.commands else ""
        default = "not set" if setting.default is None else f"`{json.dumps(setting.default)}`"
        lines.append(
            f"| `{key}` | {flag} | {setting.value.expected} | {default} | {setting.meaning} |"
        )
    return "\n".join(lines) + "\n"


def keyword_of(flag: str) -> str:
    """Return the keyword of a flag: ``learning_rate`` of ``--learning-rate``."""
    return flag.removeprefix("--").partition("/")[0].replace("-", "_")


if __name__ == "__main__":
    print(to_markdown(), end="")
