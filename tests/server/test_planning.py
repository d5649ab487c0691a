"""Plans from round to round: what stays the same is kept, and what a device tells anew counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from common.parameters import build_model
from common.settings import Settings, load
from common.update import DeviceReport, Plan, Vitals
from server.planning import Planning
from server.target import Target
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
