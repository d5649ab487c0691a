"""Partitions: laws that hold for every kind, and the distributions that they draw from."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headwater.common.data.partition import (
    Column,
    DisjointPartition,
    Partition,
    fill_empty_devices,
    partition_examples,
)
from headwater.common.data.partition_spec import parse_rule
from headwater.common.data.portable_random import PortableRandom
from headwater.common.errors import NoSuchPartition

KINDS = [
    "iid",
    "dirichlet:0.05",
    "dirichlet:1",
    "labels:1",
    "labels:2",
    "column:author",
    "quantity:1",
    "quantity:5",
    "quantity:dirichlet:0.1",
]
# A statistic may miss its bound once in 10^9 seeds; the seeds here are fixed.
RARE = 1e-9


def column_of(codes: list[int] | np.ndarray) -> Column:
    values, numbered = np.unique(codes, return_inverse=True)
    return Column(codes_E=numbered.astype(np.int64), values_V=values)


def partitioned(
    kind: str,
    codes: list[int] | np.ndarray,
    num_devices: int,
    *,
    seed: int = 0,
    examples_per_device: int | None = None,
) -> Partition:
    rule = parse_rule(kind, examples_per_device=examples_per_device, seed=seed)
    assert rule is not None
    column = None if rule.column is None else column_of(codes)
    return partition_examples(rule, column, num_examples=len(codes), num_devices=num_devices)


def disjoint(
    kind: str, codes: list[int] | np.ndarray, num_devices: int, **how: int
) -> DisjointPartition:
    partition = partitioned(kind, codes, num_devices, **how)
    assert isinstance(partition, DisjointPartition)
    return partition


def sizes(partition: Partition) -> list[int]:
    return [len(partition.positions(device)) for device in range(partition.num_devices)]


def labels_held(partition: Partition, codes: np.ndarray, device: int) -> Counter[int]:
    return Counter(codes[partition.positions(device)].tolist())


CODES = st.lists(st.integers(0, 6), min_size=1, max_size=120)


def possible(kind: str, codes: list[int], num_devices: int) -> bool:
    """Return whether each device can have its labels, or an author of its own."""
    of_each = Counter(codes)
    if kind.startswith("column"):
        return num_devices <= len(of_each)
    if not kind.startswith("labels"):
        return num_devices <= len(codes)
    per_device = int(kind.partition(":")[2])
    shards = num_devices * per_device
    room = sum(min(count, num_devices) for count in of_each.values())
    return per_device <= len(of_each) <= shards <= room


@pytest.mark.parametrize("kind", KINDS)
@given(codes=CODES, seed=st.integers(0, 9), data=st.data())
def test_every_example_is_on_one_device_and_no_device_is_empty(
    kind: str, codes: list[int], seed: int, data: st.DataObject
) -> None:
    num_devices = data.draw(st.integers(1, len(codes) + 1))
    if not possible(kind, codes, num_devices):
        with pytest.raises(NoSuchPartition):
            partitioned(kind, codes, num_devices, seed=seed)
        return
    partition = partitioned(kind, codes, num_devices, seed=seed)
    everywhere = [partition.positions(device).tolist() for device in range(num_devices)]
    assert sorted(chain.from_iterable(everywhere)) == list(range(len(codes)))
    assert all(everywhere)


@pytest.mark.parametrize("kind", KINDS)
@given(
    codes=CODES,
    num_devices=st.integers(1, 10**6),
    data=st.data(),
)
def test_a_sampling_device_has_distinct_examples_and_at_least_one(
    kind: str, codes: list[int], num_devices: int, data: st.DataObject
) -> None:
    least = len(set(codes)) if kind.startswith("labels") else 1
    if kind == "labels:2":
        assume(least > 1)
    examples_per_device = data.draw(st.integers(least, len(codes)))
    partition = partitioned(kind, codes, num_devices, examples_per_device=examples_per_device)
    own = partition.positions(data.draw(st.integers(0, num_devices - 1))).tolist()
    assert 1 <= len(own) == len(set(own))
    assert set(own) <= set(range(len(codes)))
    if not kind.startswith("quantity"):
        assert len(own) <= examples_per_device


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("examples_per_device", [None, 4])
def test_a_seed_determines_the_partition(kind: str, examples_per_device: int | None) -> None:
    codes = np.arange(400) % 10
    drawn = [
        [
            partitioned(kind, codes, 10, seed=seed, examples_per_device=examples_per_device)
            .positions(device)
            .tolist()
            for device in range(10)
        ]
        for seed in (3, 3, 4)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


@given(st.integers(1, 300), st.integers(0, 300))
def test_iid_sizes_differ_by_at_most_one_example(num_devices: int, num_more: int) -> None:
    found = sizes(partitioned("iid", np.zeros(num_devices + num_more), num_devices))
    assert max(found) - min(found) <= 1


@given(CODES, st.integers(1, 30), st.integers(1, 4))
def test_each_device_has_the_given_number_of_labels_wherever_possible(
    codes: list[int], num_devices: int, per_device: int
) -> None:
    kind = f"labels:{per_device}"
    if not possible(kind, codes, num_devices):
        return
    partition = partitioned(kind, codes, num_devices)
    held = [labels_held(partition, np.array(codes), device) for device in range(num_devices)]
    assert {len(labels) for labels in held} == {per_device}


def test_shards_of_a_label_are_of_nearly_equal_size() -> None:
    # 30, 20 and 10 examples for 2 labels on each of 6 devices: 12 shards of 5.
    codes = np.repeat([0, 1, 2], [30, 20, 10])
    partition = partitioned("labels:2", codes, 6)
    held = [labels_held(partition, codes, device) for device in range(6)]
    assert sorted(sum(labels.values()) for labels in held) == [10] * 6
    assert {count for labels in held for count in labels.values()} == {5}


def test_a_value_is_on_one_device_and_devices_have_equally_many_values() -> None:
    codes = np.repeat(np.arange(10), np.arange(1, 11))
    partition = partitioned("column:author", codes, 4)
    held = [labels_held(partition, codes, device) for device in range(4)]
    assert sum(held, Counter()) == Counter(codes.tolist())
    assert sorted(len(authors) for authors in held) == [2, 2, 3, 3]
    assert sum(len(authors) for authors in held) == 10


def test_sampling_devices_draw_from_one_author_each() -> None:
    codes = np.repeat(np.arange(10), 30)
    partition = partitioned("column:author", codes, 25, examples_per_device=4)
    of = [labels_held(partition, codes, device) for device in range(25)]
    assert all(list(authors.values()) == [4] for authors in of)
    assert Counter(author for authors in of for author in authors).keys() == set(range(10))


# The distributions.


def normal_bound(num_claims: int) -> float:
    """Return the largest deviation of so many means, in standard errors, by the union bound."""
    return math.sqrt(2 * math.log(2 * num_claims / RARE))


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
def test_counts_of_a_label_have_the_variance_of_dirichlet_proportions(alpha: float) -> None:
    num_devices, num_labels, of_each = 40, 200, 400
    codes = np.repeat(np.arange(num_labels), of_each)
    partition = disjoint(f"dirichlet:{alpha}", codes, num_devices)
    assert partition.num_moved == 0
    counts = np.zeros((num_labels, num_devices))
    for device in range(num_devices):
        counts[:, device] = np.bincount(codes[partition.positions(device)], minlength=num_labels)
    # The variance of a Dirichlet-multinomial count (Mosimann 1962).
    share, total = 1 / num_devices, alpha * num_devices
    variance = of_each * share * (1 - share) * (of_each + total) / (1 + total)
    # A label's devices sum to a constant, labels are independent: a mean of 200 numbers.
    of_labels = ((counts - of_each * share) ** 2).mean(axis=1)
    standard_error = of_labels.std() / math.sqrt(num_labels)
    assert abs(of_labels.mean() - variance) < normal_bound(3) * standard_error
    # And no other variance would do: that of even shares, and that of shares all or nothing.
    assert abs(of_labels.mean() - of_each * share * (1 - share)) > 2 * standard_error
    assert of_labels.mean() < of_each**2 * share * (1 - share) / 2


def test_a_label_s_proportions_have_the_distribution_of_numpy_s_dirichlet() -> None:
    num_devices, num_labels, of_each, alpha = 10, 1000, 60, 0.3
    codes = np.repeat(np.arange(num_labels), of_each)
    partition = disjoint(f"dirichlet:{alpha}", codes, num_devices)
    ours = np.bincount(codes[partition.positions(0)], minlength=num_labels)
    generator = np.random.default_rng(0)
    shares = generator.dirichlet([alpha] * num_devices, size=num_labels)
    theirs = generator.multinomial(of_each, shares)[:, 0]
    steps = np.arange(of_each + 1)
    apart = (ours[:, None] <= steps).mean(axis=0) - (theirs[:, None] <= steps).mean(axis=0)
    # Each of the two is off by no more than Massart's bound (1990).
    assert np.abs(apart).max() < 2 * math.sqrt(math.log(2 / RARE) / (2 * num_labels))


def test_a_sampled_mix_is_dirichlet_around_the_labels_overall_fractions() -> None:
    # Hsu et al. 2019: the mix q is from Dirichlet(c p), so Var q = p (1 - p) / (1 + c).
    alpha, per_device, num_devices = 0.5, 100, 1000
    codes = np.repeat([0, 1], [3000, 1000])
    partition = partitioned(
        f"dirichlet:{alpha}", codes, num_devices, examples_per_device=per_device
    )
    first = np.array(
        [labels_held(partition, codes, device)[0] for device in range(num_devices)], dtype=float
    )
    concentration, share = alpha * 2, 0.75
    mean = per_device * share
    variance = mean * (1 - share) * (per_device + concentration) / (1 + concentration)
    bound = normal_bound(2) / math.sqrt(num_devices)
    assert abs(first.mean() - mean) < bound * math.sqrt(variance)
    squares = (first - mean) ** 2
    assert abs(squares.mean() - variance) < bound * squares.std()


def test_lognormal_sizes_have_the_given_standard_deviation() -> None:
    num_devices, sigma = 1000, 1.0
    found = np.array(sizes(partitioned("quantity:1", np.zeros(500_000), num_devices)), dtype=float)
    logarithms = np.log(found)
    # The standard error of a normal sample's deviation; rounding to whole examples, here some
    # 500 a device, is far below it.
    assert abs(logarithms.std() - sigma) < normal_bound(1) * sigma / math.sqrt(2 * num_devices)


@pytest.mark.parametrize("law", ["quantity:1", "quantity:dirichlet:0.5"])
def test_sampled_sizes_have_the_given_mean(law: str) -> None:
    num_devices, mean = 4000, 50
    found = np.array(
        sizes(partitioned(law, np.zeros(100_000), num_devices, examples_per_device=mean))
    )
    # Rounding moves the mean by less than half an example, and so does "at least one".
    standard_error = found.std() / math.sqrt(num_devices)
    assert abs(found.mean() - mean) < normal_bound(2) * standard_error + 1


def test_empty_devices_get_an_example_of_the_largest_and_are_counted() -> None:
    partition = fill_empty_devices(np.repeat([1, 3], [30, 28]), 6, PortableRandom(0))
    # Device 1 gives two until both have 28, then they give in turn.
    assert sizes(partition) == [1, 27, 1, 27, 1, 1]
    assert partition.num_moved == 4
    assert sorted(partition.order_E.tolist()) == list(range(58))


# Impossible partitions.


@pytest.mark.parametrize(
    ("kind", "num_devices", "examples_per_device", "words"),
    [
        ("iid", 41, None, "40 examples cannot be partitioned among 41 devices"),
        ("dirichlet", 41, None, "40 examples cannot be partitioned among 41 devices"),
        ("iid", 2, 41, "should draw 41 different examples, and there are 40"),
        ("labels:5", 2, None, "should have 5 labels, and there are 4"),
        ("labels:1", 3, None, "have 3 labels at most, and there are 4"),
        ("labels:2", 30, None, "need 60 shards, and these examples can be cut into 40"),
        ("labels:5", 2, 20, "should have 5 labels; there are 4"),
        ("labels:3", 2, 2, "each draws 2 examples"),
        ("column:author", 5, None, "4 values, too few for 5 devices"),
    ],
)
def test_an_impossible_partition_is_an_error_with_a_remedy(
    kind: str, num_devices: int, examples_per_device: int | None, words: str
) -> None:
    codes = np.arange(40) % 4
    with pytest.raises(NoSuchPartition, match=words) as caught:
        partitioned(kind, codes, num_devices, examples_per_device=examples_per_device)
    assert caught.value.remedy


@pytest.mark.parametrize("kind", ["dirichlet:1", "quantity:1"])
def test_a_thousand_of_a_million_devices_take_little_memory(kind: str) -> None:
    codes = np.arange(60_000) % 10
    tracemalloc.start()
    partition = partitioned(kind, codes, 10**6, examples_per_device=20)
    opened = [partition.positions(device) for device in range(0, 10**6, 10**3)]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(opened) == 1000
    assert peak_bytes < 10 * 2**20  # sixty thousand numbers take half of one
