"""A round that needs more clients than are simulated is refused with a remedy that helps."""

from __future__ import annotations

import pytest

from headwater.common.errors import SettingsError
from headwater.common.settings.sources import load
from headwater.simulation.fleet.fleet_spec import with_fleet

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
