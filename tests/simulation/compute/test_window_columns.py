"""Windows that are drawn for many devices are those that each draws for itself."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.client.training.micro_batches import MAX_SHORT, SamplerPosition, SamplerState, window
from headwater.common.messages import Plan
from headwater.simulation.compute.window_columns import windows_of
from headwater.simulation.fleet.devices import ClientPlan
from headwater.simulation.fleet.position_columns import PositionColumns

NUM_DEVICES = 6


@st.composite
def cohorts(draw: st.DrawFn) -> tuple[list[ClientPlan], PositionColumns, list[int]]:
    """Draw devices at any place of theirs, some of whose data sets are long, or shrank since."""
    called, walks, owned = [], PositionColumns(NUM_DEVICES), []
    for part in draw(st.permutations(range(NUM_DEVICES))):
        finish = draw(st.none() | st.just(5.0))
        plan = Plan(
            round=3,
            run_seed=draw(st.integers(0, 2)),
            model_version=2,
            quota=draw(st.integers(1, 40)),
            micro_batch_size=draw(st.integers(1, 9)),
            counted_round=draw(st.none() | st.just(2)),
            finish_seconds=finish,
        )
        places = [
            SamplerPosition(
                epoch=draw(st.integers(0, 3)), offset=draw(st.integers(0, MAX_SHORT + 40))
            )
            for _ in range(2)
        ]
        pending = draw(st.none() | st.just(2))
        walks[part] = SamplerState(place=places[0], pending_round=pending, pending_place=places[1])
        called.append(ClientPlan(str(part), part, plan))
        owned.append(draw(st.integers(1, MAX_SHORT + 30)))
    return called, walks, owned


@settings(deadline=None, max_examples=25)
@given(cohorts())
def test_the_windows_of_many_are_those_of_each(
    cohort: tuple[list[ClientPlan], PositionColumns, list[int]],
) -> None:
    called, walks, owned = cohort
    found = windows_of(called, walks, np.array(owned))
    for one, number, drawn in zip(called, owned, found, strict=True):
        plan = one.plan
        assert drawn == window(
            walks[one.part].settle(plan.counted_round).place,
            quota=plan.quota,
            num_more=plan.max_examples - plan.quota,
            run_seed=plan.run_seed,
            name=one.name,
            num_examples=number,
        )
