"""The frame of the commands: what it shows for an error that follows a request to stop."""

from __future__ import annotations

import signal

import pytest
import typer
from typer.testing import CliRunner

from headwater.common.system.command_line import new_app
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
