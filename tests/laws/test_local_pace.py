"""The number of local steps follows the device, as K does: its speed, its owner, deadline, memory.

Three devices train two rounds by a planner's plans; what the first shows sets the second's steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from headwater.client.device.interfaces import TimeShare
from headwater.client.features import train_round
from headwater.client.training.context import TrainingContext
from headwater.client.training.sampler import SamplerPosition, window
from headwater.common.errors import HeadwaterError, LateUpdate
from headwater.common.messages import DeviceReport, Plan, Update, Vitals
from headwater.common.model.parameters import build_model
from headwater.common.settings.sources import load
from headwater.server.local_training.local_round import local_round
from headwater.server.planning.cohort import ConnectedClients
from headwater.server.planning.features import planning_features
from headwater.server.planning.known_clients import Told
from headwater.server.planning.round_plans import RoundPlanner
from headwater.server.planning.target_batch import Target
from tests.plans import local_of
from tests.tasks import TwoLayers, examples
from tests.training_contexts import FakeClock, training_context

NAMES = ("one", "two", "three")
OWNED, STEPS, BATCH = 1000, 12, 10
SECONDS = 1.0  # of an example, as each device says


class Clock(FakeClock):
    """An example takes this many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.each = seconds

    def worked(self, size: float) -> None:
        self.now += self.each * size


class Rounds:
    """A planner, and three devices with as many examples."""

    def __init__(
        self, *, vitals: Mapping[str, Any] | None = None, deadline: float | None = None
    ) -> None:
        chosen = {"local.steps": STEPS, "local.batch_size": BATCH, "local.learning_rate": 2.0**-9}
        settings = load(None, {**chosen, "cohort.deadline_seconds": deadline})
        layout = build_model(TwoLayers(), seed=0).layout
        local = local_round(settings, num_parameters=layout.num_parameters)
        target = Target(settings.plan, max_weight_per_example=1, demand=local)
        self.planner = RoundPlanner(
            settings, target, layout, features=[*planning_features(settings, layout)]
        )
        self.reports = {
            name: DeviceReport(
                name=name,
                num_examples=OWNED,
                layout_digest="d",
                vitals=Vitals(**(vitals or {})) if name == "three" else Vitals(),
                seconds_per_micro_batch=0.0,
                seconds_per_example=SECONDS,
            )
            for name in NAMES
        }

    def plans(self) -> Mapping[str, Plan]:
        clients = ConnectedClients(reports=self.reports, described=(), disconnected=())
        return self.planner.plan(clients, round_number=1, counted={}, turn_seconds=0.0).plans

    def learn(self, updates: Mapping[str, Update], **refused: HeadwaterError) -> None:
        reports = [
            update.report.model_copy(update={"name": name}) for name, update in updates.items()
        ]
        self.planner.known.learn(NAMES, told=[Told.by(reports)], refused=refused)


def trained(plan: Plan, *, seconds: float = SECONDS, **more: Any) -> Update:
    context: TrainingContext = training_context(TwoLayers(), examples(OWNED), **more)
    context = replace(context, clock=Clock(seconds))
    taken = window(SamplerPosition(), quota=plan.quota, run_seed=0, name="pi", num_examples=OWNED)
    return train_round(plan, taken, context)


def test_a_device_that_became_slower_takes_fewer_steps_in_the_next_round() -> None:
    rounds = Rounds()
    first = rounds.plans()
    assert {local_of(plan).steps for plan in first.values()} == {STEPS}
    slow = {"three": 4 * SECONDS}  # hot, or busy otherwise
    rounds.learn(
        {name: trained(plan, seconds=slow.get(name, SECONDS)) for name, plan in first.items()}
    )
    second = rounds.plans()
    assert local_of(second["three"]).steps < STEPS < local_of(second["one"]).steps
    assert sum(plan.quota for plan in second.values()) == len(NAMES) * STEPS * BATCH


def test_a_device_whose_owner_gives_half_of_its_time_takes_half_of_the_steps() -> None:
    plans = Rounds(vitals={"share": 0.5}).plans()
    assert local_of(plans["three"]).steps == local_of(plans["one"]).steps // 2
    assert plans["three"].share == 0.5


def test_a_device_that_gets_hot_within_a_round_sends_the_steps_that_it_has_done() -> None:
    plan = Rounds().plans()["three"]
    shares = iter([1.0] * 5)

    def cooling() -> TimeShare:
        share = next(shares, 0.25)
        return TimeShare(share=share, reason="hot" if share < 1 else "quota")

    found = trained(plan, time_share=cooling).report
    assert (found.reason, found.local_steps) == ("hot", 5)  # a quarter of its 12 would be 3
    assert found.num_examples == 5 * BATCH


def test_a_device_that_was_late_takes_fewer_steps_before_the_same_deadline() -> None:
    rounds = Rounds(deadline=100.0)
    first = rounds.plans()
    assert {plan.quota for plan in first.values()} == {90}  # nine tenths of it, at a second each
    assert {local_of(plan).steps for plan in first.values()} == {9}
    updates = {name: trained(plan) for name, plan in first.items() if name != "three"}
    rounds.learn(updates, three=LateUpdate("three took 130 s"))
    second = rounds.plans()
    assert {name: local_of(plan).steps for name, plan in second.items()} == {
        "one": 9,
        "two": 9,
        "three": 5,
    }


def test_less_memory_cuts_a_step_into_more_micro_batches_and_takes_no_step_away() -> None:
    room = 4 * build_model(TwoLayers(), seed=0).layout.num_parameters  # of the copy of the start
    limit = int((1000 + room + 4 * 100) / 0.8) + 1
    vitals = {"memory_limit_bytes": limit, "base_bytes": 1000, "bytes_per_example": 100.0}
    plans = Rounds(vitals=vitals).plans()
    assert (plans["three"].micro_batch_size, plans["one"].micro_batch_size) == (4, BATCH)
    assert local_of(plans["three"]).steps == local_of(plans["one"]).steps == STEPS
    found = trained(plans["three"])
    assert [step.num_examples for step in found.report.steps] == [4, 4, 2] * STEPS
    torch.testing.assert_close(found.values_P, trained(plans["one"]).values_P, rtol=1e-4, atol=1e-3)
