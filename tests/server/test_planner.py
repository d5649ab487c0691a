"""Quotas and micro-batches: bounded, enough, finished together, and proof against false claims."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from common import settings
from common.line import Line
from common.update import MOST_STEPS, Plan, Vitals
from server import reasons
from server.learned import DEADLINE_SHARE, Learned
from server.planner import (
    FARTHEST,
    LEAST_SHARE,
    LONGEST_FINISH_SECONDS,
    SHORTEST_FINISH_SECONDS,
    Assignment,
    Device,
    Link,
    SizeBound,
    assign,
    micro_batch_sizes,
    too_slow,
)

MIB = 2**20
VITALS = tuple(Vitals.model_fields)


def device(
    name: str = "pi",
    num_examples: int = 100,
    *,
    base: float = 0.0,
    each: float | None = None,
    **known: Any,
) -> Device:
    """Return a device of this pace; ``known`` are fields of its vitals, or of what is learned."""
    vitals = {key: known.pop(key) for key in VITALS if key in known}
    line = None if each is None else Line(base=base, each=each)
    learned = Learned(line=line, vitals=Vitals(**vitals), is_outdated=False, **known)
    return Device(name=name, num_examples=num_examples, learned=learned)


def plan(**changes: Any) -> settings.Plan:
    return settings.Plan.model_validate(changes)


def size_of(one: Device, chosen: settings.Plan) -> tuple[int, SizeBound]:
    sizes, bounds = micro_batch_sizes([one], chosen)
    return int(sizes[0]), bounds[0]


SECONDS = st.floats(1e-6, 1e3)
RATE = st.none() | st.floats(1e3, 1e9)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "num_examples": st.integers(1, 5000),
            "num_left": st.none() | st.integers(1, 6000),
            "base": st.just(0.0) | SECONDS,
            "each": st.none() | SECONDS,
            "fastest_micro_batch_size": st.none() | st.integers(1, 300),
            "share": st.just(1.0) | st.floats(0.01, 1),
            "upload_bytes_per_second": RATE,
            "download_bytes_per_second": RATE,
            "memory_limit_bytes": st.none() | st.integers(1, 4096 * MIB),
            "base_bytes": st.none() | st.integers(0, 300 * MIB),
            "bytes_per_example": st.none() | st.floats(0, 64 * MIB),
        }
    ),
    min_size=1,
    max_size=12,
)
LINK = st.builds(
    Link,
    image_bytes=st.integers(1, 10**8),
    update_bytes=st.integers(1, 10**8),
    turn_seconds=st.just(0.0) | st.floats(1e-6, 1.0),
)


def devices_of(rows: list[dict[str, Any]]) -> list[Device]:
    return [device(f"d{at}", **row) for at, row in enumerate(rows)]


def here_after(told: Assignment, quota: int, link: Link) -> float:
    """Return download + (ceil(q / m) a + q b) / share + upload, for who is believed."""
    vitals, line = told.device.learned.vitals, told.device.learned.line
    assert line is not None
    down, up = vitals.download_bytes_per_second, vitals.upload_bytes_per_second
    work = math.ceil(quota / told.fitting) * line.base + quota * line.each
    transfers = (link.image_bytes / down if down else 0) + (link.update_bytes / up if up else 0)
    return transfers + work * told.slowed / vitals.share


@given(rows=ROWS, target=st.integers(1, 40_000), size=st.none() | st.integers(1, 300), link=LINK)
@hypothesis_settings(deadline=None, max_examples=100)
def test_every_quota_is_within_its_bounds(
    rows: list[dict[str, Any]], target: int, size: int | None, link: Link
) -> None:
    devices = devices_of(rows)
    chosen = plan(micro_batch_size=size)
    assigned = assign(devices, chosen, target=target, link=link)
    assert list(assigned) == [one.name for one in devices]
    for one in devices:
        told = assigned[one.name]
        left = one.learned.num_left or one.num_examples
        assert 1 <= told.quota <= min(one.num_examples, left)
        assert 1 <= told.micro_batch_size <= told.quota
        assert told.micro_batch_size <= (size or chosen.max_micro_batch_size)
        assert math.ceil(told.quota / told.micro_batch_size) <= MOST_STEPS
        fastest = one.learned.fastest_micro_batch_size
        assert size or fastest is None or told.micro_batch_size <= fastest
        assert told.share == one.learned.vitals.share


@given(rows=ROWS, target=st.integers(1, 40_000), link=LINK)
@hypothesis_settings(deadline=None, max_examples=100)
def test_the_quotas_sum_to_the_target_or_take_all_there_is(
    rows: list[dict[str, Any]], target: int, link: Link
) -> None:
    assigned = assign(devices_of(rows), plan(), target=target, link=link).values()
    there_is = sum(min(told.device.num_left, MOST_STEPS * told.fitting) for told in assigned)
    total = sum(told.quota for told in assigned)
    assert total == min(max(target, len(rows)), there_is)


@given(rows=ROWS, target=st.integers(1, 40_000), link=LINK)
@hypothesis_settings(deadline=None, max_examples=100)
def test_no_device_is_done_early_that_could_have_taken_another_example(
    rows: list[dict[str, Any]], target: int, link: Link
) -> None:
    """Equal finish, with shares of time and transfers; turns have their own test."""
    link = Link(image_bytes=link.image_bytes, update_bytes=link.update_bytes)
    devices = devices_of([{**row, "each": row["each"] or 1e-3} for row in rows])
    assigned = assign(devices, plan(), target=target, link=link).values()
    last = max((here_after(a, a.quota, link) for a in assigned if a.quota > 1), default=0.0)
    for told in assigned:
        if told.quota < min(told.device.num_left, MOST_STEPS * told.fitting):
            # T is known to a millionth.
            assert here_after(told, told.quota + 1, link) >= last * (1 - 4e-6)


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


@given(
    rows=ROWS.filter(lambda rows: len(rows) > 1),
    target=st.integers(1, 40_000),
    more=st.floats(1, 100),
)
@hypothesis_settings(deadline=None, max_examples=100)
def test_a_device_with_more_memory_has_no_smaller_micro_batch(
    rows: list[dict[str, Any]], target: int, more: float
) -> None:
    before = size_of(devices_of(rows)[0], plan())[0]
    limit = rows[0]["memory_limit_bytes"]
    rows[0] = {**rows[0], "memory_limit_bytes": None if limit is None else int(limit * more)}
    assert size_of(devices_of(rows)[0], plan())[0] >= before


def test_with_a_deadline_no_more_than_the_target_is_gathered() -> None:
    devices = [device(name, 10_000, each=0.001) for name in ("a", "b")]
    assigned = assign(devices, plan(), target=900, deadline_seconds=100.0)
    assert [told.quota for told in assigned.values()] == [450, 450]


def test_a_device_twice_as_fast_gets_twice_the_quota() -> None:
    devices = [device("slow", 10_000, each=0.002), device("fast", 10_000, each=0.001)]
    assigned = assign(devices, plan(), target=900)
    assert (assigned["slow"].quota, assigned["fast"].quota) == (300, 600)


def test_a_device_that_gives_half_of_its_time_gets_half_the_quota_and_is_told_so() -> None:
    devices = [
        device("whole", 10_000, each=0.001),
        device("half", 10_000, each=0.001, share=0.5, is_on_battery=True),
    ]
    assigned = assign(devices, plan(), target=900)
    assert [told.quota for told in assigned.values()] == [600, 300]
    assert [told.share for told in assigned.values()] == [1.0, 0.5]
    assert "300 examples, giving 50% of its time on battery;" in reasons.of_plan(assigned["half"])


def test_a_device_with_a_slow_link_gets_less_by_what_its_transfers_take() -> None:
    link = Link(image_bytes=1000, update_bytes=500)
    devices = [
        device("near", 10_000, each=0.001),
        device("far", 10_000, each=0.001, download_bytes_per_second=10_000,
               upload_bytes_per_second=5_000),
    ]  # fmt: skip
    assigned = assign(devices, plan(), target=1000, link=link)
    # 0.1 s down and 0.1 s up are 200 examples, and a third of 0.6 s.
    assert [told.quota for told in assigned.values()] == [600, 400]
    assert "400 examples, its transfers 33% of the round;" in reasons.of_plan(assigned["far"])
    assert "transfers" not in reasons.of_plan(assigned["near"])


def test_a_device_whose_transfers_alone_outlast_the_others_is_link_bound() -> None:
    far = device("far", 1000, each=0.001, upload_bytes_per_second=1000)
    assigned = assign([device("near", 1000, each=0.001), far], plan(), target=501,
                      link=Link(update_bytes=2000))  # fmt: skip
    assert [told.quota for told in assigned.values()] == [500, 1]
    assert reasons.of_plan(assigned["far"]) == "link-bound: 1 example; in one micro-batch"


def test_uploads_come_one_turn_after_another_the_slowest_last() -> None:
    """Four devices alike in pace but for the last, turns of 10 ms: ten examples apart."""
    devices = [device(name, 10_000, each=0.001) for name in "abc"]
    devices.append(device("slow", 10_000, each=0.002))
    assigned = assign(devices, plan(), target=4000, link=Link(turn_seconds=0.01))
    quotas = {name: told.quota for name, told in assigned.items()}
    ends = {name: quotas[name] * (0.002 if name == "slow" else 0.001) for name in quotas}
    ordered = [ends[name] for name in ("slow", "a", "b", "c")]
    for later, earlier in pairwise(ordered):
        assert later - earlier == pytest.approx(0.01, abs=0.002)
    assert sum(quotas.values()) == 4000


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
def test_no_finish_is_told(one: Device, chosen: settings.Plan) -> None:
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


def test_a_turn_long_before_the_end_is_told() -> None:
    devices = [device(str(n), 10_000, each=0.001) for n in range(10)]
    assigned = assign(devices, plan(), target=1000, link=Link(turn_seconds=0.005))
    # T - 5.5 turns of 5 ms on the average are 100 ms: T is 127.5 ms, and ten turns 39 % of it.
    assert "speed-bound: 78 examples, its turn 39% before the end" in reasons.of_plan(assigned["9"])
    assert "turn" not in reasons.of_plan(assigned["0"])


def test_a_set_k_is_the_same_for_all_and_never_more_than_they_have_left() -> None:
    devices = [device("rich", 1000), device("poor", 5), device("late", 1000, num_left=7)]
    assigned = assign(devices, plan(accumulation_steps=3, micro_batch_size=4), target=512)
    assert [(a.quota, a.micro_batch_size, a.share) for a in assigned.values()] == [
        (12, 4, None),
        (5, 4, None),
        (7, 4, None),
    ]
    assert [reasons.of_plan(told) for told in assigned.values()] == [
        "K set to 3; micro-batch as set",
        "K set to 3; all its 5 examples; micro-batch as set",
        "K set to 3; all its epoch has left: 7 examples; micro-batch as set",
    ]


@pytest.mark.parametrize(("limit_mib", "fitting"), [(200, 6), (110, 1), (100, 1), (1, 1)])
def test_memory_bounds_the_micro_batch_and_says_so(limit_mib: int, fitting: int) -> None:
    # base + m x slope <= 0.8 x limit; one example is asked for in any case.
    one = device(
        each=1e-3,
        memory_limit_bytes=limit_mib * MIB,
        base_bytes=100 * MIB,
        bytes_per_example=10 * MIB,
    )
    assert fitting == max((limit_mib * 8 // 10 - 100) // 10, 1)
    assert size_of(one, plan()) == (fitting, SizeBound.MEMORY)
    told = assign([one], plan(), target=90)["pi"]
    examples = "1 example fits" if fitting == 1 else f"{fitting} examples fit"
    said = f"speed-bound: 90 examples; memory-bound: {examples} in {limit_mib} MiB"
    assert reasons.of_plan(told) == said


@given(st.integers(1, 4096 * MIB), st.integers(0, 512 * MIB), st.floats(1, 64 * MIB))
def test_what_is_planned_fits_the_memory_unless_it_is_one_example(
    limit: int, base: int, slope: float
) -> None:
    one = device(
        num_examples=10_000, memory_limit_bytes=limit, base_bytes=base, bytes_per_example=slope
    )
    size, _ = size_of(one, plan(max_micro_batch_size=10_000))
    assert size == 1 or base + size * slope <= 0.8 * limit * (1 + 1e-12)


def test_without_a_limit_the_micro_batch_is_the_maximum() -> None:
    assert size_of(device(num_examples=999), plan()) == (256, SizeBound.MAXIMUM)


def test_the_micro_batch_is_not_above_the_fastest_that_was_measured() -> None:
    told = assign([device(each=1e-3, fastest_micro_batch_size=32)], plan(), target=90)["pi"]
    assert (told.quota, told.micro_batch_size) == (90, 32)
    assert reasons.of_plan(told) == "speed-bound: 90 examples; fastest measured: 32"


def test_a_size_that_is_set_is_taken_though_another_is_faster() -> None:
    one = device(each=1e-3, fastest_micro_batch_size=32)
    assert size_of(one, plan(micro_batch_size=64)) == (64, SizeBound.SET)


def test_what_fits_in_one_micro_batch_is_not_accumulated() -> None:
    assigned = assign([device(num_examples=40)], plan(), target=512)["pi"]
    assert (assigned.quota, assigned.micro_batch_size) == (40, 40)
    assert reasons.of_plan(assigned) == "all its 40 examples; in one micro-batch"


def test_a_device_at_the_end_of_its_epoch_gives_what_is_left_and_others_the_rest() -> None:
    twins = [device(name, 100, each=1e-3, num_left=30) for name in ("a", "b")]
    assigned = assign([*twins, device("c", 1000, each=1e-3)], plan(), target=300)
    assert [told.quota for told in assigned.values()] == [30, 30, 240]
    said = reasons.of_plan(assigned["a"])
    assert said == "all its epoch has left: 30 examples; in one micro-batch"


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


def test_a_device_whose_pace_is_not_known_is_taken_for_the_median() -> None:
    devices = [device(str(n), 10_000, each=each) for n, each in enumerate((1e-3, 2e-3, 4e-3))]
    assigned = assign([*devices, device("unknown", 10_000)], plan(), target=4500)
    assert assigned["unknown"].quota == assigned["1"].quota


def test_a_hundred_thousand_devices_are_planned_to_the_target() -> None:
    devices = [
        device(
            str(n),
            1 + n % 977,
            each=1e-3 * (1 + n % 13),
            share=0.5 if n % 5 == 0 else 1.0,
            upload_bytes_per_second=1e5 * (1 + n % 7),
        )
        for n in range(100_000)
    ]
    link = Link(image_bytes=10**5, update_bytes=10**5, turn_seconds=1e-4)
    assigned = assign(devices, plan(), target=2_000_000, link=link)
    assert sum(told.quota for told in assigned.values()) == 2_000_000


EXTREMES: list[dict[str, Any]] = [
    {"each": 1e9},
    {"each": 1e-9},
    {"base": 1e9, "each": 1e-9},
    {"each": 1e-3, "download_bytes_per_second": 5e-324},
    {"each": 1e-3, "share": 5e-324},
    {"num_examples": 2**40, "each": 1e9},
    {"each": 1e-3, "memory_limit_bytes": 1, "bytes_per_example": 5e-324},
    {"each": 1e-3, "memory_limit_bytes": 0, "base_bytes": 2**53, "bytes_per_example": 5e-324},
    {"each": 1e-3, "memory_limit_bytes": 2**53, "bytes_per_example": 5e-324},
    {"each": 1e-3, "memory_limit_bytes": 2**30, "bytes_per_example": 1e99},
    {"each": 1e-3, "fastest_micro_batch_size": 1},
    {"each": 1e-3, "num_left": 2**53},
]
LINKED = Link(image_bytes=10**6, update_bytes=10**6)


@pytest.mark.parametrize("claim", EXTREMES, ids=str)
def test_what_one_device_claims_does_not_change_the_quotas_of_the_others(
    claim: dict[str, Any],
) -> None:
    honest = [device(f"d{n}", 1000, each=1e-3) for n in range(4)]
    alone = assign(honest, plan(), target=404, link=LINKED)
    assert {told.quota for told in alone.values()} == {101}
    liar = device("liar", **{"num_examples": 3, **claim})
    assigned = assign([*honest, liar], plan(), target=404, link=LINKED)
    assert {assigned[one.name].quota for one in honest} <= {100, 101}


@pytest.mark.parametrize("claim", EXTREMES, ids=str)
@pytest.mark.parametrize("deadline", [1e-6, 1.0, 2592000.0])
def test_what_one_device_claims_does_not_break_a_round_with_a_deadline(
    claim: dict[str, Any], deadline: float
) -> None:
    honest = device("honest", 10, each=1e-8)
    liar = device("liar", **{"num_examples": 3, **claim})
    if too_slow(liar, deadline_seconds=deadline, link=LINKED):
        liar = replace(liar, asked_anyway="due")
    assigned = assign([honest, liar], plan(), target=512, deadline_seconds=deadline, link=LINKED)
    assert assigned["honest"].quota == 10


@pytest.mark.parametrize("num_honest", [3, 7, 60])
def test_who_claims_to_be_instant_gets_at_most_farthest_times_the_median_s_quota(
    num_honest: int,
) -> None:
    honest = [device(f"d{n}", 10**6, each=1e-3) for n in range(num_honest)]
    liar = device("liar", 2**40, each=1e-9, memory_limit_bytes=2**53)
    target = 100 * (num_honest + int(FARTHEST))
    assigned = assign([*honest, liar], plan(), target=target)
    assert assigned["liar"].quota == pytest.approx(100 * FARTHEST, abs=1)
    assert {assigned[one.name].quota for one in honest} <= {100, 101}
    assert [one for one, told in assigned.items() if told.is_bounded] == ["liar"]
    # It says 1 ns and is taken for 1 ms / 32.
    assert "said to be 31,250 times as fast as is believed" in reasons.of_plan(assigned["liar"])


def test_an_honest_fleet_sixteen_times_apart_in_speed_and_in_memory_is_believed() -> None:
    """Small models are bound by dispatch: there a large micro-batch is worth as much as speed."""
    small = {"memory_limit_bytes": MIB, "bytes_per_example": MIB}
    devices = [device(f"s{n}", 1000, base=0.016, each=1e-5, **small) for n in range(9)]
    devices += [device(f"l{n}", 1000, base=0.001, each=6e-7) for n in range(8)]
    assigned = assign(devices, plan(), target=5000)
    assert {told.fitting for told in assigned.values()} == {1, 256}
    assert not any(told.is_bounded for told in assigned.values())


@pytest.mark.parametrize(("base", "fastest"), [(0.0, None), (0.0, 1), (0.01, None), (0.001, 8)])
def test_a_claim_is_held_against_a_median_device_with_the_same_micro_batch(
    base: float, fastest: int | None
) -> None:
    honest = [device(f"d{n}", 10**6, base=0.01, each=1e-3) for n in range(5)]
    liar = device("liar", 10**9, base=base, each=1e-9, fastest_micro_batch_size=fastest)
    told = assign([*honest, liar], plan(), target=30_000)["liar"]
    said, median = (Line(base=b, each=e).at(told.fitting) for b, e in ((base, 1e-9), (0.01, 1e-3)))
    assert told.slowed * said == pytest.approx(max(said, median / FARTHEST))
    assert told.is_bounded == (said < median / FARTHEST)


def test_a_fleet_in_which_examples_take_no_time_is_planned_all_the_same() -> None:
    devices = [device(f"d{n}", 1000, base=0.01, each=1e-9) for n in range(3)]
    assigned = assign([*devices, device("unknown", 1000)], plan(), target=2000)
    assert sum(told.quota for told in assigned.values()) == 2000
    assert not any(told.is_bounded for told in assigned.values())


def test_the_longest_reason_fits_into_a_plan() -> None:
    """All that can be said of one device at once, with the longest numbers."""
    told = Assignment(
        device=device(
            num_examples=2**40, each=1.0, share=0.25, is_on_battery=True, memory_limit_bytes=2**53
        ),
        quota=2**40 - 1,
        fitting=2**31,
        size_bound=SizeBound.MEMORY,
        slowed=1e30,
        ahead=0.5,
        transfers=0.99,
    )
    most = Plan.model_fields["reason"].metadata[0].max_length
    shown = reasons.of_plan(told, finish_seconds=LONGEST_FINISH_SECONDS)
    assert len(shown) + len(", cut to 2147483648 each to tell the noise") <= most
    for part in ("over a million", "on battery", "transfers", "turn", "memory-bound"):
        assert part in shown


def test_liars_below_half_of_the_cohort_cannot_move_what_is_believed_of_the_others() -> None:
    honest = [device(f"d{n}", 10**6, each=1e-3) for n in range(5)]
    liars = [device(f"l{n}", 10**6, each=1e9) for n in range(4)]
    assigned = assign([*honest, *liars], plan(), target=5004)
    assert {assigned[one.name].quota for one in honest} == {1000}
    assert {assigned[one.name].quota for one in liars} == {1}
    assert not any(told.is_bounded for told in assigned.values())


def test_a_device_that_gives_next_to_nothing_of_its_time_is_planned_for_the_least() -> None:
    told = assign([device(each=1e-3, share=5e-324)], plan(), target=1)["pi"]
    assert told.share == LEAST_SHARE
