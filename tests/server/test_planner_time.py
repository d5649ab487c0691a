"""When each device is foreseen to finish, and who is too slow for the deadline."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headwater.common.messages import MOST_STEPS
from headwater.common.settings import schema as settings
from headwater.server.planning import plan_reasons as reasons
from headwater.server.planning.device_estimates import DEADLINE_SHARE
from headwater.server.planning.planner import (
    LONGEST_FINISH_SECONDS,
    SHORTEST_FINISH_SECONDS,
    Device,
    Link,
    assign,
    too_slow,
)
from tests.server.planned import LINK, ROWS, device, devices_of, here_after, plan


@given(rows=ROWS, target=st.integers(1, 40_000), link=LINK)
@hypothesis_settings(deadline=None, max_examples=100)
def test_each_device_is_foreseen_to_finish_its_quota_when_its_plan_says(
    rows: list[dict[str, Any]], target: int, link: Link
) -> None:
    """In the share of its time that it gives; who has no more examples may take until T."""
    assigned = assign(devices_of(rows), plan(), target=target, link=link)
    for told in assigned.values():
        line, size = told.device.learned.line, told.micro_batch_size
        found = told.finish_seconds(size)
        if line is None:
            assert found is None
            continue
        ends = (math.ceil(told.quota / size) * line.base + told.quota * line.each) * told.slowed
        share = told.device.share
        is_full = told.quota in (told.device.num_left, MOST_STEPS * told.fitting)
        until = max(ends, share * told.free_seconds) if is_full else ends
        if SHORTEST_FINISH_SECONDS <= until <= LONGEST_FINISH_SECONDS:
            assert found == pytest.approx(until, rel=1e-9)
        else:
            assert found is None
        # No device is to go on behind T, but for the one example that is the least.
        assert told.quota == 1 or until <= share * told.free_seconds * (1 + 1e-5)


@pytest.mark.parametrize(
    ("one", "chosen"),
    [
        pytest.param(device(each=0.1), plan(accumulation_steps=20), id="K is set"),
        pytest.param(device(), plan(), id="its pace is not known"),
        pytest.param(device(each=1e-3), plan(), id="too soon to tell a pace by"),
        pytest.param(
            replace(device(each=0.1), asked_anyway="waited for a turn"), plan(), id="asked anyway"
        ),
    ],
)
def test_no_finish_is_told(one: Device, chosen: settings.PlanSettings) -> None:
    told = assign([one], chosen, target=90)["pi"]
    assert told.finish_seconds(told.micro_batch_size) is None


def test_the_finish_is_told_in_the_reason() -> None:
    told = assign([device(base=0.5, each=0.1, fastest_micro_batch_size=32)], plan(), target=90)[
        "pi"
    ]
    finish = told.finish_seconds(32)
    assert finish == pytest.approx(3 * 0.5 + 90 * 0.1)
    said = "speed-bound: 90 examples until 10.5 s; fastest measured: 32"
    assert reasons.of_plan(told, finish_seconds=finish) == said


def test_a_quota_cut_evenly_takes_the_time_of_its_own_micro_batches() -> None:
    told = assign([device(base=0.5, each=0.1, fastest_micro_batch_size=90)], plan(), target=90)[
        "pi"
    ]
    assert told.finish_seconds(told.micro_batch_size) == pytest.approx(0.5 + 9)
    assert told.finish_seconds(45) == pytest.approx(2 * 0.5 + 9)


@given(rows=ROWS, deadline=st.floats(1e-3, 1e4), link=LINK)
@hypothesis_settings(deadline=None, max_examples=100)
def test_who_is_not_too_slow_ends_in_its_share_of_the_deadline(
    rows: list[dict[str, Any]], deadline: float, link: Link
) -> None:
    link = Link(image_bytes=link.image_bytes, update_bytes=link.update_bytes)
    devices = devices_of([{**row, "each": row["each"] or 1e-3} for row in rows])
    able = [one for one in devices if not too_slow(one, deadline_seconds=deadline, link=link)]
    assigned = assign(able, plan(), target=512, deadline_seconds=deadline, link=link)
    for told in assigned.values():
        # A device that is not believed to be so fast may be thought too late with one example.
        if told.quota > 1 or not told.is_bounded:
            end = here_after(told, told.quota, link)
            assert end <= deadline * DEADLINE_SHARE * (1 + 1e-9)


def test_with_a_deadline_no_more_than_the_target_is_gathered() -> None:
    devices = [device(name, 10_000, each=0.001) for name in ("a", "b")]
    assigned = assign(devices, plan(), target=900, deadline_seconds=100.0)
    assert [told.quota for told in assigned.values()] == [450, 450]


@pytest.mark.parametrize("deadline_share", [DEADLINE_SHARE, 0.3])
def test_who_cannot_finish_one_example_in_time_is_too_slow_and_told_by_how_much(
    deadline_share: float,
) -> None:
    def found(seconds: float) -> str | None:
        one = device(each=seconds, deadline_share=deadline_share)
        why = too_slow(one, deadline_seconds=10.0, link=Link())
        return None if why is None else reasons.of_leaving_out(why)

    limit = 10 * deadline_share
    assert found(limit * 0.999) is None
    assert found(limit * 1.1) == f"one example takes {limit * 1.1:.1f} s of its {limit:.1f} s"


def test_transfers_turn_and_share_of_time_count_against_the_deadline() -> None:
    link = Link(image_bytes=1000, update_bytes=1000, turn_seconds=1.0)
    one = device(each=1.0, share=0.25, download_bytes_per_second=500, upload_bytes_per_second=1000)
    # 2 s down, 1 / 0.25 s of work, 1 s up and 1 s of its turn are 8 s.
    assert too_slow(one, deadline_seconds=8.9, link=link) is None
    found = too_slow(one, deadline_seconds=8.8, link=link)
    assert found is not None
    assert (found.seconds, found.of_seconds) == (8.0, 8.8 * DEADLINE_SHARE)


def test_without_a_deadline_or_a_known_pace_nobody_is_too_slow() -> None:
    assert too_slow(device(each=1e9), deadline_seconds=None, link=Link()) is None
    assert too_slow(device(each=None), deadline_seconds=1e-6, link=Link()) is None


def test_who_is_asked_anyway_is_asked_for_one_example() -> None:
    slow = replace(device("slow", each=60.0), asked_anyway="one example, though it is slow")
    assigned = assign(
        [device("fast", 1000, each=0.001), slow], plan(), target=100, deadline_seconds=10.0
    )
    assert [told.quota for told in assigned.values()] == [99, 1]
    assert reasons.of_plan(assigned["slow"]) == "one example, though it is slow; in one micro-batch"
