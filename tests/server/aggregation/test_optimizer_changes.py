"""Settings that change when a run is resumed hold from the next step on, or are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from headwater.common.errors import SettingsError
from headwater.common.model.parameters import ModelImage, build_model
from headwater.common.optimizers.named_optimizer import optimizer_class
from headwater.common.settings.schema import OptimizerSettings, ScheduleSettings
from headwater.server.aggregation.server_optimizer import ServerOptimizer
from tests.tasks import TwoLayers

COSINE: dict[str, Any] = {"name": "CosineAnnealingLR", "arguments": {"T_max": 9, "eta_min": 0.001}}
NUM_DONE = 3


def chosen(
    optimizer: dict[str, Any], schedule: dict[str, Any]
) -> tuple[OptimizerSettings, ScheduleSettings]:
    given = {"name": "adam", "learning_rate": 0.05, **optimizer}
    return OptimizerSettings.model_validate(given), ScheduleSettings.model_validate(schedule)


def means(image: ModelImage, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(image.layout.num_parameters, generator=generator) for _ in range(count)]


def resumed(
    was: tuple[dict[str, Any], dict[str, Any]], now: tuple[dict[str, Any], dict[str, Any]]
) -> tuple[ModelImage, ServerOptimizer]:
    """Take NUM_DONE steps with the old settings; restore their state with the new ones."""
    first, second = (build_model(TwoLayers(), seed=0) for _ in range(2))
    broken = ServerOptimizer(first, *chosen(*was))
    for mean_P in means(first, NUM_DONE):
        broken.step(mean_P)
    second.load(bytes(first.buffer()))
    optimizer = ServerOptimizer(second, *chosen(*now))
    optimizer.restore(*broken.state(), before=chosen(*was), num_steps=NUM_DONE)
    return second, optimizer


@pytest.mark.parametrize(
    ("name", "was", "now"),
    [
        ("Adam", {}, {"lr": 0.003}),
        ("AdamW", {"weight_decay": 0.1}, {"weight_decay": 0.5}),
        ("AdamW", {"betas": [0.8, 0.9]}, {"betas": [0.5, 0.9], "lr": 0.003}),
        ("SGD", {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True, "lr": 0.003}),
        ("SGD", {}, {"momentum": 0.9, "weight_decay": 0.01}),
        ("RMSprop", {}, {"lr": 0.003}),
        ("Muon", {"momentum": 0.9}, {"momentum": 0.5, "lr": 0.003}),
    ],
)
def test_a_changed_setting_gives_the_bits_of_torch_s_own_changed_groups(
    name: str, was: dict[str, Any], now: dict[str, Any]
) -> None:
    def settings(arguments: dict[str, Any]) -> dict[str, Any]:
        rest = {key: value for key, value in arguments.items() if key != "lr"}
        return {"name": name, "learning_rate": arguments.get("lr", 0.05), "arguments": rest}

    image, optimizer = resumed((settings(was), {}), (settings(now), {}))
    plain = copy.deepcopy(build_model(TwoLayers(), seed=0).model)
    own = optimizer_class(name)(plain.parameters(), **{"lr": 0.05, **was})
    for number, mean_P in enumerate(means(image, NUM_DONE + 2)):
        if number == NUM_DONE:
            own.param_groups[0].update(now)
        if number >= NUM_DONE:
            optimizer.step(mean_P.clone())
        parts = torch.split(mean_P, [p.numel() for p in plain.parameters()])
        for parameter, part in zip(plain.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter)
        own.step()
    assert torch.equal(
        image.values_P, torch.cat([p.detach().flatten() for p in plain.parameters()])
    )


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (({}, COSINE), ({"learning_rate": 0.003}, COSINE)),
        (({}, {"warmup_rounds": 5}), ({"learning_rate": 0.5}, {"warmup_rounds": 5})),
        (({}, {}), ({}, COSINE)),
        (({}, COSINE), ({}, {})),
        (({}, COSINE), ({}, {**COSINE, "warmup_rounds": 2})),
    ],
)
def test_the_schedule_continues_where_a_run_with_the_new_settings_would_be(
    was: tuple[dict[str, Any], dict[str, Any]], now: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    image, optimizer = resumed(was, now)
    whole = ServerOptimizer(build_model(TwoLayers(), seed=0), *chosen(*now))
    rates = [whole.step(mean_P) for mean_P in means(image, NUM_DONE + 3)]
    found = [optimizer.step(mean_P) for mean_P in means(image, 3)]
    assert found == rates[NUM_DONE:]


def test_without_a_change_the_state_is_as_it_was() -> None:
    image, optimizer = resumed(({}, COSINE), ({}, COSINE))
    whole_image = build_model(TwoLayers(), seed=0)
    whole = ServerOptimizer(whole_image, *chosen({}, COSINE))
    for number, mean_P in enumerate(means(image, NUM_DONE + 2)):
        whole.step(mean_P.clone())
        if number >= NUM_DONE:
            optimizer.step(mean_P.clone())
    assert torch.equal(image.values_P, whole_image.values_P)


@pytest.mark.parametrize(
    ("optimizer", "schedule", "change", "words"),
    [
        ({}, {}, {"arguments": {"amsgrad": True}}, "does not fit them"),
        ({}, {}, {"name": "sgd"}, "was started with the optimizer Adam"),
        ({"name": "rprop"}, {}, {"learning_rate": 0.003}, "has no effect on this run: Rprop"),
        (
            {},
            {"name": "OneCycleLR", "arguments": {"max_lr": 0.1, "total_steps": 20}},
            {"learning_rate": 0.003},
            "has no effect on this run: OneCycleLR",
        ),
    ],
)
def test_a_change_that_the_state_cannot_follow_is_refused(
    optimizer: dict[str, Any], schedule: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        resumed((optimizer, schedule), ({**optimizer, **change}, schedule))
