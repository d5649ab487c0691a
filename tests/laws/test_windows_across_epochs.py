"""The law across epochs: a window that goes on in the next epoch loses and repeats no example."""

from __future__ import annotations

import math
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.features import train_round
from headwater.client.training.sampler import (
    SamplerPosition,
    SamplerState,
    Window,
    permutation,
    window,
)
from tests.tasks import TwoLayers, examples, gradient_sum
from tests.training_contexts import plan, training_context

NUM_EXAMPLES = 24
RELATIVE = 1e-6  # as for all windows (test_exact_step)

PLACES = st.builds(
    SamplerPosition,
    epoch=st.integers(0, 2),
    offset=st.integers(12, NUM_EXAMPLES),
    skipped=st.sets(st.integers(0, 11), max_size=4).map(lambda places: tuple(sorted(places))),
)


def window_from(place: SamplerPosition, quota: int, *, num_examples: int = NUM_EXAMPLES) -> Window:
    return window(place, quota=quota, run_seed=0, name="pi", num_examples=num_examples)


@given(
    place=PLACES, quota=st.integers(1, 3 * NUM_EXAMPLES), size=st.integers(1, 30), data=st.data()
)
def test_the_sum_over_a_window_across_epochs_is_that_of_one_batch(
    place: SamplerPosition, quota: int, size: int, data: st.DataObject
) -> None:
    """In float64, also of a window that is stopped after some of its micro-batches."""
    task, own = TwoLayers(), examples(NUM_EXAMPLES)
    num_steps = data.draw(st.integers(1, math.ceil(quota / size)))
    context = training_context(task, own, should_stop=lambda: len(task.seen) >= num_steps)
    taken = window_from(place, quota)
    update = train_round(plan(quota, size), taken, context)
    used = taken.positions[: min(num_steps * size, quota)]
    assert update.report.weight == update.report.num_examples == len(used)
    expected_P = torch.from_numpy(gradient_sum(context.image.values_P, own, used))
    gap = float((update.values_P.double() - expected_P).norm())
    assert gap <= RELATIVE * float(expected_P.norm())


@given(place=PLACES, quota=st.integers(2, 2 * NUM_EXAMPLES), size=st.integers(1, 9))
def test_local_steps_across_epochs_are_exact_over_their_micro_batches(
    place: SamplerPosition, quota: int, size: int
) -> None:
    task, own, rate = TwoLayers(), examples(NUM_EXAMPLES), 2.0**-5
    context = training_context(task, own)
    chosen = plan(quota, size, local_steps=2, local_learning_rate=rate)
    taken = window_from(place, quota)
    before_P = context.image.values_P.double()
    values_P = before_P.clone()
    for part in (taken.positions[: quota // 2], taken.positions[quota // 2 :]):
        values_P -= rate * torch.from_numpy(gradient_sum(values_P, own, part)) / len(part)
    update = train_round(chosen, taken, context)
    moved_P = update.values_P.double() / update.report.weight
    # The parameters are rounded to float32 in each step, and the difference is of these.
    bound = 4 * torch.finfo(torch.float32).eps * float(before_P.norm())
    assert float((moved_P - (before_P - values_P)).norm()) <= bound


ROUNDS = st.lists(
    # A round's quota, the share of it that the device does before it stops, whether it counts.
    st.tuples(st.integers(1, 60), st.floats(0, 1), st.booleans()),
    max_size=30,
)


@given(num_examples=st.integers(1, 30), rounds=ROUNDS)
def test_the_committed_rounds_use_each_example_once_in_every_epoch(
    num_examples: int, rounds: list[tuple[int, float, bool]]
) -> None:
    state, counted, used = SamplerState(), None, Counter[int]()
    repeated: tuple[int, ...] | None = None
    for number, (quota, share, is_counted) in enumerate(rounds, start=1):
        state = state.settle(counted)
        taken = window_from(state.place, quota, num_examples=num_examples)
        if repeated is not None:  # an aborted round gets the same examples again
            common = min(len(repeated), quota)
            assert taken.positions[:common] == repeated[:common]
        num_used = round(share * quota)
        state = state.pend(number, taken.after(num_used))
        repeated = None if is_counted else taken.positions
        if is_counted:
            counted = number
            used.update(taken.positions[:num_used])
    place = state.settle(counted).place.of_existing(num_examples)
    order = permutation(0, place.epoch, "pi", num_examples).tolist()
    left = {order[at] for at in (*place.skipped, *range(place.offset, num_examples))}
    assert all(
        used[position] == place.epoch + (position not in left) for position in range(num_examples)
    )
