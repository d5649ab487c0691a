"""Local training under the planner: every device takes the steps that the settings name, no fewer.

A round is compared with FedAvg as McMahan et al. 2017 write it (algorithm 1): plain loops of torch
over the planned examples, and the mean of the devices' models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwater
from headwater.client.features import train_round
from headwater.client.training.context import TrainingContext
from headwater.client.training.sampler import SamplerPosition, window
from headwater.common.estimates.linear_fit import Line
from headwater.common.local_training.local_terms import LocalTerms
from headwater.common.messages import DeviceReport, Plan, Update, Vitals
from headwater.common.model.parameters import build_model
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.local_training.local_round import local_round
from headwater.server.planning.cohort import ConnectedClients
from headwater.server.planning.features import planning_features
from headwater.server.planning.round_plans import RoundPlanner
from headwater.server.planning.target_batch import Target
from tests.plans import changed, local_of
from tests.python_tasks import Signs
from tests.tasks import TwoLayers, examples
from tests.training_contexts import FakeMemory, training_context
from tests.training_contexts import plan as plan_of
from tests.training_contexts import trained as trained_whole

RATE = 2.0**-6
OWNED = {"one": 24, "two": 12, "three": 40}


def chosen(**given: Any) -> Settings:
    return load(None, {key.replace("__", "."): value for key, value in given.items()})


def planned(
    settings: Settings,
    *,
    owned: Mapping[str, int] = OWNED,
    seconds: Mapping[str, float] | None = None,
    **more: Any,
) -> Mapping[str, Plan]:
    """Return the plans of round 1; ``seconds`` are those of an example on each device."""
    layout = build_model(TwoLayers(), seed=0).layout
    local = local_round(settings, num_parameters=layout.num_parameters)
    target = Target(settings.plan, max_weight_per_example=1, demand=local)
    reports = {
        name: DeviceReport(
            name=name,
            num_examples=number,
            layout_digest="d",
            vitals=Vitals(**more),
            seconds_per_micro_batch=0.0,
            seconds_per_example=(seconds or {}).get(name, 0.01),
        )
        for name, number in owned.items()
    }
    clients = ConnectedClients(reports=reports, described=(), disconnected=())
    planner = RoundPlanner(
        settings, target, layout, features=[*planning_features(settings, layout)]
    )
    return planner.plan(clients, round_number=1, counted={}, turn_seconds=0.0).plans


def trained(plan: Plan, name: str) -> Update:
    data = examples(OWNED[name], seed=len(name))
    context = training_context(TwoLayers(), data)
    return train_round(plan, taken(plan, name), context)


def taken(plan: Plan, name: str) -> Any:
    return window(
        SamplerPosition(), quota=plan.quota, run_seed=0, name=name, num_examples=OWNED[name]
    )


def by_plain_loop(plan: Plan, name: str, batches: Sequence[Sequence[int]], mu: float) -> Tensor:
    """Return weight x (parameters before - after) of plain SGD over these batches."""
    task, data = TwoLayers(), examples(OWNED[name], seed=len(name))
    model = training_context(task, data).image.model
    start = [value.detach().clone() for value in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=local_of(plan).learning_rate)
    for positions in batches:
        model.zero_grad()
        loss_sum, weight = task.loss_sum(model, [part[list(positions)] for part in data.tensors])
        pull = sum(
            ((value - before) ** 2).sum()
            for value, before in zip(model.parameters(), start, strict=True)
        )
        (loss_sum / weight + mu / 2 * pull).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    moved = [b - a.detach() for a, b in zip(model.parameters(), start, strict=True)]
    return nn.utils.parameters_to_vector(moved) * sum(map(len, batches))


def batches_of(plan: Plan, name: str, number: int) -> list[Sequence[int]]:
    """Return the planned examples in ``number`` batches that differ by one example at most."""
    positions = taken(plan, name).positions
    ends = [len(positions) * at // number for at in range(number + 1)]
    return [positions[a:b] for a, b in pairwise(ends)]


def assert_near(found_P: Tensor, expected_P: Tensor) -> None:
    # A few dozen float32 operations in each step, on values of up to 2^8 times the weight.
    torch.testing.assert_close(found_P, expected_P, rtol=1e-4, atol=1e-3)


def test_eight_local_steps_under_the_planner_are_eight() -> None:
    plans = planned(chosen(local__steps=8, local__batch_size=4, local__learning_rate=RATE))
    assert {name: local_of(plan).steps for name, plan in plans.items()} == dict.fromkeys(OWNED, 8)
    assert {name: plan.quota for name, plan in plans.items()} == dict.fromkeys(OWNED, 8 * 4)
    for name, plan in plans.items():
        plain = changed(plan, local=LocalTerms())  # without the correction
        update = trained(plain, name)
        assert update.report.local_steps == 8
        assert_near(update.values_P, by_plain_loop(plan, name, batches_of(plan, name, 8), mu=0.0))


def test_four_local_steps_of_five_micro_batches_are_four() -> None:
    settings = chosen(local__steps=4, plan__accumulation_steps=5, plan__micro_batch_size=2)
    for name, plan in planned(settings).items():
        assert (local_of(plan).steps, plan.quota, plan.accumulation_steps) == (4, 4 * 5 * 2, 4 * 5)
        update = trained(plan, name)
        assert update.report.local_steps == 4
        assert [step.num_examples for step in update.report.steps] == [2] * 20


def test_five_epochs_use_every_example_five_times() -> None:
    settings = chosen(
        local__algorithm="fedavg", local__epochs=5, local__batch_size=5, local__learning_rate=RATE
    )
    for name, plan in planned(settings).items():
        number = OWNED[name]
        assert plan.quota == 5 * number
        per_epoch = -(-number // 5)
        assert local_of(plan).steps == 5 * per_epoch
        positions = taken(plan, name).positions
        for start in range(0, plan.quota, number):  # an epoch ends with a step
            assert sorted(positions[start : start + number]) == list(range(number))
            assert start in {
                local_of(plan).bounds(at, quota=plan.quota)[0] for at in range(local_of(plan).steps)
            }
        update = trained(plan, name)
        assert (update.report.num_examples, update.report.local_steps) == (
            5 * number,
            5 * per_epoch,
        )
        batches = batches_of(plan, name, 5 * per_epoch)
        assert max(map(len, batches)) <= 5
        assert_near(update.values_P, by_plain_loop(plan, name, batches, mu=0.0))


@pytest.mark.parametrize(
    ("given", "name", "rate"),
    [
        ({}, "adam", 0.01),
        ({"optimizer__name": "sgd"}, "sgd", 0.1),
        ({"local__steps": 8}, "sgd", 1.0),
        ({"local__algorithm": "fedavg"}, "sgd", 1.0),
        ({"local__algorithm": "fedprox", "optimizer__name": "sgd"}, "sgd", 1.0),
        ({"local__algorithm": "fedavg", "optimizer__name": "adam"}, "adam", 0.01),
        ({"local__algorithm": "fedavg", "optimizer__learning_rate": 0.5}, "sgd", 0.5),
        ({"local__algorithm": "fedavgm"}, "sgd", 1.0),
        ({"local__algorithm": "diloco"}, "sgd", 0.7),
        ({"local__algorithm": "diloco", "optimizer__learning_rate": 0.5}, "sgd", 0.5),
    ],
)
def test_the_server_s_rate_is_one_with_local_steps_unless_the_user_sets_it(
    given: dict[str, Any], name: str, rate: float
) -> None:
    optimizer = chosen(**given).server_optimizer
    assert (optimizer.name, optimizer.rate) == (name, rate)


@pytest.mark.parametrize(
    ("algorithm", "outside"),
    [("diloco", {"momentum": 0.9, "nesterov": True}), ("fedavgm", {"momentum": 0.3})],
)
def test_presets_of_long_rounds_are_adamw_inside_and_momentum_outside(
    algorithm: str, outside: dict[str, Any]
) -> None:
    settings = chosen(local__algorithm=algorithm)
    assert settings.server_optimizer.arguments == outside
    (terms,) = {how.text for plan in planned(settings).values() if (how := local_of(plan).how)}
    assert '"optimizer": "adamw"' in terms


def test_the_proximal_term_pulls_towards_the_server_s_model() -> None:
    settings = chosen(
        local__algorithm="fedprox",
        local__epochs=2,
        local__batch_size=6,
        local__proximal=0.5,
        local__learning_rate=RATE,
    )
    for name, plan in planned(settings).items():
        batches = batches_of(plan, name, local_of(plan).steps)
        assert_near(trained(plan, name).values_P, by_plain_loop(plan, name, batches, mu=0.5))


def test_a_slow_device_takes_fewer_steps_and_all_end_together() -> None:
    seconds = {"one": 0.01, "two": 0.01, "three": 0.04}
    owned = dict.fromkeys(OWNED, 1000)
    plans = planned(chosen(local__steps=12, local__batch_size=10), owned=owned, seconds=seconds)
    # The steps are 12 on average: of 36, the slow device takes a quarter of what the others take.
    assert {name: local_of(plan).steps for name, plan in plans.items()} == {
        "one": 16,
        "two": 16,
        "three": 4,
    }
    assert sum(plan.quota for plan in plans.values()) == 3 * 12 * 10
    times = [plan.quota * seconds[name] for name, plan in plans.items()]
    assert max(times) - min(times) <= 2 * max(seconds.values())


def test_no_more_steps_are_planned_than_the_deadline_allows() -> None:
    settings = chosen(local__epochs=5, local__batch_size=10, cohort__deadline_seconds=1.0)
    plans = planned(settings, owned=dict.fromkeys(OWNED, 100))
    for plan in plans.values():  # of 500 examples; 0.81 of the deadline is planned, at 0.01 s each
        assert 50 <= plan.quota <= 90
        assert local_of(plan).steps == round(plan.quota / 10)


def test_a_local_step_is_an_exact_accumulation_of_micro_batches() -> None:
    plan = planned(chosen(local__steps=2, local__batch_size=12))["one"]
    update = trained(plan, "one")
    cut = trained(plan.model_copy(update={"micro_batch_size": 5}), "one")
    assert [step.num_examples for step in cut.report.steps] == [5, 5, 2] * 2
    assert_near(cut.values_P, update.values_P)


def test_a_device_that_must_stop_sends_the_steps_that_it_has_done() -> None:
    terms = LocalTerms(is_normalized=True)
    two = plan_of(8, 4, local_steps=2, local_learning_rate=RATE, local=terms)
    cut = plan_of(12, 4, local_steps=3, local_learning_rate=RATE, local=terms, deadline_seconds=9.0)
    found, expected = (trained_whole(training(), one) for one in (cut, two))
    assert (found.report.reason, found.report.local_steps) == ("deadline", 2)
    assert torch.equal(found.values_P, expected.values_P)


def test_a_step_is_cut_smaller_where_the_local_optimizer_leaves_no_room() -> None:
    num_parameters = build_model(TwoLayers(), seed=0).layout.num_parameters
    held = 12 * num_parameters  # of AdamW and the copy of the start
    wanted = plan_of(8, 8, local_steps=1, local=LocalTerms(optimizer="adamw"))
    memory = FakeMemory(lambda _: 1000 + held + 3 * 10)  # three examples of ten bytes beside it
    trained_whole(training(memory), wanted)
    assert memory.begun == [3.0, 3.0, 2.0]
    roomy = FakeMemory(lambda _: 1000 + held + 8 * 10)
    trained_whole(training(roomy), wanted)
    assert roomy.begun == [8.0]
    assert roomy.line == Line(base=1000.0, each=10.0)  # given back at the round's end


def training(memory: FakeMemory | None = None) -> TrainingContext:
    return training_context(TwoLayers(), examples(12), memory=memory)


@pytest.mark.parametrize("correction", ["none", "normalized"])
def test_masked_rounds_of_local_steps_equal_plain_ones(correction: str) -> None:
    given: dict[str, Any] = {
        "clients": 3,
        "rounds": 2,
        "progress": False,
        "accumulation_steps": 2,
        "micro_batch_size": 2,
        "local_steps": 3,
        "step_correction": correction,
    }
    plain = headwater.simulate(Signs, **given)
    masked = headwater.simulate(Signs, secure_aggregation="semi-honest", **given)
    for one, other in zip(plain.model.parameters(), masked.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_under_masks_every_device_takes_the_same_number_of_steps() -> None:
    seconds = {"one": 0.01, "two": 0.01, "three": 0.02}
    plans = planned(
        chosen(local__steps=4, local__batch_size=10, secure__aggregation="semi-honest"),
        owned=dict.fromkeys(OWNED, 1000),
        seconds=seconds,
    )
    assert {local_of(plan).steps for plan in plans.values()} == {4}
    assert plans["three"].quota < plans["one"].quota


@pytest.mark.parametrize(("optimizer", "each"), [("sgd", 4), ("adamw", 12), ("muon", 12)])
def test_the_memory_of_the_local_optimizer_is_priced_in(optimizer: str, each: int) -> None:
    # TwoLayers has few parameters; a byte per example and a limit to match show them.
    num_parameters = build_model(TwoLayers(), seed=0).layout.num_parameters
    room = 0.8 * 1000 - 500
    vitals: dict[str, Any] = {
        "memory_limit_bytes": 1000,
        "base_bytes": 500,
        "bytes_per_example": 2.0,
    }
    settings = chosen(local__steps=2, local__batch_size=1000, local__optimizer=optimizer)
    plans = planned(settings, owned=dict.fromkeys(OWNED, 4000), **vitals)
    expected = int((room - each * num_parameters) / 2)
    assert {plan.micro_batch_size for plan in plans.values()} == {expected}
