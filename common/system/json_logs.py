"""The log as one JSON object a line, for machines that collect logs.

Each object has ``time`` (RFC 3339, in UTC), ``level``, ``logger`` and ``message``; what a record
was given as ``extra={"fields": {...}}`` comes behind, and ``traceback`` where there is one. Nothing
else of a record is written: no arguments, no locals, no environment.
"""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

Format = Literal["text", "json"]

FIELDS = "fields"
OWN = ("time", "level", "logger", "message")


class JsonFormatter(logging.Formatter):
    """Turns a record into one line of JSON; a line break in it is escaped."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, FIELDS, {})
        told |= {name: plain(value) for name, value in fields.items() if name not in OWN}
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, allow_nan=False, default=str)


def rfc3339(seconds: float) -> str:
    """Write seconds since 1970 as UTC, to the millisecond: 2026-11-21T20:45:18.123Z."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def plain(value: Any) -> Any:
    """Put null for what JSON has no number for, and a list for a tuple."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class LineSink(io.TextIOBase):
    """A text stream that hands each whole line on, without the blanks at its end.

    The console prints into it where all output is to be JSON.
    """

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                self._take(line.rstrip())
        return len(text)
