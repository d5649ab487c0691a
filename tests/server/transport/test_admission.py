"""A device is admitted with the run's task loaded, sent to load it, or refused by name."""

from __future__ import annotations

import pytest

from headwater.common.errors import TaskNotInstalled
from headwater.common.transport.wire_pb2 import Hello
from headwater.server.transport.admission import OtherTaskNeeded, check_task


@pytest.mark.parametrize(
    ("run", "loaded", "tasks", "error"),
    [
        ("Digits", "Digits", [], None),
        ("Digits", "Texts", [], None),  # its model's layout decides
        ("", "Texts", ["Texts"], None),
        ("Digits", "Digits", ["Digits", "Texts"], None),
        ("Digits", "Texts", ["Digits", "Texts"], OtherTaskNeeded),
        ("Digits", "Texts", ["Texts"], TaskNotInstalled),
        ("Digits", "Digits", ["Texts"], TaskNotInstalled),
    ],
)
def test_a_device_s_list_of_tasks_decides_whether_it_takes_part(
    run: str, loaded: str, tasks: list[str], error: type[Exception] | None
) -> None:
    hello = Hello(name="pi", task=loaded, tasks=tasks)
    if error is None:
        check_task(run, hello)
        return
    with pytest.raises(error, match="Digits"):
        check_task(run, hello)
