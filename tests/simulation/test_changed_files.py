"""A run reads again what was changed since the run before it in the same process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headwater
from headwater.server.rounds.round_row import RoundRow
from tests.python_tasks import Signs

TASK = """
from tests.python_tasks import Signs
from beside_the_task import NUM_EXAMPLES

class Edited(Signs):
    def train_examples(self, *, data, part, num_parts):
        examples = super().train_examples(data=data, part=part, num_parts=num_parts)
        return [examples[at] for at in range(NUM_EXAMPLES)]
"""


@pytest.fixture(autouse=True)
def _modules_as_before() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def rows(task: Any = Signs, **changes: Any) -> list[RoundRow]:
    given = {"rounds": 1, "accumulation_steps": 100, "micro_batch_size": 1, **changes}
    return headwater.simulate(task, progress=False, **given).history


def fleet(file: Path, *, count: int) -> Path:
    file.write_text(f'[[device]]\nprofile = "laptop"\non_battery = 0.0\ncount = {count}\n')
    return file


def test_a_changed_fleet_is_simulated_as_it_is_now(tmp_path: Path) -> None:
    for count in (3, 7):
        file = fleet(tmp_path / "m.toml", count=count)
        assert rows(fleet=file)[0].num_clients == count


def test_changed_faults_are_those_of_the_next_run(tmp_path: Path) -> None:
    file = tmp_path / "faults.toml"
    for devices in ("[0]", "[0, 1]"):
        file.write_text(f"[[dropout]]\ndevices = {devices}\n")
        given = {"settings": {"simulation.faults": str(file)}, "cohort_size": 5}
        assert rows(clients=5, **given)[0].num_clients == 5 - len(eval(devices))


@pytest.mark.parametrize("edited", ["beside_the_task.py", "an_edited_task.py"])
def test_a_changed_task_or_file_beside_it_is_read_again(tmp_path: Path, edited: str) -> None:
    beside, file = tmp_path / "beside_the_task.py", tmp_path / "an_edited_task.py"
    beside.write_text("NUM_EXAMPLES = 3")
    file.write_text(TASK)
    assert rows(f"{file}:Edited", clients=2)[0].num_examples == 2 * 3
    (tmp_path / edited).write_text(
        (tmp_path / edited).read_text().replace("= 3", "= 7").replace("(NUM_", "(4 + NUM_")
    )
    assert rows(f"{file}:Edited", clients=2)[0].num_examples == 2 * 7
