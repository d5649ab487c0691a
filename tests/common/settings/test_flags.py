from __future__ import annotations

import inspect

import pytest

from headwater.client import cli as client_cli
from headwater.common.errors import SettingsError
from headwater.common.settings.schema import load
from headwater.common.settings.sources import SETTING_OF, overrides
from headwater.server import cli as server_cli
from headwater.simulation import cli as simulation_cli

COMMANDS = [server_cli.serve, client_cli.take_part, client_cli.check, simulation_cli.simulate]
NOT_SETTINGS = {"context", "config", "resume", "verbose", "log_format", "show_partition"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_a_setting(command: object) -> None:
    assert callable(command)
    assert set(inspect.signature(command).parameters) - NOT_SETTINGS <= SETTING_OF.keys()


@pytest.mark.parametrize("dotted", SETTING_OF.values())
def test_every_setting_of_a_flag_is_in_the_tree(dotted: str) -> None:
    node = load(None, {})
    for key in dotted.split("."):
        node = getattr(node, key)


def test_flags_that_were_not_given_leave_the_settings_alone() -> None:
    assert load(None, overrides(dict.fromkeys(SETTING_OF))) == load(None, {})


def test_repeated_arguments_are_read_as_numbers_words_and_lists() -> None:
    given = {"optimizer_argument": ["momentum=0.9", "nesterov=true", "betas=0.9,0.99"]}
    assert overrides(given) == {
        "optimizer.arguments": {"momentum": 0.9, "nesterov": True, "betas": [0.9, 0.99]}
    }


def test_an_argument_without_its_value_is_named() -> None:
    with pytest.raises(SettingsError, match="KEY=VALUE"):
        overrides({"optimizer_argument": ["momentum"]})
