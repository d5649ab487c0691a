"""A lying server sends a SuperNode two messages of one run at once: each starts a process.

A second process that decided by what was there before the first would answer a second survivor set,
and the difference of two opened sums is one member's update.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headwater.client.flower import one_message
from headwater.common.errors import DeviceBusy, SurvivorsChanged, UpdateNotHeld
from headwater.common.secagg.protocol import UnmaskRequest
from headwater.common.system.file_lock import try_lock
from tests.masked import RUN, FlowerDevice, ask, opening_of, plan, play, ready

pytestmark = pytest.mark.usefixtures("a_process_of_its_own")


@contextmanager
def another_process(device: FlowerDevice) -> Iterator[None]:
    """Answer a message for the device, as another of its processes would: it holds the lock."""
    with (device.folder / f"{device.name}-{RUN}.lock").open("r+") as file:
        assert try_lock(file.fileno())
        yield


def cohort_that_has_masked(folder: Path) -> list[FlowerDevice]:
    cohort = [FlowerDevice(part, folder / str(part)) for part in range(5)]
    for device in cohort:
        ready(device, plan())
    play(cohort, opening_of(cohort, plan()), until="masked_update")
    return cohort


def test_a_message_is_refused_while_another_is_being_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_message, "PATIENCE_SECONDS", 0.1)
    cohort = cohort_that_has_masked(tmp_path)
    names = tuple(device.name for device in cohort)
    with another_process(cohort[1]), pytest.raises(DeviceBusy):
        ask(cohort[1], UnmaskRequest(survived=names, dropped=()))
    assert ask(cohort[1], UnmaskRequest(survived=names, dropped=())).head


def test_what_waited_decides_by_what_the_other_process_has_written(tmp_path: Path) -> None:
    """The second has the node's context as it was before the first, as a SuperNode gives it."""
    cohort = cohort_that_has_masked(tmp_path)
    names = tuple(device.name for device in cohort)
    late, stale = FlowerDevice(1, cohort[1].folder), cohort[1].context_bytes
    late.context_bytes = stale
    found: list[BaseException] = []

    def ask_late() -> None:
        try:
            ask(late, UnmaskRequest(survived=names[1:], dropped=names[:1]))
        except BaseException as error:
            found.append(error)

    with another_process(cohort[1]):
        thread = threading.Thread(target=ask_late)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
    thread.join()
    assert not found  # the first that is answered
    with pytest.raises((SurvivorsChanged, UpdateNotHeld)):
        ask(cohort[1], UnmaskRequest(survived=names, dropped=()))
