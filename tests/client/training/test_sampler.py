"""The examples of each round, their order, and their split into micro-batches."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headwater.client.training.sampler import (
    SamplerPosition,
    SamplerState,
    Window,
    held_out_positions,
    permutation,
    permutations,
    sampler_seed,
    split,
    window,
)

NUM_EXAMPLES = st.integers(1, 40)
QUOTA = st.integers(1, 60)


def take(position: SamplerPosition, quota: int, num_examples: int, *, seed: int = 1) -> Window:
    return window(position, quota=quota, run_seed=seed, name="pi", num_examples=num_examples)


@given(NUM_EXAMPLES, QUOTA, st.integers(0, 3))
def test_a_window_never_has_an_example_twice(num_examples: int, quota: int, epoch: int) -> None:
    taken = take(SamplerPosition(epoch=epoch), quota, num_examples).positions
    assert len(set(taken)) == len(taken) == min(quota, num_examples)


@given(NUM_EXAMPLES, st.lists(QUOTA, min_size=1, max_size=40))
def test_no_example_repeats_before_all_were_used(num_examples: int, quotas: list[int]) -> None:
    position, seen = SamplerPosition(), Counter[int]()
    for quota in quotas:
        taken = take(position, quota, num_examples)
        seen.update(taken.positions)
        position = taken.after(len(taken.positions), num_examples)
        counts = [seen[p] for p in range(num_examples)]
        assert max(counts) - min(counts) <= 1


@given(NUM_EXAMPLES, QUOTA, st.data())
def test_after_a_stopped_window_the_sampler_continues_after_its_used_examples(
    num_examples: int, quota: int, data: st.DataObject
) -> None:
    first = take(SamplerPosition(), quota, num_examples)
    num_taken = data.draw(st.integers(1, len(first.positions)))
    rest = take(first.after(num_taken, num_examples), num_examples, num_examples)
    if rest.epoch == 0:
        whole = tuple(permutation(1, 0, "pi", num_examples).tolist())
        assert first.positions[:num_taken] + rest.positions == whole
    else:
        assert num_taken == num_examples


@given(NUM_EXAMPLES, QUOTA, st.integers(0, 20))
def test_examples_beyond_the_quota_are_the_next_ones(
    num_examples: int, quota: int, num_more: int
) -> None:
    taken = window(
        SamplerPosition(),
        quota=quota,
        num_more=num_more,
        run_seed=1,
        name="pi",
        num_examples=num_examples,
    )
    assert taken.positions == take(SamplerPosition(), quota + num_more, num_examples).positions
    assert taken.ends_epoch == (num_examples < quota)


@given(NUM_EXAMPLES, QUOTA)
def test_a_window_ends_the_epoch_only_if_it_is_shorter_than_the_quota(
    num_examples: int, quota: int
) -> None:
    taken = take(SamplerPosition(), quota, num_examples)
    assert taken.ends_epoch == (len(taken.positions) < quota)


def test_the_permutation_depends_on_epoch_seed_and_name() -> None:
    orders = {
        tuple(permutation(seed, epoch, name, 20).tolist())
        for seed in (0, 1)
        for epoch in (0, 1)
        for name in ("a", "b")
    }
    assert len(orders) == 8


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 40)), min_size=1, max_size=12))
def test_permutations_computed_together_equal_those_computed_alone(
    devices: list[tuple[int, int]],
) -> None:
    seeds = np.array(
        [sampler_seed(1, str(number)) for number in range(len(devices))], dtype=np.uint64
    )
    epochs, counts = np.array(devices).T
    alone = [
        permutation(1, epoch, str(number), count) for number, (epoch, count) in enumerate(devices)
    ]
    assert permutations(seeds, epochs, counts).tolist() == np.concatenate(alone).tolist()


def test_a_permutation_sorts_the_numbers_of_splitmix64() -> None:
    # In Python's whole numbers, as Vigna's splitmix64.c has it.
    def numbers(state: int) -> Iterator[int]:
        while True:
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
            yield z ^ (z >> 31)

    of_epoch = next(islice(numbers(sampler_seed(7, "pi")), 3, None))
    drawn = list(islice(numbers(of_epoch), 200))
    assert permutation(7, 3, "pi", 200).tolist() == sorted(range(200), key=drawn.__getitem__)


SPREAD = 6  # standard deviations that a draw may lie off: one of chance in 5e8


def excess(counts: NDArray[np.int64]) -> float:
    """Return how far a table of counts is from even: chi squared, in its standard deviations."""
    expected = counts.mean()
    freedom = counts.size - 1
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    return (chi_squared - freedom) / math.sqrt(2 * freedom)


def many_orders(num_examples: int, *, num_devices: int, num_epochs: int) -> NDArray[np.int64]:
    """Return orders [device, epoch, position]."""
    seeds = [sampler_seed(1, str(device)) for device in range(num_devices)]
    shape = num_devices, num_epochs
    drawn = permutations(
        np.repeat(np.array(seeds, dtype=np.uint64), num_epochs),
        np.tile(np.arange(num_epochs), num_devices),
        np.full(num_devices * num_epochs, num_examples),
    )
    return drawn.reshape(*shape, num_examples)


@pytest.mark.parametrize(("num_devices", "num_epochs"), [(12_000, 1), (1, 12_000), (110, 110)])
def test_all_permutations_are_equally_likely(num_devices: int, num_epochs: int) -> None:
    drawn = many_orders(5, num_devices=num_devices, num_epochs=num_epochs)
    codes = (drawn.reshape(-1, 5) * 5 ** np.arange(5)).sum(1)
    _, counts = np.unique(codes, return_counts=True)
    assert len(counts) == math.factorial(5)
    assert abs(excess(counts)) < SPREAD


def test_each_example_is_equally_likely_at_each_position() -> None:
    drawn = many_orders(40, num_devices=100, num_epochs=40).reshape(-1, 40)
    counts = np.stack([np.bincount(column, minlength=40) for column in drawn.T])
    assert abs(excess(counts)) < SPREAD


def test_permutations_of_epochs_and_of_clients_are_independent() -> None:
    drawn = many_orders(50, num_devices=60, num_epochs=60)
    places = np.argsort(drawn, axis=-1)
    centred = places - places.mean()
    by_itself = float((centred**2).mean())
    for first, second in (
        (centred[:, :-1], centred[:, 1:]),  # an epoch and the next
        (centred[:-1], centred[1:]),  # a device and the next
        (centred[..., :-1], centred[..., 1:]),  # an example and the next
    ):
        # Places within one order are not quite independent: -1/(n-1), which the last pair shows.
        expected = -1 / 49 if first.shape[-1] == 49 else 0.0
        correlation = float((first * second).mean()) / by_itself
        assert abs(correlation - expected) < SPREAD / math.sqrt(first.size)


def test_an_aborted_round_gets_the_same_examples_again() -> None:
    first = take(SamplerPosition(), 4, 10)
    walk = SamplerState().pend(1, first.after(4, 10))
    again = take(walk.settle(None).place, 4, 10)
    assert again == first


def test_a_counted_round_advances_the_sampler() -> None:
    first = take(SamplerPosition(), 4, 10)
    walk = SamplerState().pend(7, first.after(4, 10)).settle(7)
    assert walk == SamplerState(place=SamplerPosition(epoch=0, offset=4))


def test_an_older_counted_round_does_not_commit_a_later_pending_position() -> None:
    walk = SamplerState(place=SamplerPosition(offset=4)).pend(9, SamplerPosition(offset=8))
    assert walk.settle(7).place == SamplerPosition(offset=4)


def test_settling_twice_advances_the_sampler_once() -> None:
    walk = SamplerState().pend(3, SamplerPosition(offset=5))
    assert walk.settle(3).settle(3).place == SamplerPosition(offset=5)


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.none() | st.integers(0, 2**53))
def test_a_sampler_state_survives_json(epoch: int, offset: int, pending: int | None) -> None:
    walk = SamplerState(
        place=SamplerPosition(epoch=epoch, offset=offset),
        pending_round=pending,
        pending_place=SamplerPosition(epoch=epoch, offset=offset + 1),
    )
    plain = json.loads(json.dumps(dataclasses.asdict(walk)))
    back = SamplerState(
        place=SamplerPosition(**plain["place"]),
        pending_round=plain["pending_round"],
        pending_place=SamplerPosition(**plain["pending_place"]),
    )
    assert back == walk


@given(st.integers(1, 40), st.integers(0, 60), QUOTA)
def test_a_data_set_that_became_smaller_still_yields_existing_examples(
    num_examples: int, offset: int, quota: int
) -> None:
    taken = take(SamplerPosition(offset=offset), quota, num_examples)
    assert taken.positions
    assert set(taken.positions) <= set(range(num_examples))
    assert taken.epoch == (1 if offset >= num_examples else 0)


@given(st.lists(st.integers(), max_size=30), st.integers(1, 12))
def test_split_keeps_every_position_and_only_the_last_micro_batch_is_short(
    positions: list[int], size: int
) -> None:
    groups = split(positions, size)
    assert [p for group in groups for p in group] == positions
    assert all(len(group) == size for group in groups[:-1])
    assert all(0 < len(group) <= size for group in groups[-1:])
    assert len(groups) == -(-len(positions) // size)


@given(NUM_EXAMPLES, st.floats(0, 1, exclude_max=True))
def test_held_out_examples_are_the_fraction_rounded_down_and_leave_one(
    num_examples: int, fraction: float
) -> None:
    apart = held_out_positions(num_examples, fraction=fraction, run_seed=0, name="pi")
    assert len(set(apart)) == len(apart) == min(int(num_examples * fraction), num_examples - 1)
    assert set(apart) <= set(range(num_examples))
