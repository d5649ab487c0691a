"""How an error is shown, and the log's format."""

from __future__ import annotations

import io
import json
import logging
import os

import pytest
import torch
from rich.console import Console

from headwater.common.errors import OutOfMemory, SettingsError
from headwater.common.system import console as consoles
from headwater.common.system.console import (
    PrintableFormatter,
    print_text,
    print_titled,
    show_error,
    show_fault,
)
from tests.commands import python

JSON_ERROR = """
from headwater.common.errors import SettingsError
from headwater.common.system.console import console, show_error, start_log
start_log(verbose=False, log_format="json")
console.print("hello")
raise SystemExit(show_error(SettingsError("too few", remedy="more")))
"""


def test_an_error_is_shown_with_its_code_message_and_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert show_error(SettingsError("found [bold] 3", remedy="give 4")) == 2
    assert capsys.readouterr().err == "SettingsError: found [bold] 3\n  remedy: give 4\n"


def test_ctrl_c_exits_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_error(KeyboardInterrupt()) == 130
    assert show_error(KeyboardInterrupt("stopped after round 3")) == 130
    assert capsys.readouterr().err == "stopped\nstopped after round 3\n"


def test_in_json_output_and_errors_are_objects_on_the_error_stream() -> None:
    done = python("-c", JSON_ERROR, status=2)
    assert done.stdout == ""
    printed, error = map(json.loads, done.stderr.splitlines())
    assert printed["message"] == "hello"
    assert (error["code"], error["message"], error["remedy"]) == (
        "SettingsError",
        "too few",
        "more",
    )


def test_a_hostile_error_reaches_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(SettingsError("found \x1b[2J", remedy="give [/x]\x07"))
    assert capsys.readouterr().err == ("SettingsError: found \\x1b[2J\n  remedy: give [/x]\\x07\n")


def test_a_log_message_cannot_pose_as_another_record_or_write_to_the_terminal() -> None:
    record = logging.makeLogRecord(
        {"msg": "%s", "args": ("refused\n12:00 WARNING all is well\x1b[2J",), "levelname": "INFO"}
    )
    text = PrintableFormatter("%(levelname)s %(message)s").format(record)
    assert text == "INFO refused\n    12:00 WARNING all is well\\x1b[2J"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_titled_texts_wrap_in_a_terminal_only(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(
        consoles,
        "console",
        Console(file=out, width=40, force_terminal=is_terminal, color_system=None),
    )
    words = "eight devices were done by 12.5 s, and [/x] three were not counted"
    print_titled([("idle", words), ("memory", "device 3 was the fullest")])
    print_text(words)
    lines = out.getvalue().splitlines()
    assert "…" not in out.getvalue()
    assert "[/x]" in out.getvalue()
    if is_terminal:
        assert max(map(len, lines)) <= 40
        assert lines[0].startswith("  idle        eight devices")
        assert lines[1].startswith(" " * 14)
    else:
        assert lines == [f"  idle        {words}", "  memory      device 3 was the fullest", words]


def test_a_width_of_0_is_an_unknown_one() -> None:
    code = "from headwater.common.system.console import console; console.print('hello')"
    assert python("-c", code, env={**os.environ, "COLUMNS": "0"}).stdout == "hello\n"


def test_memory_that_is_missing_in_a_task_s_code_is_no_fault_of_the_task(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert show_fault(caught.value) == OutOfMemory.exit_status
    said = capsys.readouterr().err
    assert "OutOfMemory" in said
    assert "give the device more memory" in said
