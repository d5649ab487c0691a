"""A device takes part in a plan of example privacy only if it bounds what each example adds."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.client.privacy.example_unit import check_example_unit
from headwater.client.training.sampler import SamplerPosition, SamplerState
from headwater.common.errors import ExamplesForgotten, ProtocolMismatch
from headwater.common.messages import Plan
from tests.plans import plan_of

TERMS = {"norm_bound": 8.1, "noise_multiplier": 1.0, "example_bound": 1.0}
START = SamplerState()


def private(**changes: Any) -> Plan:
    fields = {"round": 3, "run_seed": 0, "model_version": 0, "quota": 8, "micro_batch_size": 4}
    return plan_of(**{**fields, "privacy": TERMS, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"local_steps": 2}, "local steps"),
        ({"algorithm": "fedprox"}, "a client algorithm"),
        ({"quota": 9}, "more examples"),
        ({"held_out_fraction": 0.5, "held_out": "group:label"}, "examples held out"),
    ],
)
def test_a_plan_that_bounds_no_example_is_refused_by_name(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ProtocolMismatch, match=says):
        check_example_unit(private(**changes), START, name="pi", has_local=False)


def test_parameters_that_stay_on_the_device_are_refused_by_name() -> None:
    with pytest.raises(ProtocolMismatch, match="stay on the device"):
        check_example_unit(private(), START, name="pi", has_local=True)


def test_a_device_that_lost_its_state_does_not_take_part_again() -> None:
    with pytest.raises(ExamplesForgotten, match="round 2"):
        check_example_unit(private(counted_round=2), START, name="pi", has_local=False)
    check_example_unit(private(), START, name="pi", has_local=False)


def test_a_device_knows_the_last_counted_round_until_the_next_one_counts() -> None:
    state = START.pend(1, SamplerPosition(offset=8))
    for counted in (None, 1):
        check_example_unit(private(counted_round=counted), state, name="pi", has_local=False)
    settled = state.settle(1).pend(2, SamplerPosition(offset=16))  # and round 2 is aborted
    again = settled.settle(1).pend(3, SamplerPosition(offset=16))
    for counted in (1, 3):
        check_example_unit(private(counted_round=counted), again, name="pi", has_local=False)
    with pytest.raises(ExamplesForgotten):
        check_example_unit(private(counted_round=2), again, name="pi", has_local=False)


def test_a_device_is_ahead_of_a_server_that_goes_on_from_an_older_checkpoint() -> None:
    state = SamplerState(place=SamplerPosition(offset=8), settled_round=6)
    ahead = state.pend(7, SamplerPosition(offset=16))
    for counted in (4, 6, 7):
        check_example_unit(private(counted_round=counted), ahead, name="pi", has_local=False)
