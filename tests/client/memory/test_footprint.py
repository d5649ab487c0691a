"""What a pass takes by block, and which blocks are computed again under a limit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from headwater.client.memory.activation_checkpointing import is_on, kept_blocks, switch_on
from headwater.client.memory.footprint import (
    Footprint,
    PassMemory,
    Stretch,
    footprint,
    measured_pass,
)
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
    assert found == Footprint(checkpointed=held + WORKING_FACTOR * largest, plain=plain, kept=held)
    assert not is_on(model)


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
    assert kept_blocks(model) == frozenset()


# The last block runs again first: (after the forward pass, in blocks 2, 1 and 0).
PASS = PassMemory(
    rest_bytes=1000,
    inner_bytes={0: 50, 1: 50, 2: 80},
    order=(2, 1, 0),
    stretches=tuple(
        Stretch(peak_bytes=peak, num_done=done)
        for done, peak in enumerate((1100, 1150, 1140, 1300))
    ),
)


@pytest.mark.parametrize(
    ("kept", "peak"),
    [
        (set(), 1300),  # behind the last block, such as the gradient of an embedding
        ({0, 1}, 1300),  # kept activations are gone by then
        ({0, 1, 2}, 1300),
    ],
)
def test_kept_activations_count_until_the_backward_pass_has_used_them(
    kept: set[int], peak: int
) -> None:
    assert PASS.peak_bytes(kept) == peak
    early = PassMemory(
        rest_bytes=1000,
        inner_bytes=PASS.inner_bytes,
        order=PASS.order,
        stretches=PASS.stretches[:1],
    )
    assert early.peak_bytes(kept) == 1100 + sum(PASS.inner_bytes[block] for block in kept)


def test_the_blocks_that_drop_the_most_are_computed_again_and_no_more_than_needed() -> None:
    one = PassMemory(
        rest_bytes=0,
        inner_bytes={0: 50, 1: 50, 2: 80},
        order=(2, 1, 0),
        stretches=(Stretch(peak_bytes=1000, num_done=0),),
    )
    assert one.most_kept(1180) == {0, 1, 2}
    assert one.most_kept(1179) == {0, 1}
    assert one.most_kept(1099) == {1}
    assert one.most_kept(1000) == one.most_kept(10) == set()


@given(
    inner=st.lists(st.integers(0, 100), min_size=1, max_size=6),
    peaks=st.lists(st.integers(1000, 1200), min_size=7, max_size=7),
    limit=st.integers(900, 2000),
)
def test_what_is_kept_fits_if_anything_does(inner: list[int], peaks: list[int], limit: int) -> None:
    order = tuple(reversed(range(len(inner))))
    found = PassMemory(
        rest_bytes=900,
        inner_bytes=dict(enumerate(inner)),
        order=order,
        stretches=tuple(
            Stretch(peak_bytes=peaks[done], num_done=done) for done in range(len(inner) + 1)
        ),
    )
    assert found.peak_bytes(found.most_kept(limit)) <= max(limit, found.peak_bytes())


def gradients_of(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(inputs).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kept", [set(), {0}, {1, 2}, {0, 1, 2}])
def test_gradients_are_the_same_to_the_bit_whichever_blocks_are_kept(kept: set[int]) -> None:
    model, inputs = three_blocks(), torch.randn(10, 8)
    plain = gradients_of(model, inputs)
    switch_on(model)
    switch_on(model, kept=kept)
    assert kept_blocks(model) == kept
    found = gradients_of(model, inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


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
