"""Micro-batches of examples of unequal length: within tokens and memory, each example once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from headwater.client.features import train_round
from headwater.client.training.context import TrainingContext
from headwater.client.training.fitting import TOO_LONG
from headwater.client.training.round import Work
from headwater.client.training.sampler import SamplerPosition, Window, window
from headwater.common.errors import EmptyUpdate, OutOfMemory
from headwater.common.messages import Plan
from tests.training_contexts import FakeMemory, plan, sum_gradients, training_context

BASE, EACH = 1000.0, 10.0


class Rows:
    """The sum of whole numbers times one parameter, over rows of unequal length."""

    max_weight_per_example = 1 << 20

    def new_model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> list[Tensor]:
        return rows([1, 2, 3])

    def collate(self, examples: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(examples, batch_first=True)

    def loss_sum(self, model: nn.Module, rows_BT: Tensor) -> tuple[Tensor, int]:
        return model(rows_BT.unsqueeze(2)).sum(), int((rows_BT != 0).sum())


def rows(lengths: Sequence[int]) -> list[Tensor]:
    return [torch.full((length,), float(at + 1)) for at, length in enumerate(lengths)]


def context_of(lengths: Sequence[int], **more: Any) -> TrainingContext:
    return training_context(Rows(), rows(lengths), **more)  # type: ignore[arg-type]


def next_window(place: SamplerPosition, quota: int, number: int) -> Window:
    return window(place, quota=quota, run_seed=0, name="pi", num_examples=number)


def summed(context: TrainingContext, chosen: Plan, place: SamplerPosition) -> Work:
    taken = next_window(place, chosen.quota, len(context.examples))
    return sum_gradients(chosen, taken, context)


def gradient(lengths: Sequence[int], positions: Sequence[int]) -> float:
    return float(sum((p + 1) * lengths[p] for p in positions))


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=24)


@given(LENGTHS, st.integers(1, 30), st.integers(1, 8), st.none() | st.integers(1, 100))
def test_the_sum_is_exact_and_no_micro_batch_pads_to_more_than_its_tokens(
    lengths: list[int], quota: int, size: int, max_tokens: int | None
) -> None:
    context = context_of(lengths)
    assert context.lengths is not None
    found = summed(context, plan(quota, size, max_tokens=max_tokens), SamplerPosition())
    done = [p for group in found.total.done for p in group]
    taken = next_window(SamplerPosition(), quota, len(lengths)).positions
    assert Counter(done) == Counter(taken)
    assert found.values_P.tolist() == [gradient(lengths, done)]
    assert found.total.weight == sum(lengths[p] for p in done)
    most = min(size * context.lengths.usual, max_tokens or size * context.lengths.usual)
    for group, step in zip(found.total.done, found.total.steps, strict=True):
        assert step.size == context.lengths.tokens(group) / context.lengths.usual
        assert context.lengths.tokens(group) <= most or len(group) == 1


@given(LENGTHS, st.integers(1, 8), st.integers(10, 400))
def test_a_device_that_predicts_is_never_killed_and_leaves_out_what_does_not_fit(
    lengths: list[int], size: int, room: int
) -> None:
    memory = FakeMemory(lambda n: int(BASE) + room, base=BASE, each=EACH)
    context = context_of(lengths, memory=memory)
    assert context.lengths is not None
    fitting = room // EACH  # of the usual length
    assume(fitting >= 1)
    found = summed(context, plan(len(lengths), size), SamplerPosition())
    too_long = [p for p in range(len(lengths)) if lengths[p] / context.lengths.usual > fitting]
    assert sorted(found.total.refused) == too_long
    assert {found.total.faults[p].kind for p in too_long} <= {TOO_LONG}
    assert found.values_P.tolist() == [
        gradient(lengths, [p for p in range(len(lengths)) if p not in too_long])
    ]


def test_the_fault_of_a_long_example_names_its_position_length_and_peak() -> None:
    memory = FakeMemory(lambda n: 1000 + 45, base=BASE, each=EACH)
    context = context_of([2, 2, 100, 2], memory=memory)
    total = summed(context, plan(4, 4), SamplerPosition()).total
    assert total.faults[2].detail.startswith("position 2 has length 100: one example alone does ")


def test_a_window_of_which_all_examples_are_too_long_says_so() -> None:
    memory = FakeMemory(lambda n: 1000 + 45, base=BASE, each=EACH)
    context = context_of([2, 2, 100, 2], memory=memory)
    whole = next_window(SamplerPosition(), 4, 4)
    with pytest.raises(EmptyUpdate, match=r"none of 1 examples could be summed.*too long for the"):
        train_round(plan(1, 1), replace(whole, positions=(2,)), context)


def test_without_memory_for_a_usual_example_nothing_is_left_out() -> None:
    memory = FakeMemory(lambda n: 1000 + 5, base=BASE, each=EACH)
    with pytest.raises(OutOfMemory, match="one example alone does not fit: its predicted peak"):
        summed(context_of([2, 2, 100, 2], memory=memory), plan(4, 4), SamplerPosition())


class Cramped(Rows):
    """Fails to allocate where a micro-batch has more than some tokens with its padding."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def loss_sum(self, model: nn.Module, rows_BT: Tensor) -> tuple[Tensor, int]:
        if rows_BT.numel() > self.max_tokens:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes")
        return super().loss_sum(model, rows_BT)


@given(LENGTHS, st.integers(1, 8), st.integers(1, 60))
def test_after_failed_allocations_the_sum_is_exact_over_all_that_can_be_allocated(
    lengths: list[int], size: int, most: int
) -> None:
    context = training_context(Cramped(most), rows(lengths))  # type: ignore[arg-type]
    assert context.lengths is not None
    assume(most >= context.lengths.usual)
    found = summed(context, plan(len(lengths), size), SamplerPosition())
    fitting = [p for p in range(len(lengths)) if lengths[p] <= most]
    assert sorted(p for group in found.total.done for p in group) == fitting
    assert found.values_P.tolist() == [gradient(lengths, fitting)]


@given(LENGTHS, st.integers(1, 12), st.integers(1, 4), st.lists(st.floats(0.5, 30), min_size=1))
def test_however_windows_end_each_epoch_has_every_example_once(
    lengths: list[int], quota: int, size: int, deadlines: list[float]
) -> None:
    place, used, number = SamplerPosition(), list[int](), len(lengths)
    for at in range(6 * number):
        context = context_of(lengths)
        chosen = plan(quota, size, deadline_seconds=deadlines[at % len(deadlines)])
        taken = next_window(place, quota, number)
        found = sum_gradients(chosen, taken, context)
        used += sorted(found.used, key=taken.positions.index)
        place = taken.after_use_of(found.used)
        if place.epoch >= 2:
            break
    assert place.epoch >= 1
    # What is used of the epoch that is not over is all that is more than one of each.
    counts = Counter(used)
    left = set(next_window(place, place.num_left(number), number).positions) if number else set()
    whole_epochs = place.epoch
    expected = {p: whole_epochs + (p not in left) for p in range(number)}
    if place.of_existing(number).epoch == place.epoch:
        assert counts == Counter(expected)


def test_a_quota_comes_before_the_examples_beyond_it() -> None:
    lengths = [1, 9] * 10
    context = context_of(lengths)
    taken = window(SamplerPosition(), quota=10, num_more=2, run_seed=0, name="pi", num_examples=20)
    found = sum_gradients(plan(10, 2, finish_seconds=1e6), taken, context)
    order = [p for group in found.total.done for p in group]
    assert sorted(order[:10]) == sorted(taken.positions[:10])
