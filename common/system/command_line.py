"""The frame of the three commands: their common options, the log, errors, and the settings.

rich and pydantic are loaded when a command runs, so that importing a command line stays cheap.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import click
import typer

from headwater.common.errors import HeadwaterError, SettingsError
from headwater.common.settings.flags import OTHER_PANEL, SettingsGroup, overrides
from headwater.common.system.atomic_file import keep_private
from headwater.common.system.lasting_output import lasting_output
from headwater.common.system.stop_signals import is_interrupted

if TYPE_CHECKING:
    from headwater.common.settings.schema import Settings
    from headwater.common.transport.tls import Credentials

CLIENT = "headwater-client"
LOCALE = "set LC_ALL=C.UTF-8, or PYTHONUTF8=1"

Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="TOML file of settings; flags override it."),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue the run in --out with its settings; --config and flags override them.",
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log each step.", rich_help_panel=OTHER_PANEL)
]
LogFormat = Annotated[
    Literal["text", "json"] | None,
    typer.Option(
        "--log-format",
        click_type=click.Choice(["text", "json"]),
        metavar="text|json",
        help="json: write what is printed and logged as one JSON object a line, on the standard "
        "error stream. [default: text]",
        rich_help_panel=OTHER_PANEL,
    ),
]


class CommandGroup(SettingsGroup):
    """One of the three commands: it shows an error with its remedy and exits with its status."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the flags, of which each must be text; see ``check_text``."""
        check_text(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; no traceback shows the frames of the command line's libraries.

        What it writes is its user's alone, whatever the umask is: models, logs and histories say
        something of the data.
        """
        keep_private()
        with lasting_output():
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> Any:
        write_what_can_be_encoded(sys.stdout)
        try:
            return super().invoke(ctx)
        except (HeadwaterError, KeyboardInterrupt) as error:
            from headwater.common.system.console import show_error

            if isinstance(error, KeyboardInterrupt) and not error.args:
                error = self._stopped(ctx)
            raise typer.Exit(show_error(error)) from error
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            from headwater.common.system.console import show_error, show_fault

            if isinstance(error, UnicodeEncodeError) and not is_utf8():
                raise typer.Exit(show_error(SettingsError(str(error), remedy=LOCALE))) from error

            # An import that Ctrl-C ended may lose it, and fails when it is repeated.
            if isinstance(error, ImportError) and is_interrupted():
                raise typer.Exit(show_error(self._stopped(ctx))) from error
            raise typer.Exit(show_fault(error)) from error

    def _stopped(self, ctx: click.Context) -> KeyboardInterrupt:
        """Return the interrupt to show, which came before any round and any connection."""
        is_client = self.name == CLIENT and ctx.invoked_subcommand is None
        return KeyboardInterrupt("stopped before connecting" if is_client else "stopped")


def is_utf8() -> bool:
    """Return whether this process reads arguments and names files in UTF-8."""
    return sys.getfilesystemencoding() == "utf-8"


def check_text(args: Sequence[str]) -> None:
    """Check that Python could decode the arguments: a byte that it could not is a surrogate.

    Raises:
        click.UsageError: one has such a byte. Neither a file nor a name with it can be passed on.
    """
    for argument in args:
        if any("\udc80" <= sign <= "\udcff" for sign in argument):
            shown = os.fsencode(argument).decode("utf-8", "backslashreplace")
            text = f"{shown}: this locale is {sys.getfilesystemencoding()}, and cannot decode it"
            remedy = LOCALE if not is_utf8() else "write it in UTF-8; rename the file if it is one"
            raise click.UsageError(f"{text}\n  remedy: {remedy}")


def write_what_can_be_encoded(stream: TextIO) -> None:
    """Let a stream write a character that its encoding lacks as an escape, as stderr does."""
    stream = getattr(stream, "stream", stream)  # below a LastingStream
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


def new_app(name: str) -> typer.Typer:
    """Return the typer application of one of the three commands, as ``headwater-server``."""
    return typer.Typer(
        name=name,
        cls=CommandGroup,
        add_completion=False,
        rich_markup_mode=None,  # rich takes 0.1 s longer, and its boxes 20 of 80 columns
        pretty_exceptions_enable=False,
    )


def read_settings(
    context: typer.Context,
    config: Path | None,
    *,
    resume: bool = False,
    verbose: bool = False,
    log_format: Literal["text", "json"] | None = None,
    **fixed: Any,
) -> Settings:
    """Start the log and return a command's settings; ``fixed`` wins over file and flags.

    Raises:
        SettingsError: as ``sources.load_run``, or a KEY=VALUE without its ``=``.
    """
    from headwater.common.settings.sources import load_run
    from headwater.common.system.console import start_log

    start_log(verbose=verbose, log_format=log_format)
    return load_run(config, overrides(context) | fixed, resume=resume)


def check_addresses(settings: Settings, *addresses: str, metrics: str | None) -> Credentials | None:
    """Return this side's TLS files, if any; check that plain text stays on loopback.

    Raises:
        InsecureAddress: an address beyond loopback without TLS, and without the flag that
            allows it: --plain-text, or for the metrics --public-metrics.
        SettingsError: not HOST:PORT, or a TLS file is missing or wrong.
    """
    from headwater.common.transport.tls import check_address, read_credentials

    credentials = read_credentials(settings.tls)
    for address in addresses:
        check_address(address, has_tls=credentials is not None, is_allowed=settings.plain_text)
    if metrics is not None:
        from headwater.common.system.metrics_server import check_metrics_address

        check_metrics_address(metrics, is_allowed=settings.public_metrics)
    return credentials
