"""A member that answers each phase of a masked session at the last moment holds every round."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.server.flower.answers import FACTOR, FLOOR_SECONDS, Patience
from tests.processes import Processes, port_of, rows, write_task

DELAY = """

import time
from headwater.client.secagg.session import SecureSession

answer = SecureSession.answer


def answer_late(self, *asked):
    if self.device.name == "0":
        time.sleep({seconds})
    return answer(self, *asked)


SecureSession.answer = answer_late
"""


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_once_enough_have_answered_the_others_have_a_few_times_as_long() -> None:
    clock = Clock()
    patience = Patience(60.0, enough=3, clock=clock)
    for _ in range(3):
        assert patience.left_seconds == 160.0 - clock.now
        clock.now += 1.0
        patience.note_answer()
    assert patience.left_seconds == FACTOR * 2.0 - 3.0
    clock.now += 100.0
    assert patience.left_seconds == 0.0


@pytest.mark.parametrize(
    ("limit", "enough", "left"),
    [(60.0, 1, FLOOR_SECONDS), (1.0, 1, 1.0), (60.0, None, 60.0), (None, None, float("inf"))],
)
def test_answers_at_once_leave_the_others_a_floor_and_no_wait_is_beyond_its_limit(
    limit: float | None, enough: int | None, left: float
) -> None:
    patience = Patience(limit, enough=enough, clock=Clock())
    patience.note_answer()
    assert patience.left_seconds == left


@pytest.mark.slow
def test_a_member_that_holds_each_phase_is_left_out_after_three_rounds(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    path = Path(task.split(":")[0])
    path.write_text(path.read_text() + DELAY.format(seconds=3.0))
    masks = ("--secure-aggregation", "semi-honest")
    settings = ("--rounds", 4, "--accumulation-steps", 2, "--micro-batch-size", 8, *masks)
    with Processes(tmp_path) as processes:
        server = processes.server(*settings, "--min-clients", 4, task=task)
        port = port_of(server)
        parts = ("--num-parts", 5)
        slow, *others = [processes.client(port, i, *masks, *parts, task=task) for i in range(5)]
        for process in (server, *others):
            process.succeed()
        slow.wait()
    found = rows(tmp_path / "out")
    with_slow = [row for row in found if row["num_invited"] == 5]
    assert len(with_slow) <= 3
    assert [row["num_clients"] for row in found] == [4] * 4
    assert "too late" in found[-1]["left_out"]["0"]
