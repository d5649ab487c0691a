"""Plans from round to round follow the clients' estimates and descriptions."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest

from headwater.common.errors import PrivacyBudgetSpent, TooFewPermitted
from headwater.common.estimates.linear_fit import Line
from headwater.common.messages import DeviceReport, Plan, Vitals
from headwater.common.model.parameters import build_model
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.planning.cohort import ConnectedClients
from headwater.server.planning.exclusions import owners_reasons
from headwater.server.planning.features import PlanningMoments, planning_features
from headwater.server.planning.plan_table import PlanTable
from headwater.server.planning.round_plans import RoundPlanner
from headwater.server.planning.target_batch import Target
from tests.tasks import TwoLayers

MIB = 2**20


def settings(**plan: int) -> Settings:
    return load(None, {f"plan.{key}": value for key, value in plan.items()})


def planning(chosen: Settings) -> RoundPlanner:
    layout = build_model(TwoLayers(), seed=0).layout
    target = Target(chosen.plan, max_weight_per_example=1)
    features: list[PlanningMoments] = [*planning_features(chosen, layout)]
    return RoundPlanner(chosen, target, layout, features=features)


def report(name: str, *, limit: int, number: int = 100) -> DeviceReport:
    vitals = Vitals(memory_limit_bytes=limit, base_bytes=10 * MIB, bytes_per_example=float(MIB))
    return DeviceReport(name=name, num_examples=number, layout_digest="d", vitals=vitals)


def plans(
    made: RoundPlanner,
    here: Mapping[str, DeviceReport],
    number: int,
    counted: Mapping[str, int] | None = None,
    described: Collection[str] = (),
    disconnected: Collection[str] = (),
) -> PlanTable:
    clients = ConnectedClients(reports=here, described=described, disconnected=disconnected)
    planned = made.plan(clients, round_number=number, counted=counted or {}, turn_seconds=0.0)
    return planned.plans


def asked(plan: Plan) -> tuple[int, int]:
    return plan.quota, plan.micro_batch_size


def test_all_that_are_excluded_are_without_part_in_a_round_that_some_sit_out() -> None:
    made = planning(settings())
    made.exclude({"liar": "it lied"}, round_number=2)
    assert made.sitting_out(round_number=3) == set()
    made.sit_out(["masked"], round_number=3)
    assert made.sitting_out(round_number=3) == {"liar", "masked"}
    assert made.sitting_out(round_number=4) == set()


def test_with_k_set_a_client_s_work_is_the_same_until_its_memory_changes() -> None:
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
    second = plans(made, here, 2, {"roomy": 1})
    assert {name: asked(plan) for name, plan in second.items()} == {
        name: asked(plan) for name, plan in first.items()
    }
    assert [second[name].counted_round for name in ("roomy", "tight")] == [1, None]
    assert {plan.round for plan in second.values()} == {2}
    # One client disconnects, and returns with less memory; the other stays as it is.
    plans(made, {"tight": here["tight"]}, 3, disconnected=["roomy"])
    back = {**here, "roomy": report("roomy", limit=40 * MIB)}
    fourth = plans(made, back, 4, described=["roomy"])
    assert {name: asked(plan) for name, plan in fourth.items()} == {
        "roomy": (44, 22),
        "tight": (44, 22),
    }
    # Clients with the same work share one plan.
    assert fourth["roomy"] is fourth["tight"]


def test_a_left_out_client_s_new_description_counts_as_soon_as_it_arrives() -> None:
    chosen = load(None, {"cohort.deadline_seconds": 40, "cohort.size": 1, "seed": 1})
    made = planning(chosen)
    slow = {"seconds_per_micro_batch": 100.0, "seconds_per_example": 1.0}
    fast = {"seconds_per_micro_batch": 0.1, "seconds_per_example": 0.1}
    here = {
        name: report(name, limit=60 * MIB).model_copy(update=speed)
        for name, speed in (("slow", slow), ("fast", fast))
    }
    plans(made, here, 1)
    plans(made, here, 2)
    assert made.known["slow"].is_outdated
    followed = Line(base=90.0, each=1.0)  # as measured when it was invited as an exception
    made.known.restore({**made.known, "slow": replace(made.known["slow"], line=followed)})
    for number in range(3, 9):  # in which each has its turn three times
        plans(made, here, number)
        assert made.known["slow"].line == followed
    again = {**here, "slow": here["slow"].model_copy(update=fast)}
    invited = [
        name
        for number in range(9, 13)
        for name in plans(made, again, number, described=["slow"] if number == 9 else ())
    ]
    assert invited.count("slow") == 2
    assert not made.known["slow"].is_outdated


def test_the_log_says_once_that_the_target_is_more_than_the_clients_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = planning(settings(effective_batch_size=150))
    one = {"a": report("a", limit=400 * MIB)}
    with caplog.at_level(logging.INFO):
        plans(made, {**one, "b": report("b", limit=400 * MIB)}, 1)
        assert not caplog.messages
        for number in (2, 3):
            plans(made, one, number)
    said = "round 2: the target is 150 examples; the data of 1 client allow 100"
    assert caplog.messages == [said]


def test_the_log_says_once_that_masked_quotas_are_cut_and_which_setting_allows_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chosen = load(None, {"plan.effective_batch_size": 512, "secure.aggregation": "semi-honest"})
    made = planning(chosen)
    here = {
        name: DeviceReport(
            name=name,
            num_examples=number,
            layout_digest="d",
            seconds_per_micro_batch=0.0,
            seconds_per_example=seconds,
        )
        for name, number, seconds in (("a", 500, 1e-3), ("b", 20, 1e-2), ("c", 20, 1e-2))
    }
    planned = plans(made, here, 1)
    plans(made, here, 2)
    num_examples = sum(plan.quota for plan in planned.values())
    assert num_examples < 100
    (said,) = [text for text in caplog.messages if "secure.max_share" in text]
    assert said.startswith(f"round 1: {num_examples} examples are planned instead of ")


def test_too_few_clients_whose_owners_allow_another_round_end_the_run_by_name() -> None:
    made = planning(load(None, {"cohort.min_clients": 2}))
    here = {name: report(name, limit=400 * MIB) for name in ("a", "b", "c")}
    plans(made, here, 1)
    made.exclude(owners_reasons({"b": PrivacyBudgetSpent("")}), round_number=1, is_by_owner=True)
    assert sorted(plans(made, here, 2)) == ["a", "c"]
    made.exclude(owners_reasons({"c": PrivacyBudgetSpent("")}), round_number=2, is_by_owner=True)
    with pytest.raises(TooFewPermitted) as caught:
        plans(made, here, 3)
    assert "round 3 needs 2 clients, and 1 of 3 may still take part" in caught.value.message
    assert "b: PrivacyBudgetSpent" in caught.value.message
    assert "c: PrivacyBudgetSpent" in caught.value.message
    # A device that connects again may have another limit.
    plans(made, {name: here[name] for name in ("a", "b")}, 3, disconnected=["b", "c"])


@pytest.mark.parametrize("was_counted", [True, False])
def test_a_client_that_is_away_is_waited_for_where_an_owner_allows_no_further_round(
    was_counted: bool,
) -> None:
    made = planning(load(None, {"cohort.min_clients": 1}))
    here = {name: report(name, limit=400 * MIB) for name in ("a", "b")}
    plans(made, here, 1)
    left = ConnectedClients(reports={"a": here["a"]}, described=[], disconnected=["b"])
    made.known.note_changes(left, counted=["b"] if was_counted else [], busy=())
    made.exclude(owners_reasons({"a": PrivacyBudgetSpent("")}), round_number=1, is_by_owner=True)
    assert made.counts(round_number=2)(here["a"]) is not was_counted
    assert made.counts(round_number=2)(here["b"])
