"""The law of secure aggregation: the masked sum is the plain fixed-point sum, bit for bit.

Whoever drops out, at whatever phase: what is opened is the sum over exactly those whose masked
update came, or the round is aborted by name and the next one succeeds.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.client.secagg.types import Floor
from headwater.common.errors import TooFewSurvivors
from headwater.common.secagg.fixed_point import RingBits, decode_mean
from headwater.common.secagg.graph import Mode, ceil_fraction
from headwater.common.secagg.hadamard_rotation import Rotation, steps_of, unrotate_in_place
from headwater.common.secagg.protocol import WEIGHT, SessionNumber, complete_threshold
from headwater.common.secagg.scalar_encoding import decode_scalars
from tests.faults import FaultPlan
from tests.secagg import ACTIONS, Cast, Played

Drops = dict[str, str | None]
"""Behind which phase a device vanishes: None before the first, a missing name never."""


def phases(mode: Mode) -> list[str]:
    return [action for action in ACTIONS if mode == "active" or action != "consistency"]


def plan_of(drops: Drops) -> FaultPlan:
    plan = FaultPlan()
    for name, after in drops.items():
        plan = plan.drop(client=name, after=after)
    return plan


def survivors(names: list[str], drops: Drops, mode: Mode) -> list[str] | None:
    """Return who must be in the sum of a complete graph, from the papers' rules; None: aborted."""

    def there(action: str) -> list[str]:
        return [
            name
            for name in names
            if name not in drops
            or (drops[name] is not None and ACTIONS.index(drops[name]) >= ACTIONS.index(action))
        ]

    threshold = complete_threshold(len(there("advertise_keys")), mode)
    u2, u3 = there("check_shares"), there("masked_update")
    if len(u2) < max(3, threshold) or len(u3) < max(3, threshold, ceil_fraction(0.7, len(u2))):
        return None
    enough = [action for action in phases(mode)[4:] if len(there(action)) >= threshold]
    return u3 if len(enough) == len(phases(mode)[4:]) else None


def check(cast: Cast, drops: Drops, expected: list[str] | None) -> None:
    """Play a session and hold what is opened against the plain sum."""
    if expected is None:
        with pytest.raises(TooFewSurvivors):
            cast.play(plan_of(drops))
        return
    opened = cast.play(plan_of(drops)).sum
    assert list(opened.survived) == expected
    plain_P, plain_scalars = cast.plain_sum(expected, opened)
    np.testing.assert_array_equal(opened.vector_P, plain_P)
    assert opened.numbers == decode_scalars(plain_scalars, opened.session.parameters.scalars)
    assert opened.numbers[WEIGHT] == sum(cast.parties[name].numbers[WEIGHT] for name in expected)


def random_drops(names: list[str], mode: Mode, *, seed: int, share: float) -> Drops:
    """Let each device vanish with the probability ``share``, at a random place."""
    random = np.random.default_rng(seed)
    places: list[str | None] = [None, *phases(mode)[:-1]]
    return {name: places[random.integers(len(places))] for name in names if random.random() < share}


QUICK = {3, 4, 5, 8, 9, 16, 17, 33, 40}
COHORTS = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in range(3, 41)]


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
@pytest.mark.parametrize("num_devices", COHORTS)
def test_masked_sum_equals_plain_sum_for_every_cohort(num_devices: int, mode: Mode) -> None:
    cast = Cast(num_devices, mode=mode, seed=num_devices)
    drops = random_drops(cast.names, mode, seed=num_devices, share=0.15)
    if survivors(cast.names, drops, mode) is None:
        drops = {}  # every cohort shows a sum; aborts are looked at below
    check(cast, drops, survivors(cast.names, drops, mode))


def every_pattern(num_devices: int, mode: Mode) -> list[Drops]:
    names = Cast(num_devices).names
    places: list[str | None] = [None, *phases(mode)]
    last = phases(mode)[-1]
    return [
        {name: place for name, place in zip(names, pattern, strict=True) if place != last}
        for pattern in itertools.product(places, repeat=num_devices)
    ]


@pytest.mark.slow
def test_every_dropout_pattern_of_three_and_four_devices_gives_the_sum_of_who_came() -> None:
    outcomes = []
    for num_devices in (3, 4):
        for number, drops in enumerate(every_pattern(num_devices, "semi-honest")):
            cast = Cast(num_devices, seed=number, num_values=2)
            expected = survivors(cast.names, drops, "semi-honest")
            outcomes.append(expected is None)
            check(cast, drops, expected)
    assert len(outcomes) == 6**3 + 6**4
    assert 0 < sum(outcomes) < len(outcomes)


def every_mix(num_devices: int, mode: Mode) -> list[Drops]:
    """Return a pattern for each way to fill the places, whoever of the devices has which."""
    order = np.random.default_rng(0)
    mixes: dict[tuple[str, ...], list[Drops]] = {}
    for drops in every_pattern(num_devices, mode):
        mixes.setdefault(tuple(sorted(map(str, drops.values()))), []).append(drops)
    return [alike[order.integers(len(alike))] for alike in mixes.values()]


@pytest.mark.slow
def test_every_dropout_pattern_of_three_devices_and_mix_of_four_holds_in_active_mode() -> None:
    """Who of four has which place is gone through in semi-honest mode."""
    patterns = {3: every_pattern(3, "active"), 4: every_mix(4, "active")}
    assert [len(each) for each in patterns.values()] == [7**3, math.comb(4 + 7 - 1, 4)]
    for num_devices, each in patterns.items():
        for number, drops in enumerate(each):
            cast = Cast(num_devices, mode="active", seed=number, num_values=2)
            check(cast, drops, survivors(cast.names, drops, "active"))


@settings(max_examples=settings().max_examples // 2)
@given(
    num_devices=st.integers(3, 12),
    mode=st.sampled_from(["semi-honest", "active"]),
    seed=st.integers(0, 2**31),
    share=st.sampled_from([0.0, 0.2, 0.4]),
)
def test_random_dropouts_give_the_sum_of_who_came(
    num_devices: int, mode: Mode, seed: int, share: float
) -> None:
    cast = Cast(num_devices, mode=mode, seed=seed)
    drops = random_drops(cast.names, mode, seed=seed, share=share)
    check(cast, drops, survivors(cast.names, drops, mode))


def sparse(num_devices: int, mode: Mode, *, assumed: float, **chosen: Any) -> Cast:
    floor = Floor(mode=mode, corrupted=assumed, dropout=assumed)
    return Cast(num_devices, mode=mode, floor=floor, corrupted=assumed, dropout=assumed, **chosen)


def check_sparse(cast: Cast, drops: Drops) -> None:
    played = cast.play(plan_of(drops))
    came = [
        name
        for name in cast.names
        if name not in drops or drops[name] in ACTIONS[ACTIONS.index("masked_update") :]
    ]
    assert list(played.sum.survived) == came
    assert played.sum.session.parameters.num_neighbours is not None
    plain_P, _ = cast.plain_sum(came, played.sum)
    np.testing.assert_array_equal(played.sum.vector_P, plain_P)


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_masked_sum_equals_plain_sum_on_a_sparse_graph(mode: Mode) -> None:
    cast = sparse(90, mode, assumed=0.05)
    drops = random_drops(cast.names, mode, seed=1, share=0.04)
    assert any(drops.values())  # not only before the session
    check_sparse(cast, drops)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["semi-honest", "active"])
@pytest.mark.parametrize("num_devices", [64, 300])
def test_masked_sum_equals_plain_sum_in_large_cohorts(num_devices: int, mode: Mode) -> None:
    cast = sparse(num_devices, mode, assumed=0.05)
    drops = random_drops(cast.names, mode, seed=num_devices, share=0.04)
    if num_devices <= 64:
        check(cast, drops, survivors(cast.names, drops, mode))
    else:
        check_sparse(cast, drops)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_masked_sum_equals_plain_sum_among_a_thousand() -> None:
    cast = sparse(1000, "semi-honest", assumed=0.05)
    check_sparse(cast, random_drops(cast.names, "semi-honest", seed=7, share=0.04))


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_the_next_round_succeeds_after_one_that_too_many_left(mode: Mode) -> None:
    cast = Cast(5, mode=mode)
    leaving = plan_of(dict.fromkeys(cast.names[:3], "check_shares"))
    played = Played()
    with pytest.raises(TooFewSurvivors, match="round 1, attempt 1: 2 devices"):
        cast.play_into(played, leaving)
    masked = [name for name in cast.names if cast.parties[name].is_spent]
    assert masked == cast.names[3:]

    cast.setup = replace(cast.setup, number=SessionNumber(2, 1))
    for number, name in enumerate(cast.names):  # all train on new examples, and remember the rest
        before = cast.parties[name]
        cast.join(
            replace(before.device, round=2, update_id=f"{name} 1"),
            weight=1 + number,
            seed=99 + number,
            record=before.record,
        )
    check(cast, {}, cast.names)


@pytest.mark.parametrize("ring_bits", [8, 16, 32])
def test_decoded_mean_is_within_the_stated_bound_of_the_float_mean(ring_bits: RingBits) -> None:
    num_devices, num_values = 6, 64
    random = np.random.default_rng(3)
    bounds = np.full(1, 4.0, np.float32)  # one block of 64
    seed = bytes(range(32))
    extra: dict[str, Any] = {}
    if ring_bits != 32:
        extra = {"ring_bits": ring_bits, "rotation_seed": seed, "rotation_bounds": bounds}
    cast = Cast(num_devices, num_values=num_values, clip=16.0, **extra)
    for party in cast.parties.values():  # nothing is clipped
        values = random.normal(0, 0.5 * party.numbers[WEIGHT], num_values).astype(np.float32)
        cast.give(party.device.name, values)
    opened = cast.play(FaultPlan().drop(client="d002", after="check_shares")).sum
    came = [cast.parties[name] for name in opened.survived]
    weight = int(opened.numbers[WEIGHT])
    assert weight == sum(party.numbers[WEIGHT] for party in came)
    assert opened.numbers["num_clipped"] == 0
    exact = np.sum([party.values_P.astype(np.float64) for party in came], axis=0) / weight

    encoding = opened.session.parameters.encoding
    mean = decode_mean(opened.vector_P, encoding=encoding, weight=weight)
    half_ulp = float(np.max(np.abs(exact))) * 2.0**-24
    if ring_bits == 32:
        largest = len(came) * 2.0 ** -(encoding.scale_bits + 1) / weight
        np.testing.assert_allclose(mean, exact, rtol=0, atol=largest + half_ulp)
        return
    rotation = Rotation(seed=seed, num_coordinates=num_values)
    unrotate_in_place(
        mean,
        rotation=rotation,
        bounds=bounds,
        max_weight=encoding.max_weight,
        ring_bits=ring_bits,
    )
    # A step of the rotated sum is bound x W / 32,767, or / 127; each device is off by less than
    # one. Turning back keeps the L2 norm. float32 adds 2 log2(64) roundings on either way.
    step = float(bounds[0]) * encoding.max_weight / steps_of(ring_bits) / weight
    slack = 24 * 2.0**-24 * float(np.linalg.norm(exact)) * len(came)
    assert np.linalg.norm(mean - exact) <= len(came) * step * math.sqrt(num_values) + slack
