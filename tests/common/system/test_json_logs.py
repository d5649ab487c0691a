"""JSON logs: one object per line, whatever its content."""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from headwater.common.system.json_logs import FIELDS, JsonFormatter, LineStream, rfc3339
from tests.processes import Processes


def formatted(message: str, *args: object, **more: Any) -> dict[str, Any]:
    record = logging.makeLogRecord(
        {
            "name": "headwater.server.transport.servicer",
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": message,
            "args": args,
            "created": 0.0625,
            **more,
        }
    )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_record_is_one_object_with_time_level_logger_and_message() -> None:
    assert formatted("%s of %d", "one", 2) == {
        "time": "1970-01-01T00:00:00.062Z",
        "level": "warning",
        "logger": "headwater.server.transport.servicer",
        "message": "one of 2",
    }


def test_a_line_break_in_a_message_does_not_begin_a_new_record() -> None:
    forged = 'x\n{"level": "info", "message": "all is well"}'
    assert formatted("%s", forged)["message"] == forged


def test_fields_are_added_and_cannot_replace_the_message() -> None:
    fields = {"round": 3, "loss": math.nan, "names": ("a", "b"), "message": "another"}
    found = formatted("round", **{FIELDS: fields})
    assert found["message"] == "round"
    assert (found["round"], found["loss"], found["names"]) == (3, None, ["a", "b"])


def test_a_traceback_is_a_field() -> None:
    try:
        raise ValueError("wrong")
    except ValueError:
        found = formatted("it failed", exc_info=sys.exc_info())
    assert found["traceback"].endswith("ValueError: wrong")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "1970-01-01T00:00:00.000Z"), (951_782_400.5, "2000-02-29T00:00:00.500Z")],
)
def test_times_are_utc_to_the_millisecond(seconds: float, text: str) -> None:
    assert rfc3339(seconds) == text


def test_a_line_stream_passes_on_complete_lines_that_are_not_blank() -> None:
    lines: list[str] = []
    sink = LineStream(lines.append)
    for text in ("one", " line  \n\n  ", "\nan", "other\nrest"):
        sink.write(text)
    assert lines == ["one line", "another"]


@pytest.mark.slow
@pytest.mark.parametrize("package", ["server", "client"])
def test_all_output_of_a_command_is_json_on_stderr(package: str, tmp_path: Path) -> None:
    own = ["--listen", "127.0.0.1:0", "--out", str(tmp_path)] if package == "server" else []
    arguments = ["--log-format", "json", "--task", "nowhere.py:Task", *own]
    with Processes(tmp_path / "logs") as processes:
        ended = processes.complete(package, *arguments, status=2)
    assert not ended.stdout
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert lines[-1]["code"] == "UnknownTask"
    assert lines[-1]["remedy"]
    assert {"time", "level", "logger", "message"} <= lines[0].keys()
