"""Refused devices: one line of the log for each reason, with the devices that have it."""

from __future__ import annotations

import pytest

from headwater.common.errors import LateUpdate, MissingData, TaskError
from headwater.server.refused_devices import MAX_LINES, RefusedDevices


def test_equal_reasons_are_logged_once_with_their_count_and_the_first_names(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = RefusedDevices()
    for part in range(7):
        refused.add(str(part), MissingData("no disk\n  at all"))
    refused.add("pi", LateUpdate("it is silent"))
    refused.add(None, LateUpdate("it left"))
    refused.log()
    refused.log()  # they are logged once
    assert caplog.messages == [
        "7 devices (0, 1, 2, 3, 4, ...) are refused: MissingData: no disk at all",
        "device pi is refused: LateUpdate: it is silent",
        "a device is refused: LateUpdate: it left",
    ]


def test_the_log_names_so_many_reasons_and_counts_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = RefusedDevices()
    for part in range(MAX_LINES + 2):
        refused.add(str(part), MissingData(f"no disk {chr(ord('a') + part)}"))
    refused.log()
    assert len(caplog.messages) == MAX_LINES + 1
    assert caplog.messages[-1] == "2 devices (10, 11) are refused, each for another reason"


def test_reasons_that_differ_in_names_and_numbers_share_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = RefusedDevices()
    for part in range(890):
        refused.add(f"pi{part}", MissingData(f"pi{part}: part {part} of 1,000 has no example"))
    refused.log()
    assert caplog.messages == [
        "890 devices (pi0, pi1, pi2, pi3, pi4, ...) are refused: MissingData: pi0: part 0 of 1,000 "
        "has no example"
    ]


def test_an_error_that_all_devices_share_is_raised_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = RefusedDevices()
    assert refused.take_error() is None
    errors = [MissingData("no disk"), MissingData("no disk")]
    for part, error in enumerate(errors):
        refused.add(str(part), error)
    assert refused.take_error() is errors[0]
    assert not caplog.messages


def test_of_a_traceback_the_line_has_the_last_place(caplog: pytest.LogCaptureFixture) -> None:
    refused = RefusedDevices()
    trace = '  File "task.py", line 48, in train_examples\n    return _read(data)'
    last = '  File "task.py", line 9, in _read\n    raise ValueError(cell)'
    refused.add("a", TaskError(f"line 5: 'abc' is not a number\n{trace}\n{last}"))
    refused.log()
    (line,) = caplog.messages
    assert line == (
        "device a is refused: TaskError: line 5: 'abc' is not a number "
        '(File "task.py", line 9, in _read)'
    )
