"""Whatever networks, disks and signals do: the run ends, and its model is exactly what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import machines
from tests.chaos.runner import run
from tests.chaos.scenario import Scenario
from tests.chaos.scenarios import SHORT

pytestmark = pytest.mark.slow
LONG = "server killed, parted and stopped, with a standby"
"""A minute of three faults, each of which another scenario or a test of the standby has alone."""


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(one, marks=pytest.mark.long if one.name == LONG else ()) for one in SHORT],
    ids=lambda scenario: scenario.name,
)
def test_no_acknowledged_update_is_lost_or_counted_twice(
    scenario: Scenario, tmp_path: Path
) -> None:
    if scenario.needs is not None and not machines.can(scenario.needs):
        pytest.skip(f"this machine has no {scenario.needs}")
    run(scenario, tmp_path)
