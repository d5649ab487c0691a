"""Drawn devices, the virtual clock, and the vitals that virtual hardware reports."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from headwater.client.device.interfaces import Speed, TimeShare
from headwater.common.settings.schema import ClientSettings
from headwater.simulation.fleet.profiles import (
    PROFILE_SHARES,
    PROFILES,
    SimulatedDevice,
    draw_device,
)
from headwater.simulation.fleet.virtual_hardware import VirtualClock, VirtualHardware


def test_a_device_is_the_same_in_every_draw() -> None:
    first = [draw_device(3, part) for part in range(20)]
    draw_device.cache_clear()
    assert [draw_device(3, part) for part in reversed(range(20))] == first[::-1]


def test_another_seed_draws_another_fleet() -> None:
    assert [draw_device(3, part) for part in range(5)] != [
        draw_device(4, part) for part in range(5)
    ]


def test_the_profiles_have_their_shares() -> None:
    drawn = Counter(draw_device(0, part).profile for part in range(4000))
    assert math.isclose(sum(PROFILE_SHARES), 1)
    for profile, share in zip(PROFILES, PROFILE_SHARES, strict=True):
        # Four standard deviations of a binomial count.
        deviation = math.sqrt(4000 * share * (1 - share))
        assert abs(drawn[profile.profile] - 4000 * share) <= 4 * deviation


def test_a_spread_stays_within_a_quarter() -> None:
    by_name = {profile.profile: profile for profile in PROFILES}
    for part in range(200):
        drawn = draw_device(1, part)
        profile = by_name[drawn.profile]
        assert 0.8 <= drawn.relative_speed / profile.relative_speed <= 1.25
        assert 0.79 <= drawn.memory_bytes / profile.memory_bytes <= 1.25


def clock_of_a_line(transfer_seconds: float) -> VirtualClock:
    speed = Speed(seconds_per_micro_batch=0.5, seconds_per_example=0.25)
    return VirtualClock(speed, transfer_seconds=transfer_seconds)


@pytest.mark.parametrize("sizes", [[], [1], [4, 4, 3]])
def test_virtual_time_is_linear_in_micro_batches_and_examples(sizes: list[int]) -> None:
    clock = clock_of_a_line(8.0)
    start = clock.seconds()
    for size in sizes:
        clock.worked(size)
    assert clock.seconds() - start == 8.0 + 0.5 * len(sizes) + 0.25 * sum(sizes)


def test_the_transfer_counts_in_the_round_s_seconds_and_not_in_the_first_step_s() -> None:
    clock = clock_of_a_line(8.0)
    round_start, step_start = clock.seconds(), clock.seconds()
    clock.worked(2)
    assert clock.seconds() - step_start == 0.5 + 2 * 0.25
    assert clock.seconds() - round_start == 8.0 + 0.5 + 2 * 0.25


def test_model_and_update_travel_at_the_link_s_rate() -> None:
    drawn = draw_device(0, 7)
    machine = VirtualHardware(drawn, 1000)
    start = machine.clock.seconds()
    assert machine.clock.seconds() - start == 2 * 4 * 1000 / drawn.upload_bytes_per_second


def test_hardware_reports_the_device_s_figures() -> None:
    drawn = draw_device(0, 7)
    machine = VirtualHardware(drawn, 1000)
    vitals = machine.vitals()
    assert machine.cores() == drawn.cores
    assert vitals.memory_limit_bytes == machine.memory.limit_bytes() == drawn.memory_bytes
    assert vitals.upload_bytes_per_second == drawn.upload_bytes_per_second
    assert vitals.download_bytes_per_second == drawn.upload_bytes_per_second


LAPTOP = SimulatedDevice(
    profile="laptop",
    cores=8,
    relative_speed=1.0,
    memory_bytes=2**30,
    upload_bytes_per_second=1e6,
    on_battery=0.5,
)


def test_a_device_on_battery_reports_it_and_uses_its_owner_s_share() -> None:
    machine = VirtualHardware(
        LAPTOP, 10, is_on_battery=True, client_settings=ClientSettings(battery_share=0.3)
    )
    assert (machine.vitals().is_on_battery, machine.vitals().share) == (True, 0.3)
    assert machine.time_share() == TimeShare(share=0.3, reason="on battery")


def test_a_device_on_mains_uses_all_its_time_and_one_without_battery_reports_none() -> None:
    on_mains = VirtualHardware(LAPTOP, 10)
    assert (on_mains.vitals().is_on_battery, on_mains.time_share()) == (False, TimeShare())
    without = VirtualHardware(replace(LAPTOP, on_battery=0.0), 10)
    assert without.vitals().is_on_battery is None
