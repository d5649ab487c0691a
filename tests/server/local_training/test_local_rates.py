"""The local learning rate by a schedule of torch's: what devices train with, round by round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headwater.common.data.batches import batch_of
from headwater.common.errors import SettingsError
from headwater.common.model.parameters import build_model
from headwater.common.settings.sources import load
from headwater.common.settings.training import LocalScheduleSettings, LocalSettings
from headwater.common.task import load_task
from headwater.server.local_training.local_rates import LocalRates
from headwater.simulation.run import run_engine

ROUNDS, RATE = 4, 0.3
COSINE: dict[str, Any] = {
    "local_schedule.name": "CosineAnnealingLR",
    "local_schedule.arguments": {"T_max": ROUNDS},
}
CHOSEN: dict[str, Any] = {
    "task": "examples/digits.py:Digits",
    "rounds": ROUNDS,
    "threads": 1,
    "simulation.fleet": "equal",
    "local.algorithm": "fedavg",
    "local.steps": 2,
    "local.learning_rate": RATE,
}


def trained(out: Path, *, resume: bool = False, **more: Any) -> dict[str, torch.Tensor]:
    chosen = {key.replace("__", "."): value for key, value in more.items()}
    run_engine(
        load(None, CHOSEN | COSINE | {"out": out} | chosen), on_round=lambda _: None, resume=resume
    )
    return load_file(out / "model.safetensors")


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("CosineAnnealingLR", {"T_max": 9}),
        ("MultiStepLR", {"milestones": [2, 5], "gamma": 0.5}),
        ("OneCycleLR", {"max_lr": 0.5, "total_steps": 8}),
    ],
)
def test_a_round_s_rate_is_torch_s_whatever_round_is_asked_first(
    name: str, arguments: dict[str, Any]
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=RATE)
    schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, **arguments)
    expected = []
    for _ in range(8):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(expected) < 8:
            schedule.step()
    local = LocalSettings(algorithm="fedavg", learning_rate=RATE)
    rates = LocalRates(local, LocalScheduleSettings(name=name, arguments=arguments))
    assert [rates.of_round(number) for number in (8, 1, 3)] == [
        expected[number - 1] for number in (8, 1, 3)
    ]


def test_one_device_trains_as_a_plain_loop_with_the_schedule_does(tmp_path: Path) -> None:
    """All examples in each step, so that their order is none; the server's step is 1."""
    task = load_task(CHOSEN["task"])
    examples = task.train_examples(data=None, part=0, num_parts=1)
    model = build_model(task, seed=0).model
    batch = batch_of(task, examples, range(len(examples)))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ROUNDS)
    for _ in range(ROUNDS):
        for _ in range(2):
            optimizer.zero_grad()
            loss, weight = task.loss_sum(model, batch)[:2]
            (loss / weight).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()
    found = trained(
        tmp_path / "out",
        simulation__clients=1,
        cohort__min_clients=1,
        local__batch_size=len(examples),
    )
    expected = {name: value.detach() for name, value in model.state_dict().items()}
    assert difference(found, expected) < 1e-5
    constant = trained(
        tmp_path / "constant",
        simulation__clients=1,
        cohort__min_clients=1,
        local__batch_size=len(examples),
        local_schedule__name=None,
        local_schedule__arguments={},
    )
    assert difference(constant, expected) > 1e-3


def test_devices_in_one_pass_take_the_rates_that_they_take_alone(tmp_path: Path) -> None:
    both: dict[str, Any] = {
        "simulation__clients": 5,
        "local__optimizer": "adamw",
        "local__learning_rate": 0.01,
    }
    alone = trained(tmp_path / "alone", simulation__compute="one-by-one", **both)
    together = trained(tmp_path / "together", simulation__compute="vectorised", **both)
    assert difference(alone, together) < 1e-4
    lines = (tmp_path / "together" / "rounds.jsonl").read_text().splitlines()
    rates = [json.loads(line)["local_learning_rate"] for line in lines]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 0.01
    assert len(set(rates)) == ROUNDS


def test_a_resumed_run_goes_on_with_the_next_round_s_rate(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", simulation__clients=3)
    trained(tmp_path / "halves", simulation__clients=3, rounds=2)
    halves = trained(tmp_path / "halves", simulation__clients=3, resume=True)
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"local_schedule__arguments": {"T_max": 2}}, "gives round 3 the rate 0"),
        ({"local_schedule__arguments": {}}, "CosineAnnealingLR needs T_max"),
        ({"local_schedule__name": "Cosine"}, "has no 'Cosine'"),
        (
            {"local_schedule__name": "StepLR", "local_schedule__arguments": {"step_size": 0}},
            "no rate for round 2",
        ),
        ({"local_schedule__name": None}, "is for a schedule of the local learning rate"),
    ],
)
def test_what_is_no_schedule_for_all_rounds_is_refused_before_the_first(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(SettingsError, match=why):
        trained(tmp_path / "out", simulation__clients=3, **changes)
    assert not (tmp_path / "out" / "rounds.jsonl").exists()


def test_without_local_steps_there_is_nothing_to_schedule(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--local-schedule: only for local steps"):
        load(None, {"task": CHOSEN["task"]} | COSINE)
