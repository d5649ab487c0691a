"""The examples of each round, their order, and their split into micro-batches."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headwater.client.flower.state_file import read_sampler
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
from headwater.common.errors import OutOfMemory

NUM_EXAMPLES = st.integers(1, 40)
QUOTA = st.integers(1, 60)


def take(position: SamplerPosition, quota: int, num_examples: int, *, seed: int = 1) -> Window:
    return window(position, quota=quota, run_seed=seed, name="pi", num_examples=num_examples)


@st.composite
def places(draw: st.DrawFn, num_examples: int) -> SamplerPosition:
    """Draw a place in an epoch, with some of the places before it skipped."""
    offset = draw(st.integers(0, num_examples))
    skipped = draw(st.sets(st.integers(0, num_examples - 1)))
    return SamplerPosition(
        epoch=draw(st.integers(0, 3)),
        offset=offset,
        skipped=tuple(sorted(place for place in skipped if place < offset)),
    )


@given(NUM_EXAMPLES, st.integers(1, 200), st.data())
def test_a_window_has_its_quota_and_the_counts_of_two_examples_differ_by_at_most_one(
    num_examples: int, quota: int, data: st.DataObject
) -> None:
    taken = take(data.draw(places(num_examples)), quota, num_examples).positions
    counts = Counter(taken)
    assert len(taken) == quota
    assert max(counts.values()) - min(counts[p] for p in range(num_examples)) <= 1


@given(NUM_EXAMPLES, QUOTA, st.data())
def test_a_window_is_the_rest_of_its_epoch_and_then_the_next_one_without_that_rest(
    num_examples: int, quota: int, data: st.DataObject
) -> None:
    place = data.draw(places(num_examples))
    taken = take(place, min(quota, num_examples), num_examples)
    here, following = (
        permutation(1, taken.place.epoch + ahead, "pi", num_examples).tolist() for ahead in (0, 1)
    )
    left = [here[at] for at in (*taken.place.skipped, *range(taken.place.offset, num_examples))]
    expected = [*left, *(p for p in following if p not in left)]
    assert list(taken.positions) == expected[: min(quota, num_examples)]


@given(NUM_EXAMPLES, st.lists(st.tuples(QUOTA, st.integers(0, 60)), min_size=1, max_size=40))
def test_every_epoch_uses_each_example_once_however_the_windows_are_cut(
    num_examples: int, rounds: list[tuple[int, int]]
) -> None:
    place, used = SamplerPosition(), list[int]()
    for quota, num_used in rounds:
        taken = take(place, quota, num_examples)
        place = taken.after(min(num_used, quota))
        used += taken.positions[:num_used]
        num_left = place.num_left(num_examples) % num_examples
        assert (len(used) + num_left) % num_examples == 0
        # The epochs before this one used each example once, and this one those that are not left.
        num_epochs = (len(used) + num_left) // num_examples
        order = permutation(1, place.epoch, "pi", num_examples).tolist()
        left = [order[at] for at in (*place.skipped, *range(place.offset, num_examples))]
        for position in range(num_examples):
            is_left = num_left > 0 and position in left
            assert used.count(position) == num_epochs - is_left


@given(NUM_EXAMPLES, st.integers(1, 200), st.data())
def test_the_place_after_a_window_is_that_after_its_parts(
    num_examples: int, quota: int, data: st.DataObject
) -> None:
    """A window that is longer than the data is one pass over all examples after another."""
    place = data.draw(places(num_examples))
    whole, parts = take(place, quota, num_examples), list[int]()
    for start in range(0, quota, num_examples):
        part = take(place, min(quota - start, num_examples), num_examples)
        parts += part.positions
        place = part.after(len(part.positions))
    assert (whole.positions, whole.after(quota)) == (tuple(parts), place)


@given(NUM_EXAMPLES, QUOTA, st.data())
def test_after_a_stopped_window_the_sampler_continues_after_its_used_examples(
    num_examples: int, quota: int, data: st.DataObject
) -> None:
    first = take(SamplerPosition(), min(quota, num_examples), num_examples)
    num_taken = data.draw(st.integers(1, len(first.positions)))
    rest = take(first.after(num_taken), num_examples, num_examples)
    num_left = num_examples - num_taken
    whole = tuple(permutation(1, 0, "pi", num_examples).tolist())
    assert first.positions[:num_taken] + rest.positions[:num_left] == whole


@given(NUM_EXAMPLES, QUOTA, st.integers(0, 20), st.data())
def test_examples_beyond_the_quota_are_the_next_ones_and_none_is_there_twice(
    num_examples: int, quota: int, num_more: int, data: st.DataObject
) -> None:
    place = data.draw(places(num_examples))
    taken = window(
        place,
        quota=quota,
        num_more=num_more,
        run_seed=1,
        name="pi",
        num_examples=num_examples,
    )
    expected = take(place, quota + num_more, num_examples).positions
    assert taken.positions == expected[: max(quota, min(quota + num_more, num_examples))]


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
    walk = SamplerState().pend(1, first.after(4))
    again = take(walk.settle(None).place, 4, 10)
    assert again == first


def test_a_counted_round_advances_the_sampler() -> None:
    first = take(SamplerPosition(), 4, 10)
    walk = SamplerState().pend(7, first.after(4)).settle(7)
    assert walk == SamplerState(place=SamplerPosition(epoch=0, offset=4), settled_round=7)


def test_an_older_counted_round_does_not_commit_a_later_pending_position() -> None:
    walk = SamplerState(place=SamplerPosition(offset=4)).pend(9, SamplerPosition(offset=8))
    assert walk.settle(7).place == SamplerPosition(offset=4)


def test_settling_twice_advances_the_sampler_once() -> None:
    walk = SamplerState().pend(3, SamplerPosition(offset=5))
    assert walk.settle(3).settle(3).place == SamplerPosition(offset=5)


@given(places(40), places(40), st.none() | st.integers(0, 2**53))
def test_a_sampler_state_survives_json(
    place: SamplerPosition, after: SamplerPosition, pending: int | None
) -> None:
    walk = SamplerState(
        place=place, pending_round=pending, pending_place=after, settled_round=pending
    )
    assert read_sampler(json.loads(json.dumps(dataclasses.asdict(walk)))) == walk


def test_a_sampler_state_of_an_earlier_version_still_loads() -> None:
    plain = {
        "place": {"epoch": 2, "offset": 5},
        "pending_round": 7,
        "pending_place": {"epoch": 3, "offset": 0},
    }
    assert read_sampler(plain) == SamplerState(
        place=SamplerPosition(epoch=2, offset=5),
        pending_round=7,
        pending_place=SamplerPosition(epoch=3),
    )


@given(NUM_EXAMPLES, places(60), QUOTA)
def test_a_data_set_that_became_smaller_still_yields_existing_examples(
    num_examples: int, place: SamplerPosition, quota: int
) -> None:
    taken = take(place, min(quota, num_examples), num_examples)
    assert set(taken.positions) <= set(range(num_examples))
    assert len(set(taken.positions)) == len(taken.positions) == min(quota, num_examples)


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


def test_each_run_and_each_client_holds_other_examples_out() -> None:
    given: dict[str, Any] = {"num_examples": 100, "fraction": 0.3}
    drawn = {
        held_out_positions(**given, run_seed=seed, name=name)
        for seed in range(3)
        for name in ("pi", "nas")
    }
    assert len(drawn) == 6
    assert held_out_positions(**given, run_seed=2, name="nas") in drawn


@given(NUM_EXAMPLES, st.floats(0, 1, exclude_max=True))
def test_the_last_examples_are_held_out_if_that_is_asked(
    num_examples: int, fraction: float
) -> None:
    apart = held_out_positions(num_examples, fraction=fraction, run_seed=0, name="pi", is_last=True)
    count = min(int(num_examples * fraction), num_examples - 1)
    assert list(apart) == list(range(num_examples - count, num_examples))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.floats(0, 1, exclude_max=True))
def test_whole_groups_are_held_out_until_they_have_enough_and_one_stays(
    groups: list[int], fraction: float
) -> None:
    groups_E = np.array(groups)
    chosen: dict[str, Any] = {"fraction": fraction, "run_seed": 0, "name": "pi"}
    apart = held_out_positions(len(groups), **chosen, groups_E=groups_E)
    held = {groups[at] for at in apart}
    assert set(apart) == {at for at, group in enumerate(groups) if group in held}
    assert held != set(groups)
    count = int(len(groups) * fraction)
    assert len(apart) >= count or len(held) == len(set(groups)) - 1
    if held:  # without the last of them there were too few
        sizes = [groups.count(group) for group in held]
        assert len(apart) - max(sizes) < count


# A window that ends early, whose examples were used in any order within an epoch.


@given(NUM_EXAMPLES, st.integers(1, 90), st.data())
def test_after_some_examples_of_an_epoch_the_next_windows_have_the_others_once(
    num_examples: int, quota: int, data: st.DataObject
) -> None:
    taken = take(data.draw(places(num_examples)), quota, num_examples)
    epochs = taken.by_epoch()
    assert [p for positions in epochs for p in positions] == list(taken.positions)
    at = data.draw(st.integers(0, len(epochs) - 1))
    some = data.draw(st.sets(st.sampled_from(epochs[at]))) if epochs[at] else set()
    used = [p for positions in epochs[:at] for p in positions] + sorted(some)
    after = taken.after_use_of(used).of_existing(num_examples)
    left = [p for p in epochs[at] if p not in some]
    epoch = taken.place.epoch + at
    rest = take(after, after.num_left(num_examples), num_examples)
    if after.epoch == epoch:  # the rest of this epoch: what the window left, and what comes after
        whole_epoch = take(taken.after(sum(map(len, epochs[:at]))), num_examples, num_examples)
        expected = {*whole_epoch.by_epoch()[0]} - some
        assert sorted(rest.positions) == sorted(expected)
        assert {*left} <= {*rest.positions}
    else:
        assert not left


@given(NUM_EXAMPLES, st.integers(1, 90), st.data())
def test_examples_used_in_their_order_leave_the_position_after_their_number(
    num_examples: int, quota: int, data: st.DataObject
) -> None:
    taken = take(data.draw(places(num_examples)), quota, num_examples)
    number = data.draw(st.integers(0, quota))
    assert taken.after_use_of(taken.positions[:number]) == taken.after(number)


@given(NUM_EXAMPLES, st.integers(2, 90), st.data())
def test_the_parts_of_a_window_have_its_examples_of_each_epoch(
    num_examples: int, quota: int, data: st.DataObject
) -> None:
    taken = take(data.draw(places(num_examples)), quota, num_examples)
    middle = data.draw(st.integers(1, quota))
    parts = [taken.part(0, middle), taken.part(middle, quota)]
    ends = {0, *np.cumsum([len(positions) for positions in taken.by_epoch()]).tolist(), middle}
    lengths = np.diff(sorted(ends)).tolist()
    assert [len(p) for part in parts for p in part.by_epoch() if p] == lengths


def test_an_order_that_no_memory_holds_says_how_many_examples_there_are() -> None:
    with pytest.raises(OutOfMemory, match=r"order of 1,125,899,906,842,624 examples") as found:
        permutation(0, 0, "a", 2**50)
    assert "fewer examples" in found.value.remedy
