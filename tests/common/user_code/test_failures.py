"""An exception of the user's own code is shown with the user's own lines, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

from headwater.common.errors import MissingData, TaskFailed
from headwater.common.task import load_task, open_train_examples
from headwater.common.user_code.failures import MAX_FRAMES, described, running, user_frames

HERE = Path(__file__).name


def raises(number: int) -> None:
    if number == 0:
        raise KeyError("price")
    raises(number - 1)


def caught(number: int) -> Exception:
    try:
        raises(number)
    except KeyError as error:
        return error
    raise AssertionError


def test_the_text_has_file_line_function_and_code() -> None:
    lines = described(caught(0)).splitlines()
    assert lines[0] == "KeyError: 'price'"
    assert HERE in lines[-2]
    assert lines[-2].endswith("in raises")
    assert lines[-1] == '    raise KeyError("price")'


def test_a_deep_recursion_shows_its_first_and_its_last_frames() -> None:
    assert len(user_frames(caught(50))) == MAX_FRAMES


def test_a_fault_within_a_library_shows_the_user_s_line_that_called_it() -> None:
    with pytest.raises(TaskFailed) as failed, running("collate"):
        default_collate([torch.zeros(2), torch.zeros(3)])
    text = str(failed.value)
    assert text.startswith("collate failed: RuntimeError: stack expects each tensor to be equal")
    assert "default_collate([torch.zeros(2), torch.zeros(3)])" in text
    assert "site-packages" not in text


BROKEN = """
class Broken:
    def new_model(self): ...
    def loss_sum(self, model, batch): ...
    def train_examples(self, *, data, part, num_parts):
        table = {"cost": 3}
        return table["price"]

class Unreadable(Broken):
    def train_examples(self, *, data, part, num_parts):
        return [float(cell) for cell in ["3", "unknown"]]
"""


def test_a_fault_in_train_examples_is_the_task_s_and_shows_the_line(tmp_path: Path) -> None:
    path = tmp_path / "broken_task.py"
    path.write_text(BROKEN)
    with pytest.raises(TaskFailed, match=r"(?s)KeyError: 'price'.*broken_task\.py.*table\[.price"):
        open_train_examples(load_task(f"{path}:Broken"), data=None, part=0, num_parts=1)


def test_a_value_that_train_examples_cannot_read_shows_the_line(tmp_path: Path) -> None:
    path = tmp_path / "unreadable_task.py"
    path.write_text(BROKEN)
    with pytest.raises(MissingData, match=r"(?s)'unknown'.*unreadable_task\.py.*float\(cell\)"):
        open_train_examples(load_task(f"{path}:Unreadable"), data=None, part=0, num_parts=1)


def test_a_comprehension_is_shown_once_and_an_exception_never_raised_has_no_lines() -> None:
    with pytest.raises(TaskFailed) as failed, running("x"):
        [float(cell) for cell in ["unknown"]]
    assert str(failed.value).count("float(cell)") == 1
    assert described(ValueError("made")) == "ValueError: made"
