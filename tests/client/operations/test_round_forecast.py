"""The forecast of a round: its examples, its time and its bytes, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.client.device.hardware import ThisMachine
from headwater.client.device.interfaces import Speed
from headwater.client.operations.round_forecast import (
    examples_of_round,
    forecast,
    round_bytes_text,
    tokens_per_example,
)
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load

IDENTITY = Identity(name="pi", data=None, part=0, num_parts=1)


def trainer_of(task: str) -> Trainer:
    return Trainer(f"tests/laws/architectures.py:{task}", batch_norm=None, check_task=False)


def chosen(**settings: Any) -> Settings:
    return load(None, {name.replace("__", "."): value for name, value in settings.items()})


@pytest.mark.parametrize(
    ("settings", "tokens", "number", "text"),
    [
        (chosen(plan__accumulation_steps=3), 10.0, 12, "K 3 x 4 = 12 examples"),
        (
            chosen(plan__tokens_per_update=100),
            9.0,
            12,
            "100 tokens on this device alone, 12 examples",
        ),
        (
            chosen(plan__tokens_per_update=100, cohort__min_clients=2),
            10.0,
            5,
            "100 tokens on 2 devices like this one, 5 examples each",
        ),
        (chosen(), None, 512, "512 examples on this device alone"),
        (
            chosen(cohort__min_clients=3),
            None,
            171,
            "512 examples on 3 devices like this one, 171 examples each",
        ),
    ],
)
def test_a_round_s_examples_are_a_share_of_what_is_set(
    settings: Settings, tokens: float | None, number: int, text: str
) -> None:
    assert examples_of_round(settings, 4, tokens) == (number, text)


def test_an_example_s_tokens_are_its_weight_where_examples_are_of_many() -> None:
    trainer = trainer_of("Ragged")
    examples = trainer.examples(IDENTITY)
    found = tokens_per_example(trainer, IDENTITY)
    weights = [trainer.task.loss_sum(trainer.image.model, batch)[1] for batch in _alone(trainer)]
    # Of four examples of the usual length: a text's first token is in its length alone.
    assert found == pytest.approx(sum(weights) / len(examples), rel=0.02)
    assert tokens_per_example(trainer_of("Mlp"), IDENTITY) is None


def _alone(trainer: Trainer) -> list[Any]:
    from headwater.common.data.batches import batch_of

    examples = trainer.examples(IDENTITY)
    return [batch_of(trainer.task, examples, [at]) for at in range(len(examples))]


def test_the_time_is_that_of_the_micro_batches_and_of_their_examples() -> None:
    speed = Speed(seconds_per_micro_batch=0.5, seconds_per_example=0.25)
    machine = ThisMachine()
    settings = chosen(plan__effective_batch_size=40, plan__micro_batch_size=16)
    found = [*forecast(settings, trainer_of("Mlp"), IDENTITY, machine, speed)]
    share = machine.time_share().share
    seconds = (3 * 0.5 + 40 * 0.25) / share
    assert found[0] == ("rate", f"{40 / seconds:.3g} examples a second in micro-batches of 16")
    assert found[1][1].endswith(f"40 examples on this device alone: {seconds:.3g} s of computing")


def test_a_rate_in_tokens_is_shown_where_the_loss_counts_tokens() -> None:
    speed = Speed(seconds_per_micro_batch=0.0, seconds_per_example=0.01)
    found = dict(forecast(chosen(), trainer_of("Ragged"), IDENTITY, ThisMachine(), speed))
    assert " tokens, " in found["rate"]
    local = chosen(local__steps=2)
    assert "a round" not in dict(forecast(local, trainer_of("Mlp"), IDENTITY, ThisMachine(), speed))


def test_the_bytes_are_those_of_the_model_as_the_settings_compress_it() -> None:
    layout = trainer_of("Mlp").image.layout
    plain = 4 * layout.num_parameters
    assert round_bytes_text(chosen(), layout) == f"{plain} bytes down and {plain} bytes up"
    half = chosen(compression__up="bfloat16")
    assert round_bytes_text(half, layout) == f"{plain} bytes down and {plain // 2} bytes up"
