from __future__ import annotations

import itertools
import math

import pytest

from headwater.common.secagg.graph import Mode
from headwater.common.secagg.protocol import complete_threshold
from headwater.simulation.reports.session_aborts import STEPS, abort_probability


@pytest.mark.parametrize("num_devices", [3, 4, 5])
@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_the_chain_of_binomials_equals_the_sum_over_all_ways_to_vanish(
    num_devices: int, mode: Mode
) -> None:
    """Each device vanishes at step 0 (training) to 6 (unmask), or never (7)."""
    p, aborted = 0.3, 0.0
    for ways in itertools.product(range(STEPS + 1), repeat=num_devices):
        chance = math.prod(1 - p if way == STEPS else p / STEPS for way in ways)
        left = [sum(way > step for way in ways) for step in range(STEPS)]
        u1, u2, u3 = left[1], left[3], left[4]
        t = complete_threshold(u1, mode)
        goes_on = min(left[1:4]) >= max(3, t) and u3 >= max(3, t, math.ceil(0.7 * u2 - 1e-9))
        if not (goes_on and left[-1] >= t):
            aborted += chance
    found = abort_probability(num_devices, dropout=p, mode=mode, min_members=3, min_survivors=0.7)
    assert math.isclose(found, aborted, rel_tol=1e-9)


def test_no_session_aborts_if_no_device_vanishes() -> None:
    assert abort_probability(40, dropout=0.0, mode="active", min_members=3, min_survivors=0.7) == 0
