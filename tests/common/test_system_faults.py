"""What the system refuses has one remedy, wherever its words show."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from headwater.common.errors import MissingData, StateError, TaskFailed, UnknownTask, system_remedy
from headwater.common.task import open_train_examples
from headwater.common.user_code.failures import running
from headwater.common.user_code.task_import import explained

FAULTS = {
    errno.EMFILE: "ulimit -n",
    errno.ENOSPC: "free space",
    errno.EACCES: "chmod",
    errno.EROFS: "read-only",
}


def failure(number: int, file: str = "somewhere") -> OSError:
    return OSError(number, os.strerror(number), file)


class Failing:
    """A task whose examples cannot be opened."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def train_examples(self, **_: object) -> object:
        raise self._error


@pytest.mark.parametrize(("number", "remedy"), FAULTS.items())
def test_a_fault_of_the_system_in_a_task_s_code_gets_its_own_remedy(
    number: int, remedy: str
) -> None:
    with pytest.raises(TaskFailed) as failed, running("loss_sum"):
        raise failure(number)
    assert remedy in failed.value.remedy
    with pytest.raises(UnknownTask) as unknown, explained(Path("task.py")):
        raise failure(number)
    assert remedy in unknown.value.remedy


@pytest.mark.parametrize("data", [None, Path("somewhere")])
@pytest.mark.parametrize(("number", "remedy"), FAULTS.items())
def test_a_fault_of_the_system_while_data_is_opened_asks_for_no_data(
    number: int, remedy: str, data: Path | None
) -> None:
    with pytest.raises((TaskFailed, MissingData)) as found:
        open_train_examples(Failing(failure(number)), data=data, part=0, num_parts=1)  # type: ignore[arg-type]
    assert remedy in found.value.remedy
    assert "--data" not in found.value.message + found.value.remedy


def test_an_error_that_quotes_the_system_gets_its_remedy_unless_it_has_one_of_its_own() -> None:
    text = f"state.json cannot be written: {os.strerror(errno.ENOSPC)}"
    assert "free space" in StateError(text).remedy
    assert StateError(text, remedy="another --out").remedy == "another --out"
    assert StateError("state.json is broken").remedy == StateError.remedy


def test_full_shared_memory_is_told_from_a_full_disk() -> None:
    torch_s = f"unable to write to file </torch_7_1>: {os.strerror(errno.ENOSPC)} (28)"
    assert "--shm-size" in (system_remedy(torch_s) or "")
    assert "--shm-size" not in (system_remedy(str(failure(errno.ENOSPC))) or "")
