"""The command ``headwater``: each of its subcommands is imported when it runs."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Annotated

import click
import typer
from typer.core import TyperGroup

import headwater
from headwater.common.system.stop_signals import interrupt_at_stop_signals

SIMULATE = "simulate"
# By name: the module of its application, which is a command of its own too, and its line of help.
COMMANDS = {
    SIMULATE: ("headwater.simulation.cli", "Simulate many clients on this machine."),
    "server": ("headwater.server.cli", "Start the aggregation server, or ask and steer one."),
    "client": ("headwater.client.cli", "Train with this device's data, for a server."),
}
# Subcommands of ``headwater simulate`` that go without its name.
SHORT = {
    "new": "Write a task for your data, which runs at once: table, series, images or text.",
    "compare": "Compare ways to train at the same cost, and say which to take.",
    "sweep": "Run every combination of some settings with several seeds.",
    "replay": "Show a run that has ended, round by round, in a browser.",
    "guide": "Open a guide in a browser: accumulation, planner and masks.",
}

HELP = """Federated training for the computers that people already own.

\b
Try a task on this machine (`headwater new` writes you one):
  headwater simulate --task my_task.py:MyTask --clients 20
Gather devices, and train:
  headwater server --task my_task.py:MyTask --min-clients 3
Train with this device's data:
  headwater client --task my_task.py:MyTask --data photos --server HOST:8500

`headwater COMMAND --help` says more. Each of the first three is also a command of its own:
headwater-simulate, headwater-server, headwater-client.
"""


class Commands(TyperGroup):
    """The subcommands by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *SHORT]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in SHORT:
            group = self.get_command(ctx, SIMULATE)
            assert isinstance(group, click.Group)
            return group.get_command(ctx, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        module, _ = COMMANDS[cmd_name]
        return typer.main.get_command(import_module(module).app)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``simulate`` before what goes without it: its group shows errors and stops."""
        if args and args[0] in SHORT and not ctx.resilient_parsing:
            args = [SIMULATE, *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand; of a misspelt one say which is near."""
        near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
        if near and near[0] != args[0]:
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{near[0]}'?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the subcommands with their lines, without importing any."""
        lines = {name: line for name, (_, line) in COMMANDS.items()} | SHORT
        with formatter.section("Commands"):
            formatter.write_dl(list(lines.items()))


app = typer.Typer(
    name="headwater",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"headwater {headwater.__version__}")
        raise typer.Exit


@app.callback(help=HELP)
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Run a subcommand."""


def main() -> None:
    """Run the command."""
    interrupt_at_stop_signals()
    app(prog_name="headwater")


if __name__ == "__main__":
    main()
