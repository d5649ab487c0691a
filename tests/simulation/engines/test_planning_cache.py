"""Cached planning functions return what the functions return, whatever changes between rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.messages import DeviceReport, Vitals
from headwater.common.model.parameters import build_model
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.planning.cohort import ConnectedClients, PopulationOrder, population_order
from headwater.server.planning.device_estimates import DeviceEstimate
from headwater.server.planning.round_plans import RoundPlanner
from headwater.server.planning.target_batch import Target
from headwater.simulation.engines.planning_cache import CachedOrder
from tests.tasks import TwoLayers

MIB = 2**20


def changed(one: DeviceEstimate, kind: str) -> DeviceEstimate:
    match kind:
        case "late":
            return replace(one, times_late=one.times_late + 1, deadline_share=0.5)
        case "in time":
            return replace(one, times_late=0, deadline_share=0.9)
        case "weak":
            return replace(one, vitals=one.vitals.model_copy(update={"share": 0.1}))
        case "tight":
            vitals = one.vitals.model_copy(update={"memory_limit_bytes": 40 * MIB})
            return replace(one, vitals=vitals)
    return replace(one, num_examples=7)


CHANGES = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["late", "in time", "weak", "tight", "poor"])),
    max_size=3,
)


def report(part: int) -> DeviceReport:
    vitals = Vitals(memory_limit_bytes=60 * MIB, base_bytes=10 * MIB, bytes_per_example=float(MIB))
    return DeviceReport(
        name=str(part),
        num_examples=100,
        layout_digest="d",
        vitals=vitals,
        seconds_per_micro_batch=0.1,
        seconds_per_example=2.0,
    )


def planner(chosen: Settings, order: PopulationOrder) -> RoundPlanner:
    layout = build_model(TwoLayers(), seed=0).layout
    target = Target(chosen.plan, max_weight_per_example=1)
    return RoundPlanner(chosen, target, layout, order)


@pytest.mark.parametrize(
    "chosen",
    [
        {"plan.accumulation_steps": 2},
        {"cohort.deadline_seconds": 40},
        {"cohort.deadline_seconds": 40, "cohort.size": 2},
    ],
)
@given(rounds=st.lists(CHANGES, min_size=2, max_size=6))
def test_rounds_with_caches_have_the_plans_of_rounds_without(
    chosen: dict[str, int], rounds: list[list[tuple[int, str]]]
) -> None:
    settings = load(None, chosen)
    planners = [planner(settings, CachedOrder()), planner(settings, population_order)]
    clients = ConnectedClients(reports={str(part): report(part) for part in range(4)})
    counted = {str(part): 0 for part in range(4)}
    for number, changes in enumerate(rounds, start=1):
        for one in planners:
            known = dict(one.known)
            for part, kind in changes:
                if str(part) in known:
                    known[str(part)] = changed(known[str(part)], kind)
            one.known.restore(known)
        cached, pure = (
            one.plan(clients, round_number=number, counted=counted, turn_seconds=0.0)
            for one in planners
        )
        assert cached == pure
        assert planners[0].known == planners[1].known


def test_the_order_of_a_lap_is_computed_again_if_the_lap_or_the_names_change() -> None:
    order, names = CachedOrder(), [str(n) for n in range(20)]
    for lap, known in ((0, names), (0, names), (1, names), (1, names[:10]), (1, list(names[:10]))):
        assert order(known, 3, lap) == population_order(known, 3, lap)
