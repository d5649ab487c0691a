"""Plans from round to round: what stays the same is kept, and what a device tells anew counts."""

from __future__ import annotations

from collections.abc import KeysView, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headwater.common.messages import DeviceReport, Plan, Vitals
from headwater.common.model.parameters import build_model
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.common.stats.linear_fit import Line
from headwater.server.planning.round_plans import Planning
from headwater.server.planning.target_batch import Target
from tests.tasks import TwoLayers

MIB = 2**20


def settings(**plan: int) -> Settings:
    return load(None, {f"plan.{key}": value for key, value in plan.items()})


def planning(chosen: Settings) -> Planning:
    layout = build_model(TwoLayers(), seed=0).layout
    return Planning(chosen, Target(chosen.plan, max_weight_per_example=1), layout)


def report(name: str, *, limit: int, number: int = 100) -> DeviceReport:
    vitals = Vitals(memory_limit_bytes=limit, base_bytes=10 * MIB, bytes_per_example=float(MIB))
    return DeviceReport(name=name, num_examples=number, layout_digest="d", vitals=vitals)


def plans(
    made: Planning,
    here: Mapping[str, DeviceReport],
    number: int,
    counted: Mapping[str, int] | None = None,
) -> dict[str, Plan]:
    planned = made.plan(here, round_number=number, counted=counted or {}, turn_seconds=0.0)
    return planned.plans


def asked(plan: Plan) -> tuple[int, int]:
    return plan.quota, plan.micro_batch_size


def test_with_k_set_a_device_is_asked_the_same_until_it_tells_something_else() -> None:
    chosen = settings(accumulation_steps=2, micro_batch_size=50)
    made = planning(chosen)
    # 0.8 of 60 MiB less 10 holds 38 examples of a MiB, of 40 MiB 22; two micro-batches of either.
    assert chosen.plan.memory_fraction == 0.8
    here = {"roomy": report("roomy", limit=60 * MIB), "tight": report("tight", limit=40 * MIB)}
    first = plans(made, here, 1)
    assert {name: asked(plan) for name, plan in first.items()} == {
        "roomy": (76, 38),
        "tight": (44, 22),
    }
    # The second round's plans are made from what the first one's were, with their own numbers.
    second = plans(made, here, 2, {"roomy": 1})
    assert {name: asked(plan) for name, plan in second.items()} == {
        name: asked(plan) for name, plan in first.items()
    }
    assert [second[name].counted_round for name in ("roomy", "tight")] == [1, None]
    assert {plan.round for plan in second.values()} == {2}
    # One goes, and comes back with less memory; the other stays as it is.
    plans(made, {"tight": here["tight"]}, 3)
    back = {**here, "roomy": report("roomy", limit=40 * MIB)}
    fourth = plans(made, back, 4)
    assert {name: asked(plan) for name, plan in fourth.items()} == {
        "roomy": (44, 22),
        "tight": (44, 22),
    }
    # What is the same for both is one plan.
    assert fourth["roomy"] is fourth["tight"]


def test_an_epoch_that_ends_cuts_the_quota_of_that_device_alone() -> None:
    made = planning(settings(accumulation_steps=2, micro_batch_size=20))
    here = {name: report(name, limit=400 * MIB) for name in ("a", "b")}
    assert {asked(plan) for plan in plans(made, here, 1).values()} == {(40, 20)}
    made.learned["b"] = replace(made.learned["b"], num_left=7)
    second = plans(made, here, 2)
    assert (asked(second["a"]), asked(second["b"])) == ((40, 20), (7, 7))


def test_who_is_asked_again_counts_as_soon_as_the_answer_is_here_and_not_before() -> None:
    chosen = load(None, {"cohort.deadline_seconds": 40, "cohort.size": 1, "seed": 1})
    made = planning(chosen)
    slow = {"seconds_per_micro_batch": 100.0, "seconds_per_example": 1.0}
    fast = {"seconds_per_micro_batch": 0.1, "seconds_per_example": 0.1}
    here = {
        name: report(name, limit=60 * MIB).model_copy(update=told)
        for name, told in (("slow", slow), ("fast", fast))
    }
    plans(made, here, 1)
    plans(made, here, 2)
    assert made.learned["slow"].is_outdated
    followed = Line(base=90.0, each=1.0)  # its pace when it was asked all the same
    made.learned["slow"] = replace(made.learned["slow"], line=followed)
    for number in range(3, 9):  # in which each has its turn three times
        plans(made, here, number)
        assert made.learned["slow"].line == followed
    again = {**here, "slow": here["slow"].model_copy(update=fast)}
    invited = [name for number in range(9, 13) for name in plans(made, again, number)]
    assert invited.count("slow") == 2
    assert not made.learned["slow"].is_outdated


class Same(dict[str, DeviceReport]):
    """Devices of which nobody comes or goes: what gives their names is the same object."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._keys = KeysView(self)

    def keys(self) -> Any:
        return self._keys


LEARNED = {
    "late": lambda one: one.late(),
    "in time": lambda one: one.in_time(),
    "weak": lambda one: replace(one, vitals=one.vitals.model_copy(update={"share": 0.1})),
    "tight": lambda one: replace(
        one, vitals=one.vitals.model_copy(update={"memory_limit_bytes": 40 * MIB})
    ),
    "ends its epoch": lambda one: replace(one, num_left=7),
}
NEWS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(sorted(LEARNED))), max_size=3)


@pytest.mark.parametrize(
    "chosen", [{"plan.accumulation_steps": 2}, {"cohort.deadline_seconds": 40}]
)
@given(rounds=st.lists(NEWS, min_size=2, max_size=6))
@hypothesis_settings(deadline=None, max_examples=60)
def test_a_cohort_of_the_same_devices_is_planned_as_if_nobody_had_been_met(
    chosen: dict[str, int], rounds: list[list[tuple[int, str]]]
) -> None:
    told = {"seconds_per_micro_batch": 0.1, "seconds_per_example": 2.0}
    here = {
        str(part): report(str(part), limit=60 * MIB).model_copy(update=told) for part in range(4)
    }
    kept, anew = planning(load(None, chosen)), planning(load(None, chosen))
    same, counted = Same(here), {str(part): 0 for part in range(4)}
    for number, news in enumerate(rounds, start=1):
        for made in (kept, anew):
            for part, kind in news if number > 1 else []:
                made.learned[str(part)] = LEARNED[kind](made.learned[str(part)])
        planned = [
            made.plan(reports, round_number=number, counted=counted, turn_seconds=0.0)
            for made, reports in ((kept, same), (anew, dict(here)))
        ]
        assert planned[0] == planned[1]
        assert (kept.learned, kept.owned) == (anew.learned, anew.owned)
