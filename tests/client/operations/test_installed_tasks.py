"""A device trains the tasks that its owner has installed, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.client.operations.installed_tasks import installed_tasks, own_task, with_task
from headwater.common.errors import SettingsError, TaskNotInstalled
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load

FIRST = {
    "task": "digits.py:Digits",
    "client.data": "pixels",
    "client.tasks": ["Texts=words/texts.py:Texts", "Tables=tables.py:Wide"],
    "client.task_data": "Texts=/srv/texts",
}


def device(**changes: object) -> Settings:
    return load(None, {**FIRST, **changes})


def test_a_device_with_one_task_lists_none() -> None:
    assert installed_tasks(load(None, {"task": "digits.py:Digits"})) == ()


def test_a_device_lists_its_own_task_and_the_others_by_name() -> None:
    assert installed_tasks(device()) == ("Digits", "Tables", "Texts")


def test_another_task_comes_with_its_own_data_or_the_device_s() -> None:
    texts, tables = with_task(device(), "Texts"), with_task(device(), "Tables")
    assert (texts.task, texts.client.data) == ("words/texts.py:Texts", Path("/srv/texts"))
    assert (tables.task, tables.client.data) == ("tables.py:Wide", Path("pixels"))
    assert [own_task(one) for one in (device(), texts, tables)] == ["Digits", "Texts", "Tables"]
    assert installed_tasks(tables) == installed_tasks(device())


def test_a_device_returns_to_the_task_that_it_was_started_with() -> None:
    assert with_task(device(), "Digits") == device()


def test_a_task_that_is_not_installed_is_refused_by_its_name() -> None:
    with pytest.raises(TaskNotInstalled, match="'Pictures'; this device has Digits, Tables, Texts"):
        with_task(device(), "Pictures")


@pytest.mark.parametrize("tasks", ["Texts", "Texts=", "=a.py:A", "a b=c.py:C", "A=b.py:B,A=c.py:C"])
def test_a_list_that_names_no_task_is_refused(tasks: str) -> None:
    with pytest.raises(SettingsError, match="--also-task"):
        device(**{"client.tasks": tasks, "client.task_data": None})


def test_data_for_a_task_that_is_not_listed_are_refused() -> None:
    with pytest.raises(SettingsError, match="Pictures is none of the tasks"):
        device(**{"client.task_data": "Pictures=/srv/pictures"})
