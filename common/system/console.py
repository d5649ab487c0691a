"""Prints to the terminal: results, errors with their remedy, and the log."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import IO, cast

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from headwater.common.errors import HeadwaterError, TaskFailed
from headwater.common.system.json_logs import Format, JsonFormatter, LineStream
from headwater.common.user_code import described, is_users, own_traceback, user_frames

# No emoji: a device may be called a:ant:b.
console = Console(highlight=False, emoji=False)
stderr = Console(stderr=True, highlight=False, emoji=False)
# Takes what a command prints, if the log is JSON.
output_log = logging.getLogger("headwater.command")


def show_error(error: HeadwaterError | KeyboardInterrupt) -> int:
    """Print an error with its remedy, and return the exit status; after Ctrl-C it is 130."""
    if isinstance(error, KeyboardInterrupt):
        stderr.print("stopped; committed rounds are kept, --resume continues after them")
        return 130
    if _logs_json():
        fields = {"code": error.code, "remedy": error.remedy}
        output_log.error(error.message, extra={"fields": fields})
    else:
        stderr.print(f"[bold red]{error.code}[/]: {escape(error.message)}", soft_wrap=True)
        if error.remedy:
            stderr.print(f"  [bold]remedy[/]: {escape(error.remedy)}", soft_wrap=True)
    return error.exit_status


def show_fault(error: Exception) -> int:
    """Print an exception that no error of ours names, and return the exit status.

    If the user's own code raised it, only the user's lines are shown; else the traceback within
    this project.
    """
    if any(is_users(frame.filename) for frame in user_frames(error)):
        return show_error(TaskFailed(f"the task failed: {described(error)}"))
    text = "".join(traceback.format_exception(type(error), error, own_traceback(error)))
    stderr.print(escape(text), soft_wrap=True, end="")
    stderr.print("this is a fault of headwater, not of your task: please report it", soft_wrap=True)
    return HeadwaterError.exit_status


def start_log(*, verbose: bool, log_format: Format | None = None) -> None:
    """Log warnings, or with ``verbose`` everything, to the standard error stream.

    With ``json`` each line there is one JSON object. What the command prints becomes log lines
    too, and nothing goes to the standard output.
    """
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    # grpc writes each failed handshake to stderr; our own errors name the cause.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    handler: logging.Handler
    if log_format == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        output_log.setLevel(logging.INFO)
        console.file = cast(IO[str], LineStream(output_log.info))
        stderr.file = cast(IO[str], LineStream(output_log.warning))
    elif sys.stderr.isatty():
        handler = RichHandler(console=stderr, show_path=False, markup=False)
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])


def _logs_json() -> bool:
    handlers = logging.getLogger().handlers
    return any(isinstance(handler.formatter, JsonFormatter) for handler in handlers)
