"""Formats log records as one JSON object per line, for log collectors.

Each object has ``time`` (RFC 3339, in UTC), ``level``, ``logger`` and ``message``, then the fields
that a record got as ``extra={"fields": {...}}``, and ``traceback`` if there is one. Nothing else of
a record is written: no arguments, no locals, no environment.
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
    """Formats a record as one line of JSON; line breaks in it are escaped."""

    is_json = True

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, FIELDS, {})
        entry |= {name: to_json_value(value) for name, value in fields.items() if name not in OWN}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        line = json.dumps(entry, ensure_ascii=False, allow_nan=False, default=str)
        # JSON leaves some control characters as they are: those of C1, and bidirectional overrides.
        return "".join(sign if sign.isprintable() else json.dumps(sign)[1:-1] for sign in line)


def rfc3339(seconds: float) -> str:
    """Return seconds since 1970 as UTC, to the millisecond: 2026-11-21T20:45:18.123Z."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def to_json_value(value: Any) -> Any:
    """Return the value with None for NaN and infinity, and lists for tuples."""
    if isinstance(value, dict):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class LineStream(io.TextIOBase):
    """A text stream that passes each complete line to a function, without trailing blanks.

    The console prints into it if all output must be JSON.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                self._emit(line.rstrip())
        return len(text)
