"""A task that divides its data by random numbers without a seed is told so."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from headwater.client.trainer.client_examples import ClientExamples
from headwater.client.training.context import Identity
from headwater.common.data.partition_spec import parse_rule
from tests.tasks import TwoLayers, examples

NUM_EXAMPLES = 40


class Dividing(TwoLayers):
    """Divides its examples by a permutation that ``shuffled`` draws."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Any:
        positions = self.shuffled(list(range(NUM_EXAMPLES)))
        return Subset(examples(NUM_EXAMPLES), positions[part::num_parts])

    def shuffled(self, positions: list[int]) -> list[int]:
        return positions


class ByTorch(Dividing):
    def shuffled(self, positions: list[int]) -> list[int]:
        return [*map(int, torch.randperm(len(positions)))]


class ByPython(Dividing):
    def shuffled(self, positions: list[int]) -> list[int]:
        random.shuffle(positions)
        return positions


class ByNumpy(Dividing):
    def shuffled(self, positions: list[int]) -> list[int]:
        np.random.shuffle(positions)
        return positions


class Seeded(Dividing):
    def shuffled(self, positions: list[int]) -> list[int]:
        torch.manual_seed(3)
        return [*map(int, torch.randperm(len(positions)))]


class DrawsInVain(Dividing):
    def shuffled(self, positions: list[int]) -> list[int]:
        torch.rand(3)
        return positions


def opened(task: Any, rule: str | None = None) -> ClientExamples:
    opening = ClientExamples(task, lambda examples, name: None)
    for part in range(2):
        identity = Identity(
            name=str(part),
            data=None,
            part=part,
            num_parts=2,
            rule=None if rule is None else parse_rule(rule, examples_per_device=None, seed=0),
        )
        opening.of(identity)
    return opening


@pytest.mark.parametrize("rule", [None, "iid"])
@pytest.mark.parametrize("kind", [ByTorch, ByPython, ByNumpy])
def test_a_division_without_a_seed_is_told_once(
    kind: type[Dividing], rule: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    opened(kind(), rule)
    assert caplog.text.count("gives other examples when it is called again") == 1


@pytest.mark.parametrize("rule", [None, "iid"])
@pytest.mark.parametrize("kind", [Dividing, Seeded, DrawsInVain])
def test_the_same_division_each_time_is_not_told(
    kind: type[Dividing], rule: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    opened(kind(), rule)
    assert not caplog.records
