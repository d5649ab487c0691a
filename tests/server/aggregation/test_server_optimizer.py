"""The server's step against torch.optim itself, and its state across a restart."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from headwater.common.errors import CheckpointCorrupt, SettingsError
from headwater.common.model.parameters import ModelImage, build_model
from headwater.common.settings import schema as settings
from headwater.common.user_code.run_scope import run_scope
from headwater.server.aggregation.server_optimizer import ServerOptimizer
from tests.tasks import TwoLayers

SGD: dict[str, Any] = {"name": "sgd"}
MOMENTUM: dict[str, Any] = {"name": "SGD", "arguments": {"momentum": 0.9, "nesterov": True}}
ADAM: dict[str, Any] = {"name": "adam", "arguments": {"betas": [0.8, 0.95]}}
ADAMW: dict[str, Any] = {"name": "AdamW", "arguments": {"weight_decay": 0.1, "amsgrad": True}}
OTHERS: list[dict[str, Any]] = [
    {"name": name} for name in ("adagrad", "rmsprop", "nadam", "rprop", "asgd", "adadelta")
]
NO_SCHEDULE: dict[str, Any] = {}
SCHEDULES: list[dict[str, Any]] = [
    NO_SCHEDULE,
    {"warmup_rounds": 3},
    {"name": "CosineAnnealingLR", "arguments": {"T_max": 9}},
    {"name": "steplr", "arguments": {"step_size": 2, "gamma": 0.5}, "warmup_rounds": 2},
    {"name": "MultiStepLR", "arguments": {"milestones": [2, 5, 5], "gamma": 0.5}},
    {"name": "MultiStepLR", "arguments": {"milestones": [3, 5]}, "warmup_rounds": 2},
    {"name": "CosineAnnealingWarmRestarts", "arguments": {"T_0": 3}},
    {"name": "ExponentialLR", "arguments": {"gamma": 0.9}, "warmup_rounds": 1},
    {"name": "CyclicLR", "arguments": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2}},
    {"name": "OneCycleLR", "arguments": {"max_lr": 0.1, "total_steps": 20}},
    {"name": "PolynomialLR", "arguments": {"total_iters": 7, "power": 2.0}},
]


def server(
    image: ModelImage, optimizer: dict[str, Any], schedule: dict[str, Any] | None = None
) -> ServerOptimizer:
    return ServerOptimizer(
        image,
        settings.OptimizerSettings.model_validate({"learning_rate": 0.05, **optimizer}),
        settings.ScheduleSettings.model_validate(schedule or {}),
    )


def gradients(image: ModelImage, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = image.layout.num_parameters
    return [torch.randn(size, generator=generator) for _ in range(count)]


def stepped(optimizer: ServerOptimizer, means: Sequence[Tensor]) -> list[float]:
    rates = []
    for mean_P in means:
        rates.append(optimizer.learning_rate)
        optimizer.step(mean_P.clone())
    return rates


@pytest.mark.parametrize("chosen", [SGD, MOMENTUM, ADAM, ADAMW, *OTHERS])
def test_a_step_is_that_of_torch_bit_for_bit(chosen: dict[str, Any]) -> None:
    image = build_model(TwoLayers(), seed=0)
    plain = copy.deepcopy(image.model)
    means = gradients(image, 7)
    stepped(server(image, chosen), means)
    kind = {name.lower(): value for name, value in vars(torch.optim).items()}[
        chosen["name"].lower()
    ]
    optimizer = kind(plain.parameters(), lr=0.05, **chosen.get("arguments", {}))
    for mean_P in means:
        parts = torch.split(mean_P, [p.numel() for p in plain.parameters()])
        for parameter, part in zip(plain.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    assert torch.equal(
        image.values_P, torch.cat([p.detach().flatten() for p in plain.parameters()])
    )


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.get("name", "") + str(len(s)))
@pytest.mark.parametrize("chosen", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("broken_after", [1, 3, 4])
def test_a_restored_optimizer_goes_on_with_the_same_bits(
    chosen: dict[str, Any], schedule: dict[str, Any], broken_after: int
) -> None:
    unbroken, broken, resumed = (build_model(TwoLayers(), seed=0) for _ in range(3))
    means = gradients(unbroken, 9)
    rates = stepped(server(unbroken, chosen, schedule), means)
    first = server(broken, chosen, schedule)
    stepped(first, means[:broken_after])
    tensors, rest = first.state()
    resumed.load(bytes(broken.buffer()))
    second = server(resumed, chosen, schedule)
    second.restore({name: tensor.clone() for name, tensor in tensors.items()}, rest)
    assert stepped(second, means[broken_after:]) == rates[broken_after:]
    assert torch.equal(resumed.values_P, unbroken.values_P)


@pytest.mark.parametrize("chosen", [SGD, MOMENTUM, ADAM, ADAMW, *OTHERS])
def test_the_state_is_plain_json_and_tensors_of_their_own(chosen: dict[str, Any]) -> None:
    image = build_model(TwoLayers(), seed=0)
    optimizer = server(image, chosen)
    mean_P = gradients(image, 1)[0]
    optimizer.step(mean_P)
    tensors, rest = optimizer.state()
    json.loads(rest)
    own = {mean_P.untyped_storage().data_ptr(), image.bytes_U8.untyped_storage().data_ptr()}
    assert all(t.is_contiguous() for t in tensors.values())
    assert all(t.untyped_storage().data_ptr() not in own for t in tensors.values())


def test_the_mean_is_free_to_be_overwritten_after_the_step() -> None:
    one, other = (build_model(TwoLayers(), seed=0) for _ in range(2))
    kept, reused = server(one, MOMENTUM), server(other, MOMENTUM)
    memory = torch.empty(one.layout.num_parameters)
    for mean_P in gradients(one, 4):
        kept.step(mean_P)
        memory.copy_(mean_P)
        reused.step(memory)
        memory.fill_(torch.nan)
    assert torch.equal(one.values_P, other.values_P)


@pytest.mark.parametrize("warmup", [1, 2, 5])
def test_the_rate_grows_linearly_over_the_warmup(warmup: int) -> None:
    image = build_model(TwoLayers(), seed=0)
    optimizer = server(image, SGD, {"warmup_rounds": warmup})
    rates = stepped(optimizer, gradients(image, warmup + 2))
    expected = [0.05 * min((n + 1) / (warmup + 1), 1) for n in range(warmup + 2)]
    assert rates == pytest.approx(expected, rel=(warmup + 2) * 2.0**-50)


def test_a_schedule_begins_when_the_warmup_has_ended() -> None:
    image = build_model(TwoLayers(), seed=0)
    schedule = {"name": "StepLR", "arguments": {"step_size": 2, "gamma": 0.5}, "warmup_rounds": 2}
    rates = stepped(server(image, SGD, schedule), gradients(image, 7))
    assert rates[2:] == pytest.approx([0.05, 0.05, 0.025, 0.025, 0.0125], rel=2.0**-48)


@pytest.mark.parametrize(
    ("chosen", "match"),
    [
        ({"name": "adamm"}, "has no 'adamm'"),
        ({"name": "optimizer"}, "has no 'optimizer'"),
        ({"name": "lbfgs"}, "LBFGS cannot step"),
        ({"name": "SparseAdam"}, "SparseAdam cannot step"),
        ({"name": "sgd", "arguments": {"momentun": 0.9}}, "SGD has no argument momentun"),
        ({"name": "sgd", "arguments": {"momentum": -1.0}}, "SGD: Invalid momentum"),
        ({"name": "sgd", "arguments": {"momentum": "fast"}}, "SGD: "),
        ({"name": "sgd", "arguments": {"lr": 0.5}}, "lr"),
        ({"name": "adam", "arguments": {"betas": [0.9]}}, "Adam: "),
        ({"name": "adam", "arguments": {"betas": [0.9, 1.5]}}, "Adam: Invalid beta"),
        ({"name": "adam", "arguments": {"betas": 0.9}}, "Adam: "),
        ({"name": "sgd", "arguments": {"params": 3}}, "params"),
    ],
)
def test_an_impossible_optimizer_is_a_settings_error(chosen: dict[str, Any], match: str) -> None:
    with pytest.raises(SettingsError, match=match):
        server(build_model(TwoLayers(), seed=0), chosen)


@pytest.mark.parametrize(
    ("schedule", "match"),
    [
        ({"name": "cosine"}, "has no 'cosine'"),
        ({"name": "CosineAnnealingLR"}, "T_max"),
        ({"name": "CosineAnnealingLR", "arguments": {"T_min": 3}}, "no argument T_min"),
        ({"name": "LambdaLR"}, "takes a function"),
        ({"name": "SequentialLR"}, "SequentialLR"),
        ({"name": "ReduceLROnPlateau"}, "needs a metric at each step"),
        ({"name": "_LRScheduler"}, "_LRScheduler"),
        ({"name": "StepLR", "arguments": {"step_size": 0}}, "StepLR"),
        ({"name": "MultiStepLR", "arguments": {"milestones": 30}}, "MultiStepLR"),
    ],
)
def test_an_impossible_schedule_is_a_settings_error_before_the_first_round(
    schedule: dict[str, Any], match: str
) -> None:
    with pytest.raises(SettingsError, match=match):
        server(build_model(TwoLayers(), seed=0), SGD, schedule)


def test_the_schedules_that_are_offered_are_those_that_can_be_named() -> None:
    with pytest.raises(SettingsError) as caught:
        server(build_model(TwoLayers(), seed=0), SGD, {"name": "cosine"})
    offered = caught.value.remedy.removeprefix("one of: ").split(", ")
    assert {"CosineAnnealingLR", "StepLR"} <= {*offered}
    for name in offered:  # whatever its arguments may lack, no such name is refused
        with pytest.raises(SettingsError, match="no argument x"):
            server(build_model(TwoLayers(), seed=0), SGD, {"name": name, "arguments": {"x": 1}})


def test_an_argument_that_muon_refuses_is_explained_in_its_document() -> None:
    muon = {"name": "muon", "arguments": {"momentum": 1.5}}
    with pytest.raises(SettingsError, match="momentum value") as caught:
        server(build_model(TwoLayers(), seed=0), muon)
    assert "docs/local.md" in caught.value.remedy


def test_an_optimizer_that_cannot_be_made_has_a_remedy_of_its_own() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any, lr: float) -> None:
            raise ValueError("not these")

    with run_scope({"python:own": Own}), pytest.raises(SettingsError) as caught:
        server(build_model(TwoLayers(), seed=0), {"name": "python:own", "learning_rate": 0.1})
    assert "correct the class" in caught.value.remedy


def test_a_schedule_that_ends_before_the_run_is_a_settings_error_that_names_it() -> None:
    image = build_model(TwoLayers(), seed=0)
    schedule = {"name": "OneCycleLR", "arguments": {"max_lr": 0.1, "total_steps": 4}}
    with pytest.raises(SettingsError, match="OneCycleLR"):
        stepped(server(image, MOMENTUM, schedule), gradients(image, 9))


COSINE: dict[str, Any] = {"name": "CosineAnnealingLR", "arguments": {"T_max": 9}}


@pytest.mark.parametrize(
    ("was", "now"), [(SGD, ADAM), (MOMENTUM, ADAM), (ADAM, SGD), ({"name": "adam"}, ADAMW)]
)
def test_the_state_of_another_optimizer_is_refused(
    was: dict[str, Any], now: dict[str, Any]
) -> None:
    image = build_model(TwoLayers(), seed=0)
    first = server(image, was)
    stepped(first, gradients(image, 2))
    with pytest.raises(SettingsError, match="the run was started with the optimizer") as caught:
        server(build_model(TwoLayers(), seed=0), now).restore(*first.state())
    assert "--initial-model" in caught.value.remedy


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ({}, COSINE),
        (COSINE, {}),
        (COSINE, {"name": "ExponentialLR", "arguments": {"gamma": 0.5}}),
        (COSINE, {**COSINE, "warmup_rounds": 2}),
    ],
)
def test_the_state_of_another_schedule_is_refused_if_nothing_is_known_of_a_change(
    was: dict[str, Any], now: dict[str, Any]
) -> None:
    image = build_model(TwoLayers(), seed=0)
    first = server(image, SGD, was)
    stepped(first, gradients(image, 2))
    with pytest.raises(CheckpointCorrupt) as caught:
        server(build_model(TwoLayers(), seed=0), SGD, now).restore(*first.state())
    assert "resume with the optimizer and schedule" in caught.value.remedy


@pytest.mark.parametrize("rest", ["", "{}", "[]", '{"groups": [], "plain": {}, "scheduler": null}'])
def test_a_state_that_is_not_one_is_refused(rest: str) -> None:
    with pytest.raises(CheckpointCorrupt):
        server(build_model(TwoLayers(), seed=0), SGD).restore({}, rest)


def rates_with_factors(
    chosen: dict[str, Any], schedule: dict[str, Any], factors: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return the schedule's rate before each step and the rate that the step used."""
    image = build_model(TwoLayers(), seed=0)
    optimizer = server(image, chosen, schedule)
    told, used = [], []
    for mean_P, factor in zip(gradients(image, len(factors)), factors, strict=True):
        told.append(optimizer.learning_rate)
        used.append(optimizer.step(mean_P, factor))
    return told, used


FACTORS = [1.0, 0.3, 7.0, 1 / 3, 1e3, 0.1, 2.0]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.get("name", "") + str(len(s)))
@pytest.mark.parametrize("chosen", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_a_factor_is_for_one_step_and_the_schedule_never_sees_it(
    chosen: dict[str, Any], schedule: dict[str, Any]
) -> None:
    plain, _ = rates_with_factors(chosen, schedule, [1.0] * len(FACTORS))
    told, used = rates_with_factors(chosen, schedule, FACTORS)
    assert told == plain
    assert used == [rate * factor for rate, factor in zip(plain, FACTORS, strict=True)]


@pytest.mark.parametrize("chosen", [SGD, MOMENTUM, ADAM, ADAMW])
def test_a_step_with_a_factor_is_torch_s_at_that_rate_bit_for_bit(chosen: dict[str, Any]) -> None:
    image = build_model(TwoLayers(), seed=0)
    plain = copy.deepcopy(image.model)
    means = gradients(image, len(FACTORS))
    optimizer = server(image, chosen)
    for mean_P, factor in zip(means, FACTORS, strict=True):
        optimizer.step(mean_P.clone(), factor)
    kind = {name.lower(): value for name, value in vars(torch.optim).items()}[
        chosen["name"].lower()
    ]
    reference = kind(plain.parameters(), lr=0.05, **chosen.get("arguments", {}))
    for mean_P, factor in zip(means, FACTORS, strict=True):
        parts = torch.split(mean_P, [p.numel() for p in plain.parameters()])
        for parameter, part in zip(plain.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter)
        for group in reference.param_groups:
            group["lr"] = 0.05 * factor
        reference.step()
    assert torch.equal(
        image.values_P, torch.cat([p.detach().flatten() for p in plain.parameters()])
    )


def test_a_checkpoint_behind_a_scaled_step_holds_the_schedule_s_own_rate() -> None:
    image = build_model(TwoLayers(), seed=0)
    optimizer = server(image, MOMENTUM, COSINE)
    optimizer.step(gradients(image, 1)[0], 5.0)
    _, rest = optimizer.state()
    assert json.loads(rest)["groups"][0]["lr"] == optimizer.learning_rate < 0.05


@pytest.mark.parametrize("name", ["rprop", "asgd", "adafactor"])
@pytest.mark.parametrize("scaling", ["linear", "sqrt"])
def test_an_optimizer_whose_step_is_not_proportional_to_its_rate_cannot_follow_the_batch(
    name: str, scaling: str
) -> None:
    with pytest.raises(SettingsError, match="not proportional to its rate"):
        server(build_model(TwoLayers(), seed=0), {"name": name}, {"batch_scaling": scaling})


@pytest.mark.parametrize(
    "name", ["sgd", "adam", "adamw", "adamax", "nadam", "radam", "rmsprop", "muon"]
)
def test_of_the_others_the_first_step_is_proportional_to_its_rate(name: str) -> None:
    """From the same start the move is twice as long; whole numbers, so up to float32's rounding."""
    moves = []
    for factor in (1.0, 2.0):
        image = build_model(TwoLayers(), seed=0)
        before_P = image.values_P.double()
        optimizer = server(image, {"name": name, "learning_rate": 2.0**-4})
        optimizer.step(gradients(image, 1)[0], factor)
        moves.append(image.values_P.double() - before_P)
    # Parameters of up to 4 are rounded by 2^-22 at the most, twice.
    assert torch.allclose(2 * moves[0], moves[1], rtol=0, atol=2 * 2.0**-22)


def test_the_learning_rate_suits_the_optimizer_unless_it_is_set() -> None:
    rates = [settings.OptimizerSettings(name=name).rate for name in ("sgd", "SGD", "adam", "NAdam")]
    assert rates == [0.1, 0.1, 0.01, 0.01]
    assert settings.OptimizerSettings(name="sgd", learning_rate=0.5).rate == 0.5
