"""How an error is shown, and the log's format."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from headwater.common.errors import SettingsError
from headwater.common.system.console import show_error

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
    assert "--resume" in capsys.readouterr().err


def test_in_json_output_and_errors_are_objects_on_the_error_stream() -> None:
    done = subprocess.run(
        [sys.executable, "-c", JSON_ERROR], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    printed, error = map(json.loads, done.stderr.splitlines())
    assert printed["message"] == "hello"
    assert (error["code"], error["message"], error["remedy"]) == (
        "SettingsError",
        "too few",
        "more",
    )
