"""The frame of the commands: what it shows for an error that follows a request to stop."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from headwater.common.system.command_line import LOCALE, new_app, write_what_can_be_encoded
from headwater.common.system.stop_signals import (
    STOPPED_STATUS,
    StopRequests,
    at_stop_signals,
    interrupt,
)


def command(
    *, is_stopped: bool, name: str = "headwater-simulate", error: type[Exception] = ImportError
) -> typer.Typer:
    """Return a command whose import loses Ctrl-C and then fails, as numpy's does."""
    app = new_app(name)

    @app.callback(invoke_without_command=True)
    def run() -> None:
        try:
            if is_stopped:
                signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass
        raise error("cannot load module more than once per process")

    return app


@pytest.mark.parametrize("is_stopped", [True, False])
def test_an_error_after_a_lost_interrupt_is_no_fault(
    is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StopRequests, "_requested_at", None)
    with at_stop_signals(StopRequests(interrupt)):
        result = CliRunner().invoke(command(is_stopped=is_stopped), [])
    assert result.exit_code == (STOPPED_STATUS if is_stopped else 1)
    assert ("ImportError" in result.output) is not is_stopped


@pytest.mark.parametrize(
    ("name", "error", "shown"),
    [
        ("headwater-client", ImportError, "stopped before connecting"),
        ("headwater-client", OSError, "OSError"),
    ],
)
def test_a_client_that_is_stopped_speaks_of_no_rounds_and_other_faults_are_shown(
    name: str, error: type[Exception], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StopRequests, "_requested_at", None)
    with at_stop_signals(StopRequests(interrupt)):
        result = CliRunner().invoke(command(is_stopped=True, name=name, error=error), [])
    assert shown in result.output
    assert "rounds are kept" not in result.output


def command_that(does: Callable[[], object]) -> typer.Typer:
    """Return a command of one argument, which does this."""
    app = new_app("headwater-simulate")

    @app.callback(invoke_without_command=True)
    def run(text: Annotated[str, typer.Option("--text")] = "") -> None:
        does()

    return app


@pytest.mark.parametrize(("encoding", "remedy"), [("ascii", LOCALE), ("utf-8", "rename the file")])
def test_an_argument_that_python_could_not_decode_is_refused_with_a_remedy(
    encoding: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
    result = CliRunner().invoke(command_that(list), ["--text", "s\udcc3\udca9"])
    assert result.exit_code == 2
    assert remedy in result.output
    assert "Traceback" not in result.output


def test_a_name_that_the_locale_cannot_write_is_no_fault_of_the_project(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    result = CliRunner().invoke(command_that(lambda: "sé".encode("ascii")), [])
    assert result.exit_code == 2
    assert f"remedy: {LOCALE}" in result.output


def test_a_character_that_the_terminal_lacks_is_written_as_an_escape() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    write_what_can_be_encoded(stream)
    stream.write("é 97 %")
    stream.seek(0)
    assert stream.read() == r"\xe9 97 %"
