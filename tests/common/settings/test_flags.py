"""The options that are generated from the settings tree, and the help of the three commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from click import Command, Context, Group, Option, UsageError
from typer.main import get_command
from typer.testing import CliRunner

import headwater
from headwater import __version__
from headwater.client import cli as client_cli
from headwater.common.errors import SettingsError
from headwater.common.settings.flags import key_values, numbers, overrides
from headwater.common.settings.introspection import all_settings
from headwater.common.settings.sources import load
from headwater.server import cli as server_cli
from headwater.simulation import cli as simulation_cli

APPS = {
    "headwater-server": server_cli.app,
    "headwater-client": client_cli.app,
    "headwater-simulate": simulation_cli.app,
}
COMMANDS = {
    "server": (server_cli.app, []),
    "client": (client_cli.app, []),
    "check": (client_cli.app, ["check"]),
    "doctor": (client_cli.app, ["doctor"]),
    "identity": (client_cli.app, ["identity"]),
    "adapt": (client_cli.app, ["adapt"]),
    "predict": (client_cli.app, ["predict"]),
    "simulate": (simulation_cli.app, []),
    "sweep": (simulation_cli.app, ["sweep"]),
}
REQUIRED = {"adapt": ("--model", "m", "--out", "o"), "predict": ("--model", "m")}
ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
VALUES: dict[type, str] = {int: "3", float: "0.5", bool: "", str: "x", Path: "x", dict: "a=1"}


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def output(app: typer.Typer, *words: str) -> str:
    ended = CliRunner().invoke(app, [*words])
    assert ended.exit_code == 0, ended.output
    return ended.output


def parsed(command: str, *words: str) -> dict[str, Any]:
    """Return the settings that a command line gives, without running the command."""
    app, path = COMMANDS[command]
    group = get_command(app)
    context: Context = group.make_context("headwater", [*path, *words])
    if path:
        assert isinstance(group, Group)
        given = [*words, *REQUIRED.get(command, ())]
        context = group.commands[path[0]].make_context(path[0], given, parent=context)
    return overrides(context)  # type: ignore[arg-type]


LEAVE_OUT = ". Whoever runs the server sets it there, and the devices follow: leave it out here."


@pytest.mark.parametrize("app", APPS.values(), ids=APPS)
def test_help_has_at_most_sixty_lines_of_eighty_columns(app: typer.Typer) -> None:
    lines = output(app, "--help").splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("app", APPS.values(), ids=APPS)
def test_help_names_every_subcommand_and_how_to_see_all_options(app: typer.Typer) -> None:
    text = output(app, "--help")
    command = get_command(app)
    assert isinstance(command, Group)
    shown = [name for name, one in command.commands.items() if not one.hidden]
    assert [name for name in shown if f"\n  {name} " not in text] == []
    assert "--help-all" in text


@pytest.mark.parametrize("app", APPS.values(), ids=APPS)
def test_every_help_fits_in_eighty_columns(app: typer.Typer) -> None:
    command = get_command(app)
    assert isinstance(command, Group)
    texts = [output(app, name, "--help") for name in command.commands]
    lines = [line for text in [*texts, output(app, "--help-all")] for line in text.splitlines()]
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_all_shows_every_flag_with_its_default(command: str) -> None:
    app, words = COMMANDS[command]
    text = " ".join(output(app, *words, "--help-all").split())
    settings = [each for each in all_settings().values() if command in each.commands]
    assert settings
    assert [each.key for each in settings if each.flag.replace("/", " / ") not in text] == []
    numbers_shown = [each for each in settings if isinstance(each.default, int | float)]
    assert [
        each.key
        for each in numbers_shown
        if not isinstance(each.default, bool) and f"default: {each.default}]" not in text
    ] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_sets_its_setting(command: str) -> None:
    for setting in all_settings().values():
        if command not in setting.commands:
            continue
        choice = str(setting.value.choices[-1]) if setting.value.choices else ""
        value = choice or VALUES[setting.value.types[0]]
        words = [setting.flag.partition("/")[0], *([value] if value else [])]
        assert parsed(command, *words).keys() == {setting.key}, setting.key


def test_check_and_doctor_take_the_client_s_flags() -> None:
    of_client = {key for key, each in all_settings().items() if "client" in each.commands}
    for command in ("check", "doctor"):
        own = {key for key, each in all_settings().items() if command in each.commands}
        assert of_client - own == {"check_task"}


def test_lr_is_short_for_learning_rate() -> None:
    assert parsed("simulate", "--lr", "0.5") == parsed("simulate", "--learning-rate", "0.5")


def test_flags_that_are_not_given_set_nothing() -> None:
    assert parsed("simulate") == {}
    assert load(None, parsed("server")) == load(None, {})


def test_flags_become_values_of_the_settings_types() -> None:
    words = "--rounds 7 --deadline 2.5 --no-check --local-steps 3 --workers auto --fleet a.toml"
    settings = load(None, parsed("simulate", *words.split()))
    assert (settings.rounds, settings.cohort.deadline_seconds) == (7, 2.5)
    assert not settings.check_task
    assert settings.local.steps == 3
    assert settings.simulation.workers == "auto"
    assert settings.simulation.fleet == Path("a.toml")


def test_a_name_made_of_digits_stays_a_name() -> None:
    assert load(None, parsed("client", "--name", "07")).client.name == "07"


def test_set_reaches_settings_without_a_flag_and_keys_of_a_table() -> None:
    words = "--set plan.memory_fraction=0.7 --set server.listen=:1 --set optimizer.arguments.b=1"
    settings = load(None, parsed("server", *words.split()))
    assert settings.plan.memory_fraction == 0.7
    assert settings.server.listen == ":1"
    assert settings.optimizer.arguments == {"b": 1}


def test_repeated_arguments_are_read_as_numbers_words_and_lists() -> None:
    pairs = ["momentum=0.9", "nesterov=true", "betas=0.9,0.99"]
    words = [word for pair in pairs for word in ("--optimizer-argument", pair)]
    assert parsed("server", *words) == {
        "optimizer.arguments": {"momentum": 0.9, "nesterov": True, "betas": [0.9, 0.99]}
    }


@pytest.mark.parametrize("command", ["server", "simulate"])
def test_a_flag_in_place_of_a_value_is_refused(command: str) -> None:
    words = ("--data", "a.csv") if command == "simulate" else ()
    found = r"--secure-aggregation takes a value \(off\|semi-honest\|active\), and --out follows it"
    with pytest.raises(UsageError, match=found):
        parsed(command, *words, "--secure-aggregation", "--out", "runs/a")


def test_only_tables_patterns_and_pairs_may_be_repeated() -> None:
    given = parsed("simulate", "--local-parameters", "head.*", "--local-parameters", "*.bias")
    assert load(None, given).model.local_parameters == "head.*,*.bias"
    given = parsed("client", "--also-task", "A=a.py:A", "--also-task", "B=b.py:B")
    assert load(None, given).client.tasks == "A=a.py:A,B=b.py:B"
    assert parsed("simulate", "--data", "devices/*.csv") == {"simulation.data": "devices/*.csv"}


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("momentum=0.9", {"momentum": 0.9}),
        ("nesterov=True", {"nesterov": True}),
        ("step_size=10", {"step_size": 10}),
        ("betas=0.9,0.99", {"betas": [0.9, 0.99]}),
        ("anneal_strategy=linear", {"anneal_strategy": "linear"}),
        ("eps=1e-8", {"eps": 1e-8}),
    ],
)
def test_a_key_value_text_is_read_by_its_form(pair: str, expected: dict[str, Any]) -> None:
    assert key_values([pair]) == expected


@pytest.mark.parametrize("pair", ["momentum", "=3", ""])
def test_a_text_without_key_or_value_is_a_settings_error(pair: str) -> None:
    with pytest.raises(SettingsError, match="KEY=VALUE"):
        key_values([pair])


def test_numbers_are_read_with_commas_between_them() -> None:
    assert numbers("0,1,2") == (0, 1, 2)
    with pytest.raises(SettingsError, match="found '0,x'"):
        numbers("0,x")


@pytest.mark.parametrize("app", APPS.values(), ids=APPS)
def test_version_is_the_package_s(app: typer.Typer) -> None:
    assert output(app, "--version") == f"headwater {__version__}\n"


def test_flags_before_a_subcommand_are_refused() -> None:
    for words in (["--rounds", "3", "sweep"], ["--resume", "sweep"], ["--set", "a=1", "sweep"]):
        ended = CliRunner().invoke(simulation_cli.app, words)
        assert ended.exit_code == 2
        assert "put flags after sweep" in ended.output


def test_a_mistyped_flag_gets_the_nearest_one() -> None:
    ended = CliRunner().invoke(simulation_cli.app, ["--roundz", "3"])
    assert ended.exit_code == 2
    assert "--rounds" in ended.output


def test_a_pattern_that_the_shell_has_expanded_is_to_be_put_in_quotes() -> None:
    ended = CliRunner().invoke(simulation_cli.app, ["--data", "a.csv", "b.csv", "c.csv"])
    assert ended.exit_code == 2
    assert "b.csv follows it" in ended.output
    assert "put it in quotes" in ended.output


def test_an_error_of_the_settings_is_shown_with_its_remedy_and_exit_status_2() -> None:
    ended = CliRunner().invoke(simulation_cli.app, ["--rounds", "0"])
    assert ended.exit_code == 2
    shown = " ".join(ended.output.split())
    assert "SettingsError: the command line: rounds (--rounds): expected a whole number" in shown
    assert "remedy: " in shown


def commands_of(app: typer.Typer) -> list[Command]:
    group = get_command(app)
    assert isinstance(group, Group)
    return [group, *group.commands.values()]


@pytest.mark.parametrize("app", APPS.values(), ids=APPS)
def test_examples_in_the_help_are_command_lines_that_parse(app: typer.Typer) -> None:
    for command in commands_of(app):
        _, found, example = (command.help or "").partition("Try it: ")
        if not found:
            continue
        line = example.replace("\\\n", " ").splitlines()[0].partition(">>")[0]
        program, *words = shlex.split(line)
        group = get_command(APPS[program])
        context = group.make_context(program, [*words])
        assert context.params is not None
        if words[0] == command.name:
            command.make_context(words[0], words[1:], parent=context)


def flags_of(command: Command) -> list[str]:
    options = [each for each in command.get_params(Context(command)) if isinstance(each, Option)]
    return [flag for option in options for flag in [*option.opts, *option.secondary_opts]]


@pytest.mark.parametrize("app", APPS.values(), ids=APPS)
def test_no_two_options_of_a_command_share_a_flag(app: typer.Typer) -> None:
    for command in commands_of(app):
        flags = flags_of(command)
        assert len(flags) == len(set(flags)), command.name


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_a_page_s_command_lines_have_flags_that_exist(page: Path) -> None:
    known = {flag for app in APPS.values() for each in commands_of(app) for flag in flags_of(each)}
    text = page.read_text().replace("\\\n", " ")
    lines = re.findall(r"headwater-(?:server|client|simulate)\b[^`|\n]*", text)
    used = {flag for line in lines for flag in re.findall(r" (--[a-z][a-z-]+)", line)}
    assert used <= known


@pytest.mark.parametrize(
    ("app", "flag", "remedy"),
    [
        (client_cli.app, "--upload-window=22:00-06:00", "use client.active_hours (--active-hours)"),
        (client_cli.app, "--working-hours=09:00-17:00", "use client.active_hours (--active-hours)"),
        (simulation_cli.app, "--wire", "use simulation.engine = grpc (--engine grpc)"),
        (simulation_cli.app, "--compile", "leave it out"),
        (client_cli.app, "--insecure", "it was two decisions: plain_text (--plain-text)"),
        (server_cli.app, "--insecure", "it was two decisions: plain_text (--plain-text)"),
    ],
)
def test_a_removed_flag_says_what_replaced_it(app: typer.Typer, flag: str, remedy: str) -> None:
    ended = CliRunner().invoke(app, [flag])
    assert ended.exit_code == 2
    assert f"was removed: {remedy}" in " ".join(ended.output.split())


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("client", "--tsk a.py", "No such option '--tsk'. Did you mean '--task'?"),
        ("simulate", "--roundz 3", "No such option '--roundz'. Did you mean '--rounds'?"),
        ("server", "--bogus", "No such option '--bogus'."),
        (
            "client",
            "--local-steps 3",
            "No such option '--local-steps'. --local-steps is an option of headwater-server and "
            "headwater-simulate" + LEAVE_OUT,
        ),
        (
            "server",
            "--data rows.csv",
            "No such option '--data'. --data is an option of headwater-client and "
            "headwater-simulate: a device's data stays on the device.",
        ),
        (
            "client",
            "--lerning-rate 1",
            "Did you mean '--learning-rate'? --learning-rate is an option of headwater-server and "
            "headwater-simulate" + LEAVE_OUT,
        ),
        ("server", "status --rout 3", "No such option '--rout'. Did you mean '--out'?"),
        ("server", "init --parts 3", "No such option '--parts'."),
        ("server", "init --port 8600", "writes it into server.toml as server.listen."),
        ("client", "chek", "No such command 'chek'. Did you mean 'check'?"),
        ("client", "--name a chek --part 1", "No such command 'chek'. Did you mean 'check'?"),
    ],
)
def test_an_unknown_word_is_answered_by_the_nearest_one_or_the_command_that_has_it(
    command: str, words: str, said: str
) -> None:
    app, path = COMMANDS[command]
    ended = CliRunner().invoke(app, [*path, *words.split()])
    assert ended.exit_code == 2
    assert ended.output.rstrip().endswith(said)
    assert ended.output.count("Did you mean") == said.count("Did you mean")


@pytest.mark.parametrize(
    ("command", "flag", "said"),
    [
        ("simulate", "--batch-size", "--effective-batch-size is what one step sums over all"),
        ("server", "--epochs", "--rounds N sets the length of a run; --local-epochs N trains"),
        ("client", "--leave", "--once ends the device with the run, as --leave did."),
        ("client", "--device", "All training is on the CPU; --threads N sets the threads."),
        ("client", "--model", "new_model of the task returns: --task FILE.py:CLASS."),
    ],
)
def test_a_word_of_another_tool_is_answered_by_what_stands_for_it_here(
    command: str, flag: str, said: str
) -> None:
    app, path = COMMANDS[command]
    ended = CliRunner().invoke(app, [*path, flag, "1"])
    assert ended.exit_code == 2
    assert said in ended.output
    assert "Did you mean" not in ended.output


@pytest.mark.parametrize("word", ["batch_size", "epochs", "device"])
def test_a_keyword_of_another_tool_is_answered_too(word: str) -> None:
    with pytest.raises(TypeError, match=rf"{word}: .*=N"):
        headwater.simulate("no_such_file.py:Task", **{word: 1})  # type: ignore[arg-type]
