"""Which optimizers of torch step the rows of a matrix as they step each row alone."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.common.local_training.local_terms import LocalTerms
from headwater.simulation.vectorised.stacked_optimizer import steps_each_row_alone

MOMENTUM: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("sgd", {}),
        ("sgd", MOMENTUM),
        ("adam", {"amsgrad": True}),
        ("adamw", {"weight_decay": 0.1}),
        ("adagrad", {}),
        ("asgd", {}),
        ("rmsprop", {"momentum": 0.9}),
        ("rprop", {}),
        ("muon", {}),
        ("muon", {"momentum": 0.5, "nesterov": False}),
    ],
)
def test_an_optimizer_of_single_numbers_steps_each_row_alone(
    name: str, arguments: dict[str, Any]
) -> None:
    assert steps_each_row_alone(LocalTerms(optimizer=name, arguments=arguments), rate=0.01)


def test_an_optimizer_of_whole_tensors_does_not() -> None:
    assert not steps_each_row_alone(LocalTerms(optimizer="adafactor"), rate=0.01)
