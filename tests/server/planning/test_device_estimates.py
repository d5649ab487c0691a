"""What is known of a device: news counts, the rest stays, and the checkpoint gives it back."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.messages import DeviceReport, Step, UpdateReport, Vitals
from headwater.common.stats.linear_fit import Line
from headwater.server.planning.device_estimates import (
    DEADLINE_SHARE,
    LEAST_SHARE,
    NOTHING,
    Learned,
    of_json,
    to_json,
)


def report(**changes: Any) -> DeviceReport:
    return DeviceReport.model_validate(
        {
            "name": "pi",
            "num_examples": 100,
            "layout_digest": "same",
            "seconds_per_micro_batch": 0.5,
            "seconds_per_example": 0.25,
            "fastest_micro_batch_size": 32,
            **changes,
        }
    )


def update(**changes: Any) -> UpdateReport:
    honest: dict[str, Any] = {
        "name": "pi",
        "round": 1,
        "num_examples": 4,
        "weight": 4,
        "loss_sum": 1.0,
        "micro_batch_size": 4,
        "seconds": 1.5,
        "steps": (step(4, 1.5),),
        "reason": "quota",
    }
    return UpdateReport.model_validate(honest | changes)


def step(size: int, seconds: float) -> Step:
    return Step(
        num_examples=size, weight=size, loss=0.0, gradient_norm=0.0, seconds=seconds, peak_bytes=0
    )


def test_a_newcomer_is_believed() -> None:
    known = NOTHING.told(report(vitals={"memory_limit_bytes": 2**30}))
    assert known.line == Line(base=0.5, each=0.25)
    assert known.fastest_micro_batch_size == 32
    assert known.vitals.memory_limit_bytes == 2**30
    assert not known.is_outdated


def test_what_it_tells_again_unasked_is_no_news() -> None:
    """A run that is taken up again asks everybody, and must plan as the unbroken one does."""
    known = NOTHING.told(report())
    assert known.told(report(seconds_per_example=9.0)) == known


def test_a_device_that_was_gone_tells_its_vitals_anew_and_keeps_its_pace() -> None:
    known = NOTHING.told(report(vitals={"battery": 0.9}))
    known = known.trained(update(steps=(step(4, 3.0),)))
    back = known.gone().told(report(vitals={"battery": 0.4}))
    assert back.vitals.battery == 0.4
    assert back.line == known.line != NOTHING.told(report()).line


def test_a_device_that_was_left_out_tells_its_pace_anew() -> None:
    known = NOTHING.told(report()).late().left_out(3)
    back = known.told(report(seconds_per_example=0.01, fastest_micro_batch_size=64))
    assert back.line == Line(base=0.5, each=0.01)
    assert back.fastest_micro_batch_size == 64
    assert back.deadline_share == DEADLINE_SHARE
    assert back.waiting_since == 3


def test_it_waits_since_the_first_round_that_it_was_left_out_of() -> None:
    known = NOTHING.left_out(3).left_out(4)
    assert known.waiting_since == 3
    assert known.asked().waiting_since is None
    assert known.asked().left_out(9).waiting_since == 9


def test_an_update_s_vitals_are_laid_over_what_is_known() -> None:
    known = NOTHING.told(report(vitals={"memory_limit_bytes": 2**30, "share": 0.5}))
    known = known.trained(update(vitals={"upload_bytes_per_second": 1e6}))
    assert known.vitals == Vitals(memory_limit_bytes=2**30, upload_bytes_per_second=1e6, share=1.0)


def test_a_pace_that_was_never_asked_for_is_not_made_up() -> None:
    told = report(seconds_per_micro_batch=None, seconds_per_example=None)
    assert NOTHING.told(told).trained(update()).line is None


@pytest.mark.parametrize(("told", "left"), [(None, None), (0, None), (1, 1), (60, 60)])
def test_what_its_epoch_has_left_is_what_it_told_and_all_at_an_epoch_s_start(
    told: int | None, left: int | None
) -> None:
    known = NOTHING.counted(update(num_left=7)).counted(update(num_left=told))
    assert known.num_left == left


def test_behind_a_window_without_an_update_the_place_is_not_known() -> None:
    assert NOTHING.counted(update(num_left=7)).skipped().num_left is None


def test_who_comes_late_trains_for_less_and_gets_time_back_slowly() -> None:
    known = NOTHING.late()
    assert known.deadline_share < DEADLINE_SHARE
    for _ in range(20):
        known = known.late()
    assert known.deadline_share == LEAST_SHARE
    once = known.in_time()
    assert LEAST_SHARE < once.deadline_share < 1.1 * LEAST_SHARE
    for _ in range(200):
        once = once.in_time()
    assert once.deadline_share == DEADLINE_SHARE


def test_times_late_are_counted_in_a_row() -> None:
    known = NOTHING.late().late()
    assert known.times_late == 2
    assert known.left_out(3).told(report()).times_late == 2
    assert known.in_time().times_late == 0
    assert known.in_time().late().times_late == 1


NUMBER = st.floats(0, 1e9)
LEARNED = st.builds(
    Learned,
    line=st.none() | st.builds(Line, base=NUMBER, each=NUMBER),
    fastest_micro_batch_size=st.none() | st.integers(1, 2**31),
    vitals=st.builds(
        Vitals,
        memory_limit_bytes=st.none() | st.integers(0, 2**53),
        bytes_per_example=st.none() | NUMBER,
        is_on_battery=st.none() | st.booleans(),
        share=st.floats(0.001, 1),
    ),
    num_left=st.none() | st.integers(1, 2**53),
    deadline_share=st.floats(LEAST_SHARE, DEADLINE_SHARE),
    waiting_since=st.none() | st.integers(1, 1000),
    is_outdated=st.booleans(),
)


@given(st.dictionaries(st.text("ab0", min_size=1, max_size=3), LEARNED, max_size=4))
def test_the_checkpoint_gives_back_what_was_learned_to_the_bit(known: dict[str, Learned]) -> None:
    assert of_json(json.loads(json.dumps(to_json(known)))) == known


def test_a_device_of_which_nothing_is_learned_takes_little_room() -> None:
    known = Learned(line=Line(base=math.pi, each=math.e), is_outdated=False)
    assert len(json.dumps(to_json({"pi": known}))) < 100
