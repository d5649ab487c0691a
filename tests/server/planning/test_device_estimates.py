"""Estimates of a client: each event changes what it should, and the checkpoint restores them."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headwater.common.messages import DeviceReport, Step, UpdateReport, Vitals
from headwater.common.stats.linear_fit import Line
from headwater.server.planning.device_estimates import (
    DEADLINE_SHARE,
    MIN_SHARE,
    UNKNOWN_DEVICE,
    DeviceEstimate,
    from_json,
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


def test_a_new_client_is_believed() -> None:
    known = UNKNOWN_DEVICE.after_description(report(vitals={"memory_limit_bytes": 2**30}))
    assert known.line == Line(base=0.5, each=0.25)
    assert known.fastest_micro_batch_size == 32
    assert known.vitals.memory_limit_bytes == 2**30
    assert not known.is_outdated


def test_a_description_counts_only_if_the_estimate_is_outdated() -> None:
    """A resumed run asks all clients, and must plan as the unbroken run does."""
    known = UNKNOWN_DEVICE.after_description(report())
    assert known.after_description(report(seconds_per_example=9.0)) == known


def test_a_client_that_was_disconnected_has_new_vitals_and_keeps_its_speed() -> None:
    known = UNKNOWN_DEVICE.after_description(report(vitals={"battery": 0.9}))
    known = known.after_update(update(steps=(step(4, 3.0),)))
    back = known.after_disconnect().after_description(report(vitals={"battery": 0.4}))
    assert back.vitals.battery == 0.4
    assert back.line == known.line != UNKNOWN_DEVICE.after_description(report()).line


def test_a_client_that_was_left_out_has_a_new_speed() -> None:
    known = UNKNOWN_DEVICE.after_description(report()).after_late_update().after_leaving_out(3)
    back = known.after_description(report(seconds_per_example=0.01, fastest_micro_batch_size=64))
    assert back.line == Line(base=0.5, each=0.01)
    assert back.fastest_micro_batch_size == 64
    assert back.deadline_share == DEADLINE_SHARE
    assert back.waiting_since == 3


def test_a_client_waits_since_the_first_round_that_it_was_left_out_of() -> None:
    known = UNKNOWN_DEVICE.after_leaving_out(3).after_leaving_out(4)
    assert known.waiting_since == 3
    assert known.after_invitation().waiting_since is None
    assert known.after_invitation().after_leaving_out(9).waiting_since == 9


def test_the_vitals_of_an_update_replace_the_known_ones() -> None:
    known = UNKNOWN_DEVICE.after_description(
        report(vitals={"memory_limit_bytes": 2**30, "share": 0.5})
    )
    known = known.after_update(update(vitals={"upload_bytes_per_second": 1e6}))
    assert known.vitals == Vitals(memory_limit_bytes=2**30, upload_bytes_per_second=1e6, share=1.0)


def test_a_run_without_speeds_keeps_none() -> None:
    silent = report(seconds_per_micro_batch=None, seconds_per_example=None)
    assert UNKNOWN_DEVICE.after_description(silent).after_update(update()).line is None


def test_a_late_client_trains_for_less_time_and_gets_it_back_slowly() -> None:
    known = UNKNOWN_DEVICE.after_late_update()
    assert known.deadline_share < DEADLINE_SHARE
    for _ in range(20):
        known = known.after_late_update()
    assert known.deadline_share == MIN_SHARE
    once = known.after_timely_update()
    assert MIN_SHARE < once.deadline_share < 1.1 * MIN_SHARE
    for _ in range(200):
        once = once.after_timely_update()
    assert once.deadline_share == DEADLINE_SHARE


def test_times_late_are_counted_in_a_row() -> None:
    known = UNKNOWN_DEVICE.after_late_update().after_late_update()
    assert known.times_late == 2
    assert known.after_leaving_out(3).after_description(report()).times_late == 2
    assert known.after_timely_update().times_late == 0
    assert known.after_timely_update().after_late_update().times_late == 1


NUMBER = st.floats(0, 1e9)
ESTIMATES = st.builds(
    DeviceEstimate,
    line=st.none() | st.builds(Line, base=NUMBER, each=NUMBER),
    fastest_micro_batch_size=st.none() | st.integers(1, 2**31),
    vitals=st.builds(
        Vitals,
        memory_limit_bytes=st.none() | st.integers(0, 2**53),
        bytes_per_example=st.none() | NUMBER,
        is_on_battery=st.none() | st.booleans(),
        share=st.floats(0.001, 1),
    ),
    deadline_share=st.floats(MIN_SHARE, DEADLINE_SHARE),
    waiting_since=st.none() | st.integers(1, 1000),
    is_outdated=st.booleans(),
)


@given(st.dictionaries(st.text("ab0", min_size=1, max_size=3), ESTIMATES, max_size=4))
def test_the_checkpoint_restores_estimates_to_the_bit(known: dict[str, DeviceEstimate]) -> None:
    assert from_json(json.loads(json.dumps(to_json(known)))) == known


def test_a_checkpoint_of_an_earlier_version_still_loads() -> None:
    known = {"pi": DeviceEstimate(line=Line(base=0.5, each=0.25))}
    rows = {name: {**row, "num_left": 7} for name, row in to_json(known).items()}
    assert from_json(rows) == known


def test_an_estimate_at_its_defaults_takes_little_room() -> None:
    known = DeviceEstimate(line=Line(base=math.pi, each=math.e), is_outdated=False)
    assert len(json.dumps(to_json({"pi": known}))) < 100
