"""Generates the command-line options from the settings tree, and the help of the three commands.

typer builds the commands from ``SettingsGroup`` and ``SettingsCommand``. These add an option for
every setting that names the command in ``schema.py``; ``overrides`` returns the values by dotted
keys. ``--help`` shows the options that most people need, ``--help-all`` every option. The tree
is loaded with the first option, so that importing the command line stays cheap.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any

import click
import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from headwater import __version__
from headwater.common.errors import SettingsError

if TYPE_CHECKING:
    from headwater.common.settings.introspection import Setting

SET = "set"
OWN_PANEL = "Options"
OTHER_PANEL = "Other"
# Keys of click's ctx.meta.
SHOWS_ALL = "headwater.shows_all"
HAS_SUBCOMMAND = "headwater.has_subcommand"


def overrides(context: typer.Context) -> dict[str, Any]:
    """Return the settings of a command's flags, by dotted keys, as ``sources.load`` takes them.

    Raises:
        SettingsError: a KEY=VALUE without its ``=``.
    """
    from headwater.common.settings.introspection import all_settings

    given: dict[str, Any] = dict(context.obj)
    given.update(map(_split, given.pop(SET, ())))
    return {key: _converted(all_settings().get(key), value) for key, value in given.items()}


def key_values(pairs: list[str]) -> dict[str, Any]:
    """Read KEY=VALUE texts; numbers, true, false and lists with commas are read as such.

    Raises:
        SettingsError: a text without ``=``, or with nothing before it.
    """
    return {key: _value(text) for key, text in map(_split, pairs)}


def numbers(text: str) -> tuple[int, ...]:
    """Read whole numbers with commas between them.

    Raises:
        SettingsError: one of them is no whole number.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SettingsError(f"expected numbers as in 0,1,2, found {text!r}") from None


def _split(pair: str) -> tuple[str, str]:
    key, separator, text = pair.partition("=")
    if not separator or not key:
        raise SettingsError(f"expected KEY=VALUE, found {pair!r}")
    return key, text


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if "," in text:
        return [_value(part) for part in text.split(",")]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _converted(setting: Setting | None, value: Any) -> Any:
    """Convert a flag's text where pydantic would keep it: in tables, and numbers among choices."""
    if isinstance(value, tuple):
        is_table = setting is not None and setting.value.types == [dict]
        return key_values([*value]) if is_table else [*value]
    if setting is None:
        return _value(value)  # a key of a table, as optimizer.arguments.momentum
    return {str(choice): choice for choice in setting.value.choices}.get(value, value)


def _with_bare_values(args: list[str]) -> list[str]:
    """Return a command line in which each flag that may go without a value has one."""
    from headwater.common.settings.introspection import all_settings

    bare = {each.flag: each.bare for each in all_settings().values() if each.bare is not None}
    given = []
    for arg, following in zip(args, [*args[1:], "--"], strict=False):
        given.append(arg)
        if arg in bare and following.startswith("-"):
            given.append(bare[arg])
    return given


def _option_of(setting: Setting) -> TyperOption:
    is_switch = setting.value.types == [bool]
    default = "" if setting.default in (None, {}) else f"default: {setting.default}"
    if is_switch and setting.default is not None:
        words = setting.flag.replace("--", "").split("/")
        words = ["on", "off"] if words[1].startswith("no-") else words
        default = f"default: {words[not setting.default]}"
    notes = "; ".join(note for note in (setting.value.limits_text, default) if note)
    is_repeated = setting.value.is_repeated
    meaning = f"{setting.meaning[0].upper()}{setting.meaning[1:]}."
    meaning += " May be repeated." if is_repeated else ""
    return TyperOption(
        param_decls=[
            *filter(None, (setting.flag, setting.alias)),
            setting.key.replace(".", "__"),
        ],
        type=bool if is_switch else str,
        is_flag=is_switch,
        multiple=is_repeated,
        metavar=None if is_switch else setting.value.metavar,
        help=f"{meaning} [{notes}]" if notes else meaning,
        rich_help_panel=OWN_PANEL if setting.is_short else setting.panel,
    )


def _show_and_exit(ctx: click.Context, option: click.Parameter, is_given: bool) -> None:
    if is_given:
        ctx.meta[SHOWS_ALL] = True
        text = f"headwater {__version__}" if option is VERSION_OPTION else ctx.get_help()
        click.echo(text, color=ctx.color)
        ctx.exit()


def _showing_option(flag: str, help_text: str) -> TyperOption:
    return TyperOption(
        param_decls=[flag],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_and_exit,
        help=help_text,
    )


HELP_ALL_OPTION = _showing_option("--help-all", "Show every option and exit.")
VERSION_OPTION = _showing_option("--version", "Show the version and exit.")
SET_OPTION = TyperOption(
    param_decls=["--set"],
    multiple=True,
    metavar="KEY=VALUE",
    help="Any setting of docs/settings.md, e.g. plan.memory_fraction=0.7. May be repeated.",
    rich_help_panel=OTHER_PANEL,
)


def _long_names(parameter: click.Parameter) -> list[str]:
    names = [*parameter.opts, *parameter.secondary_opts]
    return [name for name in names if name.startswith("--")]


class _ReadableHelp(click.Command):
    """A command whose help is plain text, with examples that can be copied.

    Its arguments are explained in the first paragraphs: click 8.5 loses typer's help of them.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the flags; of an unknown one, name the nearest, or the command that has it."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            flag = error.option_name
            own = [name for each in self.get_params(ctx) for name in _long_names(each)]
            from headwater.common.settings.suggestions import flag_hint

            hint = flag_hint(flag, own)
            raise click.UsageError(f"No such option '{flag}'.{hint}", ctx) from error

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the command does; an example keeps its lines, so that it can be copied."""
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text((self.help or "").replace("Try it:", "\b\nTry it:"))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the important options, or with --help-all every option, by panel."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):  # not an argument
                name, text = record
                panel = getattr(parameter, "rich_help_panel", None) or OWN_PANEL
                text = text.replace("\\[", "[")  # typer escapes for rich, which is not used
                panels.setdefault(panel, []).append((name, text))
        for panel, records in panels.items():
            if panel == OWN_PANEL or SHOWS_ALL in ctx.meta:
                with formatter.section(click.style(panel, bold=True)):
                    formatter.write_dl(records)


class _WithSettings(_ReadableHelp):
    """A command with an option for each setting whose field names the command.

    ``flags_of`` is another command, whose flags it has in place of its own; the help leaves those
    of the settings ``hidden_flags`` out.
    """

    flags_of: str | None = None
    hidden_flags: tuple[str, ...] = ()

    @cached_property
    def _options(self) -> dict[str, TyperOption]:
        """The options by the dotted key of their setting, in the order of the help."""
        from headwater.common.settings.introspection import all_settings
        from headwater.common.settings.schema import PANELS

        command = self.flags_of or (self.name or "").removeprefix("headwater-")
        settings = [each for each in all_settings().values() if command in each.commands]
        settings.sort(key=lambda each: PANELS.index(each.panel))
        options = {each.key: _option_of(each) for each in settings}
        for key in options.keys() & {*self.hidden_flags}:
            options[key].hidden = True
        return options | {SET: SET_OPTION}

    def settings_options(self, ctx: click.Context) -> dict[str, TyperOption]:
        """Return the options of settings by their dotted keys."""
        return self._options

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the options of settings, the command's own, and those that show the help."""
        *own, help_option = super().get_params(ctx)
        return [*self.settings_options(ctx).values(), *own, HELP_ALL_OPTION, help_option]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the flags; those of settings move to ``ctx.obj``, by dotted keys."""
        options = self.settings_options(ctx)
        rest = super().parse_args(ctx, _with_bare_values(args) if options else args)
        given = {key: ctx.params.pop(each.name or "", None) for key, each in options.items()}
        ctx.obj = {key: value for key, value in given.items() if value not in (None, ())}
        for key, value in ctx.obj.items():
            if isinstance(value, str) and value.startswith("--"):  # it was taken for the value
                name = options[key].opts[0]
                raise click.UsageError(
                    f"{name} takes a value ({options[key].metavar}), and {value} follows it", ctx
                )
        return rest


class PlainCommand(_ReadableHelp, TyperCommand):
    """A subcommand without settings."""


class SettingsCommand(_WithSettings, TyperCommand):
    """A subcommand with settings."""


class SettingsGroup(_WithSettings, TyperGroup):
    """A command with settings and subcommands."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the options, with --version."""
        return [*super().get_params(ctx), VERSION_OPTION]

    def settings_options(self, ctx: click.Context) -> dict[str, TyperOption]:
        """Return no options in front of a subcommand, to spare it 0.1 s for loading the tree."""
        return {} if HAS_SUBCOMMAND in ctx.meta else self._options

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the flags; of a subcommand only its name."""
        if args and args[0] in self.commands:
            ctx.meta[HAS_SUBCOMMAND] = True
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand; refuse flags before it, which would have no effect."""
        if args[0] not in self.commands:
            if any(key.endswith(".data") for key in ctx.obj):
                raise click.UsageError(
                    f"--data takes one value, and {args[0]} follows it. If the shell has expanded "
                    "a pattern, put it in quotes: --data 'devices/*.csv'",
                    ctx,
                )
            near = get_close_matches(args[0], self.commands, n=1)
            question = f" Did you mean '{near[0]}'?" if near else ""
            raise click.UsageError(f"No such command '{args[0]}'.{question}", ctx)
        name, command, rest = super().resolve_command(ctx, args)
        given = [*ctx.obj, *(key for key, value in ctx.params.items() if value)]
        if given:
            raise click.UsageError(f"put flags after {name}: before it they have no effect", ctx)
        return name, command, rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, then each subcommand with the first paragraph of its help."""
        super().format_options(ctx, formatter)
        with formatter.section(click.style("Commands", bold=True)):
            shown = ((name, one) for name, one in self.commands.items() if not one.hidden)
            helps = {name: command.help or "" for name, command in shown}
            formatter.write_dl([(name, text.partition("\n\n")[0]) for name, text in helps.items()])
