"""What a person sees in the terminal: errors with their remedy, and the log."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from headwater.common.errors import HeadwaterError
from headwater.common.settings.schema import Settings
from headwater.common.system.json_logs import Format, JsonFormatter, LineSink

# What is told may have colons in it: a device called a:ant:b is no emoji.
console = Console(highlight=False, emoji=False)
stderr = Console(stderr=True, highlight=False, emoji=False)
# What a command says to its user; in JSON it goes the way of the log.
said = logging.getLogger("headwater.command")


@contextmanager
def errors_shown() -> Iterator[None]:
    """Show an error of ours with its remedy and exit with its status; Ctrl-C exits with 130."""
    try:
        yield
    except HeadwaterError as error:
        if _is_json():
            fields = {"code": error.code, "remedy": error.remedy}
            said.error(error.message, extra={"fields": fields})
            raise typer.Exit(error.exit_status) from error
        stderr.print(f"[bold red]{error.code}[/]: {escape(error.message)}", soft_wrap=True)
        if error.remedy:
            stderr.print(f"  [bold]remedy[/]: {escape(error.remedy)}", soft_wrap=True)
        raise typer.Exit(error.exit_status) from error
    except KeyboardInterrupt:
        stderr.print("stopped; what was committed is kept, --resume goes on from there")
        raise typer.Exit(130) from None


def start_log(*, verbose: bool, log_format: Format | None = None) -> None:
    """Log warnings, or everything with ``verbose``, to the standard error stream.

    With ``json`` each line there is one object, what the command says to its user included, and
    nothing goes to the standard output.
    """
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
    # grpc writes each failed handshake to stderr; what matters of it is told in our own words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    handler: logging.Handler
    if log_format == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        said.setLevel(logging.INFO)
        console.file = cast(IO[str], LineSink(said.info))
        stderr.file = cast(IO[str], LineSink(said.warning))
    elif sys.stderr.isatty():
        handler = RichHandler(console=stderr, show_path=False, markup=False)
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])


def _is_json() -> bool:
    handlers = logging.getLogger().handlers
    return any(isinstance(handler.formatter, JsonFormatter) for handler in handlers)


def default_out(settings: Settings) -> Path:
    """Return runs/TASK-TIME, a folder that no other run has."""
    task = (settings.task or "run").rpartition(":")[2].lower()
    return Path("runs") / f"{task}-{time.strftime('%Y%m%d-%H%M%S')}"
