"""The fleet of the settings: equal devices, and a number that a round can do with."""

from __future__ import annotations

from typing import Any

import pytest

import headwater
from headwater.common.errors import SettingsError
from headwater.common.settings.sources import load
from headwater.simulation.fleet.fleet_spec import fleet_spec, with_fleet
from tests.python_tasks import SIGNS

MASKS = {"secure.aggregation": "active"}


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"cohort.min_clients": 4}, "lower --min-clients, or raise --clients to 4"),
        (MASKS, "raise --clients to 3: a masked session has at least 3 members"),
        (MASKS | {"secure.min_members": 5}, "lower --min-members, on the server"),
        (MASKS | {"cohort.min_clients": 6}, "lower --min-clients, or raise --clients to 6"),
    ],
)
def test_the_remedy_is_one_that_the_settings_allow(given: dict[str, object], remedy: str) -> None:
    with pytest.raises(SettingsError) as caught:
        with_fleet(load(None, {"simulation.clients": 2, **given}))
    assert caught.value.remedy.startswith(remedy)


def test_equal_devices_differ_in_nothing_and_are_never_on_battery() -> None:
    settings = with_fleet(load(None, {"simulation.clients": 50, "simulation.fleet": "equal"}))
    devices = {fleet_spec(with_fleet(settings)).device(part) for part in range(50)}
    assert settings.simulation.clients == 50
    (device,) = devices
    assert device.on_battery == 0


def test_fedavg_on_equal_devices_passes_over_all_examples_in_each_round() -> None:
    given: dict[str, Any] = {"algorithm": "fedavg", "local_epochs": 2}
    run = headwater.simulate(SIGNS, clients=8, rounds=3, fleet="equal", progress=False, **given)
    assert [row.num_examples for row in run.history] == [2 * 8 * 40] * 3
