"""What a running client shows of its activity, in a terminal's line and in plain lines."""

from __future__ import annotations

import time

import pytest

from headwater.client.operations.activity import COMPUTING, WAITING, Activity
from headwater.client.operations.counters import Counters
from headwater.client.operations.display import ClientDisplay
from headwater.client.training.progress import TrainingProgress
from tests.plans import plan_of


def planned(**changes: object) -> Activity:
    """Return the activity of a client with a plan of K 8 x 32 in round 12, 4 and 12 MB moved."""
    activity = Activity(
        Counters(received_bytes=12_400_000, sent_bytes=4_100_000), TrainingProgress()
    )
    plan = plan_of(
        **{
            "round": 12,
            "run_seed": 0,
            "model_version": 0,
            "quota": 256,
            "micro_batch_size": 32,
            **changes,
        }
    )
    activity.progress.begin(plan)
    activity.begin("train")
    return activity


def reach(activity: Activity, num_steps: int, *, seconds: float, num_left_out: int = 0) -> None:
    activity.progress.reach(num_steps, 32 * num_steps, num_left_out)
    activity.progress.seconds = seconds


def block(activity: Activity, width: int = 80) -> list[str]:
    return [line.plain for line in ClientDisplay(activity).block(width)]


def test_computing_fits_one_line_of_80_columns() -> None:
    activity = planned()
    reach(activity, 3, seconds=3.0)
    assert block(activity) == [
        "round 12  micro-batch 4 of 8  96/256 examples, 32/s  down 12.4 MB, up 4.1 MB"
    ]


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_narrow_terminal_has_several_lines_and_loses_nothing(width: int) -> None:
    activity = planned()
    reach(activity, 3, seconds=3.0)
    lines = block(activity, width)
    for part in ("micro-batch 4 of 8", "96/256 examples, 32/s", "down 12.4 MB, up 4.1 MB"):
        assert any(part in line for line in lines)


def test_a_waiting_client_shows_its_last_round() -> None:
    activity = planned()
    reach(activity, 8, seconds=2.0)
    activity.enter(WAITING)
    assert block(activity) == [
        "round 12: K 8, 256 examples, 128/s  waits for a plan  down 12.4 MB, up 4.1 MB"
    ]
    activity.since = time.monotonic() - 90
    assert "waits for a plan since 90 s" in ClientDisplay(activity).wait_line()


def test_a_transfer_shows_its_bytes() -> None:
    activity = Activity(Counters(), TrainingProgress())
    activity.enter("receives the model", num_bytes=45_000_000)
    activity.num_moved = 12_000_000
    assert block(activity) == [
        "receives the model: 12.0 MB of 45.0 MB  down 0 bytes, up 0 bytes",
    ]


def test_the_line_of_a_sent_update_has_round_k_examples_pace_and_bytes() -> None:
    activity = planned()
    reach(activity, 8, seconds=2.0)
    line = "round 12: sent K 8, 256 examples, 128/s  2 s  down 12.4 MB, up 4.1 MB"
    assert ClientDisplay(activity).sent_line() == line


def test_examples_left_out_are_counted_while_computing_and_in_the_sent_line() -> None:
    activity = planned()
    reach(activity, 3, seconds=3.0, num_left_out=1200)
    assert "  1,200 left out  " in block(activity, width=100)[0]
    assert "  1,200 left out  " in ClientDisplay(activity).sent_line()


def test_of_a_masked_update_only_the_plan_is_shown() -> None:
    """The operator of the server may collect the log, and the masks hide what was summed."""
    activity = planned(is_masked=True)
    reach(activity, 3, seconds=2.0)
    for line in (ClientDisplay(activity).sent_line(), *block_of_a_waiting(activity)):
        assert "K 8, 256 examples" in line
        assert "96" not in line
        assert "/s" not in line
    assert "96" not in ClientDisplay(planned(is_masked=True)).wait_line()


def block_of_a_waiting(activity: Activity) -> list[str]:
    activity.enter(WAITING)
    return [ClientDisplay(activity).wait_line()]


@pytest.mark.parametrize(
    ("message_type", "stage"),
    [("train", COMPUTING), ("query.describe", "describes"), ("query.advertise", "secure session")],
)
def test_each_instruction_has_its_stage(message_type: str, stage: str) -> None:
    activity = Activity(Counters(), TrainingProgress())
    activity.begin(message_type)
    assert stage in ClientDisplay(activity).wait_line()


def test_a_text_of_the_server_is_shown_as_it_is() -> None:
    activity = Activity(Counters(), TrainingProgress())
    activity.enter("stays away: \x1b[2J [/x]")
    assert r"stays away: \x1b[2J [/x]" in block(activity)[0]
