"""Prints to the terminal: results, errors with their remedy, and the log."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, cast

from rich.console import Console, RenderableType
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from headwater.common.errors import (
    FeatureMissing,
    HeadwaterError,
    OutOfMemory,
    StateError,
    TaskFailed,
    system_remedy,
)
from headwater.common.system.printable import printable, printable_lines
from headwater.common.user_code.failures import (
    described,
    is_allocation_failure,
    is_users,
    own_traceback,
    user_frames,
)

if TYPE_CHECKING:
    from headwater.common.system.json_logs import Format

# COLUMNS=0 says that the width is not known, as in some editors; rich would print lines of no
# width, which is nothing.
UNKNOWN = {("COLUMNS", "0"), ("LINES", "0")}
ENVIRONMENT = {name: text for name, text in os.environ.items() if (name, text) not in UNKNOWN}
# No emoji: a device may be called a:ant:b.
console = Console(highlight=False, emoji=False, _environ=ENVIRONMENT)
stderr = Console(stderr=True, highlight=False, emoji=False, _environ=ENVIRONMENT)
# Environment variables, to be set before flwr and grpc are imported. grpc writes each failed
# handshake to stderr; our own errors name the cause.
QUIET_DEPENDENCIES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "GRPC_VERBOSITY": "NONE",
}
# Takes what a command prints, if the log is JSON.
output_log = logging.getLogger("headwater.command")
TITLE_WIDTH = 12
MAX_LINE_WIDTH = 10_000  # of a table in a pipe or a file


def show_error(error: HeadwaterError | KeyboardInterrupt) -> int:
    """Print an error with its remedy, and return the exit status; after Ctrl-C it is 130.

    The text of a KeyboardInterrupt, if it has one, says what was stopped and what is kept.
    """
    if isinstance(error, KeyboardInterrupt):
        stderr.print(str(error) or "stopped", soft_wrap=True, markup=False)
        return 130
    if _logs_json():
        fields = {"code": error.code, "remedy": error.remedy}
        output_log.error(error.message, extra={"fields": fields})
    else:
        shown = Text.assemble((error.code, "bold red"), ": ", printable_lines(error.message))
        stderr.print(shown, soft_wrap=not stderr.is_terminal)
        if error.remedy:
            shown = Text.assemble("  ", ("remedy", "bold"), ": ", printable_lines(error.remedy))
            stderr.print(shown, soft_wrap=not stderr.is_terminal)
    return error.exit_status


def show_fault(error: Exception) -> int:
    """Print an exception that no error of ours names, and return the exit status.

    If the user's own code raised it, only the user's lines are shown. What the system refuses, such
    as memory or a full disk, is an error with its remedy; else the traceback within this project is
    shown.
    """
    if is_allocation_failure(error):
        return show_error(OutOfMemory(described(error)))
    if any(is_users(frame.filename) for frame in user_frames(error)):
        return show_error(TaskFailed(f"the task failed: {described(error)}"))
    if isinstance(error, OSError) and system_remedy(str(error)) is not None:
        return show_error(StateError(str(error)))
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("headwater."):
        return show_error(FeatureMissing(f"this run asks for {error.name}, which is not here"))
    text = "".join(traceback.format_exception(type(error), error, own_traceback(error)))
    stderr.print(Text(printable_lines(text)), soft_wrap=True, end="")
    stderr.print("this is a fault of headwater, not of your task: please report it", soft_wrap=True)
    return HeadwaterError.exit_status


class _Silence:
    """Counts those who want the console to be quiet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0

    def change(self, by: int) -> None:
        with self._lock:
            self._number += by
            console.quiet = self._number > 0


_silence = _Silence()


@contextmanager
def silent(is_silent: bool) -> Iterator[None]:
    """Print nothing in the meantime, if ``is_silent``; the log goes on. Threads may overlap."""
    if not is_silent:
        yield
        return
    _silence.change(1)
    try:
        yield
    finally:
        _silence.change(-1)


def start_log(*, verbose: bool, log_format: Format | None = None) -> None:
    """Log warnings, or with ``verbose`` everything, to the standard error stream.

    With ``json`` each line there is one JSON object. What the command prints becomes log lines
    too, and nothing goes to the standard output.
    """
    for name, value in QUIET_DEPENDENCIES.items():
        os.environ.setdefault(name, value)
    handler: logging.Handler
    if log_format == "json":
        from headwater.common.system.json_logs import JsonFormatter, LineStream

        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        output_log.setLevel(logging.INFO)
        console.file = cast(IO[str], LineStream(output_log.info))
        stderr.file = cast(IO[str], LineStream(output_log.warning))
    elif sys.stderr.isatty():
        # Through the console that shows the progress, which then stays below the log.
        shown_by = console if console.is_terminal else stderr
        handler = RichHandler(console=shown_by, show_path=False, markup=False)
        handler.setFormatter(PrintableFormatter("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])


def print_text(text: str) -> None:
    """Print a text as it is; a terminal wraps it between words, elsewhere it stays one line."""
    console.print(Text(printable_lines(text)), soft_wrap=not console.is_terminal)


def print_table(table: RenderableType) -> None:
    """Print tables and texts: a terminal wraps them at its width, elsewhere no line is wrapped."""
    if console.is_terminal:
        console.print(table)
    else:
        wide = Console(file=console.file, width=MAX_LINE_WIDTH, highlight=False, emoji=False)
        wide.print(table)


def print_titled(rows: Iterable[tuple[str, str]]) -> None:
    """Print titles with a text each; in a terminal the text wraps in its own column."""
    if not console.is_terminal:
        for title, text in rows:
            line = f"  {title:<{TITLE_WIDTH}}{printable(text)}"
            console.print(line, soft_wrap=True, markup=False)
        return
    table = Table.grid(padding=0)
    table.add_column(width=TITLE_WIDTH + 2, no_wrap=True)
    table.add_column(overflow="fold")
    for title, text in rows:
        table.add_row(Text(f"  {title}"), Text(printable(text)))
    console.print(table)


class PrintableFormatter(logging.Formatter):
    """Formats a record as text in which a message cannot pose as another record.

    Control characters become escapes, and the further lines of a message are indented. A traceback
    stays as it is.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        record.message = printable_lines(record.message).replace("\n", "\n    ")
        return super().formatMessage(record)


def _logs_json() -> bool:
    handlers = logging.getLogger().handlers
    return any(getattr(handler.formatter, "is_json", False) for handler in handlers)
