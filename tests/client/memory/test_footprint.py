"""What a pass takes by block, and which blocks are computed again under a limit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from headwater.client.memory.activation_checkpointing import (
    Recomputed,
    choice_of,
    is_on,
    switch_on,
)
from headwater.client.memory.footprint import Footprint, footprint, measured_pass
from headwater.client.memory.peak_model import WORKING_FACTOR, guarded_bytes


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x_BI: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x_BI).tanh())
        return out


@dataclass
class Meter:
    """A meter whose peaks are those of the test, one for each stretch."""

    peaks: list[int]

    def reset(self) -> None:
        """Do nothing."""

    def peak_bytes(self) -> int:
        return self.peaks.pop(0)


def three_blocks() -> nn.Sequential:
    return nn.Sequential(Wide(16), Wide(64), Wide(32))


def test_the_footprint_is_the_blocks_inputs_and_twice_the_largest_block() -> None:
    model = three_blocks()
    found = footprint(model, lambda: model(torch.randn(10, 8)).sum())
    held, largest = 3 * 4 * 10 * 8, 4 * 10 * 64  # float32; tanh's output is kept once
    plain = held + 4 * 10 * (16 + 64 + 32)
    assert found == Footprint(
        checkpointed=held + WORKING_FACTOR * largest,
        plain=plain,
        kept=held,
        cheap={0: 0, 1: 0, 2: 0},  # tanh keeps its output, and not its input
        outside=0,
    )
    assert not is_on(model)


def test_what_is_kept_outside_of_blocks_is_the_loss_s() -> None:
    model = three_blocks()
    found = footprint(model, lambda: model(torch.randn(10, 8)).exp().sum())
    assert found is not None
    assert found.outside == 4 * 10 * 8


def test_measuring_the_footprint_leaves_checkpointing_as_it_was() -> None:
    model = three_blocks()
    switch_on(model)
    footprint(model, lambda: model(torch.randn(10, 8)).sum())
    assert is_on(model)


def test_a_model_without_blocks_has_no_footprint_and_no_measured_pass() -> None:
    model = nn.Linear(3, 3)
    assert footprint(model, lambda: None) is None
    assert measured_pass(model, lambda: None, rest_bytes=0, meter=Meter([])) is None


def test_a_measured_pass_has_a_stretch_before_each_block_and_one_behind_the_first() -> None:
    model = three_blocks()
    found = measured_pass(
        model,
        lambda: model(torch.randn(10, 8)).sum().backward(),
        rest_bytes=7,
        meter=Meter([100, 90, 80, 70]),
    )
    assert found is not None
    assert found.order == (2, 1, 0)
    assert found.inner_bytes == {0: 4 * 10 * 16, 1: 4 * 10 * 64, 2: 4 * 10 * 32}
    assert [(one.peak_bytes, one.num_done) for one in found.stretches] == [
        (100, 0),
        (90, 1),
        (80, 2),
        (70, 3),
    ]
    assert set(choice_of(model).values()) == {Recomputed.ALL}
    assert found.seconds.keys() == {0, 1, 2}


class Perceptron(nn.Module):
    """Keeps its input twice, and the output and input of gelu, each of ten rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x_BI: Tensor) -> Tensor:
        out: Tensor = x_BI + self.down(nn.functional.gelu(self.up(self.norm(x_BI))))
        return out


def test_the_footprint_names_what_cheap_operations_computed() -> None:
    model = nn.Sequential(Perceptron(256), Perceptron(512))
    found = footprint(model, lambda: model(torch.randn(200, 8)).sum())
    assert found is not None
    norm = 4 * 200 * 8  # its output; gelu's output is as large as its input
    assert found.cheap == {0: norm + 4 * 200 * 256, 1: norm + 4 * 200 * 512}


def test_a_footprint_leaves_a_choice_of_blocks_as_it_was() -> None:
    model = nn.Sequential(Perceptron(8), Perceptron(8), Perceptron(8))
    choice = {0: Recomputed.CHEAP, 1: Recomputed.NOTHING, 2: Recomputed.ALL}
    switch_on(model, choice)
    footprint(model, lambda: model(torch.randn(10, 8)).sum())
    assert choice_of(model) == choice


@pytest.mark.parametrize(
    ("limit", "rest", "filled"),
    [
        (400 << 20, 300 << 20, 0.9 * (400 << 20)),  # small: nine tenths
        (3600 << 20, 3000 << 20, 3536 << 20),  # all but 64 MiB
        (8000 << 20, 2000 << 20, 7400 << 20),  # all but a tenth of what is free beside the model
    ],
)
def test_a_prediction_leaves_room_for_its_error(limit: int, rest: int, filled: float) -> None:
    assert guarded_bytes(limit, rest) == pytest.approx(filled)
