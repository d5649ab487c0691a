"""``headwater-simulate`` with bad input: a named error with its remedy, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.server.rounds.checkpoint import FILE
from tests.processes import Processes

TASK_FILE = """
from tests.tasks import TwoLayers, examples

class Empty(TwoLayers):
    def train_examples(self, *, data, part, num_parts):
        return examples(0)

class Mean(TwoLayers):
    def loss_sum(self, model, batch):
        loss, weight = super().loss_sum(model, batch)
        return loss / weight, weight
"""

SETTINGS_FILES = {"unknown.toml": "rouns = 3\n", "wrong.toml": "seed = 'many'\n"}

GOOD = ["--task", "tests/tasks.py:TwoLayers", "--clients", "2", "--rounds", "1"]

# The arguments ({here} is the test's folder), the error's name, words of its message and remedy.
CASES: dict[str, tuple[list[str], str, list[str]]] = {
    "data without a task": (["--data", "."], "SettingsError", ["no task", "--task"]),
    "data that do not exist": ([*GOOD, "--data", "a/*"], "MissingData", ["a/*", "in quotes"]),
    "unknown task file": (
        ["--task", "absent.py:Task"],
        "UnknownTask",
        ["absent.py", "correct the path"],
    ),
    "empty data set": (
        [*GOOD, "--task", "{here}/bad.py:Empty"],
        "EmptyDataset",
        ["no example", "check --data"],
    ),
    "a mean": ([*GOOD, "--task", "{here}/bad.py:Mean"], "TaskNotAdditive", ["never a mean"]),
    "missing settings file": (
        [*GOOD, "--config", "{here}/absent.toml"],
        "SettingsError",
        ["absent.toml", "see --help"],
    ),
    "unknown setting": (
        [*GOOD, "--config", "{here}/unknown.toml"],
        "SettingsError",
        ["unknown.toml: rouns", "docs/settings.md"],
    ),
    "setting of the wrong type": (
        [*GOOD, "--config", "{here}/wrong.toml"],
        "SettingsError",
        ["wrong.toml: seed", "'many'"],
    ),
    "rounds out of range": (
        [*GOOD, "--rounds", "0"],
        "SettingsError",
        ["rounds (--rounds): expected"],
    ),
    "unknown engine": ([*GOOD, "--engine", "spark"], "SettingsError", ["simulation.engine"]),
    "argument without a value": (
        [*GOOD, "--optimizer-argument", "momentum"],
        "SettingsError",
        ["KEY=VALUE"],
    ),
    "unknown optimizer": (
        [*GOOD, "--optimizer", "adamm"],
        "SettingsError",
        ["'adamm'", "AdamW"],
    ),
    "a deadline that the planner cannot keep": (
        [*GOOD, "--deadline", "1e-9"],
        "TooFewClients",
        ["0 of 1 client", "1 left out as too slow", "lengthen --deadline"],
    ),
    "a deadline that no device keeps": (
        [*GOOD, "--deadline", "1e-9", "--accumulation-steps", "2"],
        "TooFewClients",
        ["0 of 2 clients", "lengthen --deadline"],
    ),
    "the folder of another run": (
        [*GOOD, "--out", "{here}/other"],
        "SettingsError",
        ["already holds a checkpoint", "--resume"],
    ),
    "more clients asked for than there are": (
        [*GOOD, "--min-clients", "3"],
        "SettingsError",
        ["needs 3 clients", "--min-clients"],
    ),
}


EXIT_2 = {"SettingsError", "UnknownTask", "EmptyDataset", "MissingData"}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_bad_input_ends_with_a_named_error_its_remedy_and_its_status(
    tmp_path: Path, case: str
) -> None:
    arguments, name, words = CASES[case]
    (tmp_path / "bad.py").write_text(TASK_FILE)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / FILE).write_bytes(b"of another run")
    for file, text in SETTINGS_FILES.items():
        (tmp_path / file).write_text(text)
    command_line = [word.replace("{here}", str(tmp_path)) for word in arguments]
    status = 2 if name in EXIT_2 else 1
    with Processes(tmp_path / "processes") as processes:
        result = processes.complete(
            "simulation", "--out", tmp_path / "out", *command_line, status=status
        )
    assert "Traceback" not in result.stderr + result.stdout
    assert f"{name}: " in result.stderr
    assert "remedy: " in result.stderr
    assert [word for word in words if word not in result.stderr] == []
    assert (tmp_path / "other" / FILE).read_bytes() == b"of another run"
