"""A resumed run's settings: its own settings.toml, then --config, then the flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.common.errors import SettingsError
from headwater.common.settings.changes import changes, changes_text, values_of
from headwater.common.settings.schema import SETTINGS_FILE, Settings
from headwater.common.settings.sources import load, load_run

TASK = "my_task.py:MyTask"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with some settings of its own."""
    folder = tmp_path / "run"
    folder.mkdir()
    tree: dict[str, Any] = {
        "task": TASK,
        "rounds": 7,
        "seed": 3,
        "optimizer": {"name": "sgd", "learning_rate": 0.5, "arguments": {"momentum": 0.9}},
        "simulation": {"clients": 5},
    }
    (folder / SETTINGS_FILE).write_text(Settings.model_validate(tree).to_toml())
    return folder


def config(folder: Path, text: str) -> Path:
    file = folder / "more.toml"
    file.write_text(text)
    return file


def test_a_config_file_is_laid_over_the_run_s_own_settings_and_flags_over_both(run: Path) -> None:
    more = config(run.parent, "rounds = 8\nseed = 4\n[optimizer]\nlearning_rate = 0.25\n")
    found = load_run(more, {"out": run, "rounds": 9}, resume=True)
    assert (found.task, found.rounds, found.seed) == (TASK, 9, 4)
    assert (found.optimizer.name, found.optimizer.learning_rate) == ("sgd", 0.25)
    assert found.optimizer.arguments == {"momentum": 0.9}
    assert found.simulation.clients == 5


def test_arguments_that_a_layer_gives_replace_those_below(run: Path) -> None:
    more = config(run.parent, "[optimizer.arguments]\nnesterov = false\n")
    found = load_run(more, {"out": run}, resume=True)
    assert found.optimizer.arguments == {"nesterov": False}


def test_the_folder_may_be_named_in_the_config_file(run: Path) -> None:
    found = load_run(config(run.parent, f"out = '{run}'\n"), {}, resume=True)
    assert found.rounds == 7


def test_a_wrong_value_is_named_with_the_file_that_has_it(run: Path) -> None:
    more = config(run.parent, "rounds = 0\n")
    with pytest.raises(SettingsError, match=r"more\.toml: rounds"):
        load_run(more, {"out": run}, resume=True)
    (run / SETTINGS_FILE).write_text("rounds = 0\n")
    with pytest.raises(SettingsError, match=r"settings\.toml: rounds"):
        load_run(config(run.parent, f"task = '{TASK}'\n"), {"out": run}, resume=True)


def test_a_folder_without_a_run_and_without_a_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="there is no run to resume in") as caught:
        load_run(None, {"out": tmp_path / "typo", "rounds": 3}, resume=True)
    assert "--out" in caught.value.remedy
    assert load_run(None, {"out": tmp_path / "new", "task": TASK}, resume=True).task == TASK


def test_new_data_determine_the_number_of_devices_anew(run: Path) -> None:
    found = load_run(None, {"out": run, "simulation.data": "devices/*.csv"}, resume=True)
    assert "clients" not in found.simulation.model_fields_set


def test_changes_are_told_in_the_words_of_the_flags() -> None:
    first = {"task": TASK, "rounds": 10, "out": Path("a")}
    more = {"rounds": 20, "optimizer.learning_rate": 0.003, "plan.micro_batch_size": 8}
    before = values_of(load(None, first))
    after = values_of(load(None, first | more | {"out": Path("b"), "server.listen": "[::1]:9"}))
    assert changes_text(changes(before, after)) == (
        "rounds 10 → 20, learning rate 0.01 → 0.003, micro batch size not set → 8"
    )
    assert not changes(before, before)


def test_a_learning_rate_that_is_set_to_its_default_is_no_change() -> None:
    before, after = (
        values_of(load(None, given)) for given in ({}, {"optimizer.learning_rate": 0.01})
    )
    assert not changes(before, after)
