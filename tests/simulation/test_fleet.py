"""The simulated fleet: the same machines on every engine, under a clock of their own."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from client.growth import Speed
from simulation.fleet import SimulatedMachine, VirtualClock
from simulation.profiles import PROFILES, device


def test_a_device_is_the_same_machine_whenever_it_is_drawn() -> None:
    first = [device(3, part) for part in range(20)]
    device.cache_clear()
    assert [device(3, part) for part in reversed(range(20))] == first[::-1]


def test_another_seed_draws_another_fleet() -> None:
    assert [device(3, part) for part in range(5)] != [device(4, part) for part in range(5)]


def test_the_profiles_have_their_shares() -> None:
    drawn = Counter(device(0, part).profile for part in range(4000))
    assert math.isclose(sum(profile.share for profile in PROFILES), 1)
    for profile in PROFILES:
        # Four standard deviations of a binomial count.
        deviation = math.sqrt(4000 * profile.share * (1 - profile.share))
        assert abs(drawn[profile.name] - 4000 * profile.share) <= 4 * deviation


def test_a_spread_stays_within_a_quarter() -> None:
    by_name = {profile.name: profile for profile in PROFILES}
    for part in range(200):
        drawn = device(1, part)
        profile = by_name[drawn.profile]
        assert 0.8 <= drawn.relative_speed / profile.relative_speed <= 1.25
        assert 0.79 <= drawn.memory_bytes / profile.memory_bytes <= 1.25


@pytest.mark.parametrize("sizes", [[], [1], [4, 4, 3]])
def test_virtual_time_is_a_line_in_the_micro_batches_and_examples(sizes: list[int]) -> None:
    speed = Speed(
        seconds_per_micro_batch=0.5,
        seconds_per_example=0.25,
        base_bytes=0,
        bytes_per_example=1.0,
        overhead_seconds=8.0,
    )
    clock = VirtualClock(speed)
    start = clock.seconds()
    for size in sizes:
        clock.worked(size)
    transfer = 8.0
    assert clock.seconds() - start == transfer + 0.5 * len(sizes) + 0.25 * sum(sizes)


def test_the_transfer_is_in_the_round_s_seconds_and_not_in_the_first_step_s() -> None:
    speed = Speed(
        seconds_per_micro_batch=0.5,
        seconds_per_example=0.25,
        base_bytes=0,
        bytes_per_example=1.0,
        overhead_seconds=8.0,
    )
    clock = VirtualClock(speed)
    round_start, step_start = clock.seconds(), clock.seconds()
    clock.worked(2)
    assert clock.seconds() - step_start == 0.5 + 2 * 0.25
    assert clock.seconds() - round_start == 8.0 + 0.5 + 2 * 0.25


def test_a_machine_reports_what_was_drawn() -> None:
    drawn = device(0, 7)
    machine = SimulatedMachine(drawn, 1000)
    assert machine.cores() == drawn.cores
    assert machine.memory_limit_bytes() == drawn.memory_bytes
