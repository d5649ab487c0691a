"""Partitions a data set among devices: the positions of each device's examples.

There are two kinds. *Disjoint*: each example is on exactly one device, and each device has at least
one. It is computed for all devices at once and stored as two arrays, of E positions and of D + 1
starts, with D <= E. *Sampled*: with ``examples_per_device`` a device draws distinct examples of its
own, and other devices may draw the same. That needs only the device's number, so a population of a
million costs nothing until a device's examples are requested.

A partition is a pure function of the rule, its seed, the column, and the numbers of examples and
devices, so all processes compute the same one.

Sources: labels by Dirichlet proportions, Yurochkin et al. 2019, section 4, and Li et al. 2022
(NIID-Bench), where sizes by Dirichlet are too; the label mix of a sampling device, Hsu et al. 2019;
labels per device, McMahan et al. 2017, section 3. They cut by proportions drawn from a Dirichlet
distribution; here the examples are drawn one after another from its urn (Blackwell and MacQueen
1973). That is a multinomial draw with Dirichlet proportions, and takes time and memory proportional
to the number of examples, whatever the number of devices and labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwater.common.data.partition_spec import DRAW_INSTEAD, USE_FEWER_DEVICES, PartitionRule
from headwater.common.data.portable_random import FloatArray, IntArray, PortableRandom
from headwater.common.errors import NoSuchPartition

# Dimensions: E examples, D devices, V different values of a column.

# Weights are rounded to integers up to this one, so that all machines cut alike (portable_random).
MAX_WEIGHT = 2.0**36


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of a data set: example e has the value ``values_V[codes_E[e]]``."""

    codes_E: IntArray
    values_V: np.ndarray[Any, Any]

    @property
    def num_values(self) -> int:
        """The number of different values."""
        return len(self.values_V)

    def examples_by_value(self, order_E: IntArray) -> tuple[IntArray, IntArray]:
        """Return the examples sorted by value, equal ones as in ``order_E``, and V + 1 starts."""
        sorted_E = order_E[np.argsort(self.codes_E[order_E], kind="stable")]
        sizes_V = np.bincount(self.codes_E, minlength=self.num_values)
        return sorted_E, _starts(sizes_V)


@dataclass(frozen=True, kw_only=True, slots=True)
class DisjointPartition:
    """Each example is on one device; device d has ``order_E[starts_D1[d] : starts_D1[d + 1]]``.

    ``num_moved`` examples were moved from the largest devices to devices that had none.
    """

    order_E: IntArray
    starts_D1: IntArray
    num_moved: int = 0

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self.starts_D1) - 1

    def positions(self, device: int) -> IntArray:
        """Return the positions of a device's examples, at least one: a view of ``order_E``."""
        return self.order_E[self.starts_D1[device] : self.starts_D1[device + 1]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledPartition:
    """Each device's examples are drawn when they are requested."""

    num_devices: int
    draw: Callable[[int], IntArray]

    def positions(self, device: int) -> IntArray:
        """Return the positions of a device's examples, at least one."""
        return self.draw(device)


Partition = DisjointPartition | SampledPartition


def partition_examples(
    rule: PartitionRule, column: Column | None, *, num_examples: int, num_devices: int
) -> Partition:
    """Partition the examples by a rule; the column is the one that the rule names, if any.

    Raises:
        NoSuchPartition: there are too few examples, labels or values for so many devices.
    """
    if rule.examples_per_device is not None:
        return _drawn(rule, column, rule.examples_per_device, num_examples, num_devices)
    if num_devices > num_examples:
        raise NoSuchPartition(
            f"{num_examples:,} examples cannot be partitioned among {num_devices:,} devices",
            remedy=f"{USE_FEWER_DEVICES}, or {DRAW_INSTEAD}",
        )
    rng = PortableRandom("dealt", rule.seed, rule.kind, num_devices)
    if rule.kind == "quantity" and rule.law == "lognormal":
        return _by_weight(_lognormal(rng, num_devices, rule.amount), num_examples, rng)
    if rule.kind == "iid":
        starts_D1 = np.arange(num_devices + 1, dtype=np.int64) * num_examples // num_devices
        return DisjointPartition(order_E=rng.permutation(num_examples), starts_D1=starts_D1)
    if rule.kind == "quantity":
        column = Column(codes_E=np.zeros(num_examples, dtype=np.int64), values_V=np.zeros(1))
    assert column is not None
    if rule.kind == "labels":
        sorted_E, starts_V1 = column.examples_by_value(rng.permutation(num_examples))
        from headwater.common.data.label_shards import assign_label_shards

        devices_E = assign_label_shards(sorted_E, starts_V1, int(rule.amount), num_devices, rng)
    elif rule.kind == "column":
        devices_E = _by_value(column, num_devices, rng)
    else:
        devices_E = _by_urn(column, rule.amount, num_devices, rng)
    return fill_empty_devices(devices_E, num_devices, rng)


# Disjoint partitions.


def fill_empty_devices(
    devices_E: IntArray, num_devices: int, rng: PortableRandom
) -> DisjointPartition:
    """Sort the examples by device; each empty device gets a random one of a largest device."""
    order_E = rng.permutation(len(devices_E))
    order_E = order_E[np.argsort(devices_E[order_E], kind="stable")]
    sizes_D = np.bincount(devices_E, minlength=num_devices)
    empty_D = np.flatnonzero(sizes_D == 0)
    if len(empty_D):
        # An example's height is its index on its device. The highest are moved first, so always one
        # of the largest devices loses an example, and never its last.
        heights_E = np.arange(len(order_E)) - np.repeat(_starts(sizes_D)[:-1], sizes_D)
        moved = order_E[np.argsort(-heights_E, kind="stable")[: len(empty_D)]]
        devices_E = devices_E.copy()
        devices_E[moved] = empty_D
        order_E = order_E[np.argsort(devices_E[order_E], kind="stable")]
        sizes_D = np.bincount(devices_E, minlength=num_devices)
    return DisjointPartition(order_E=order_E, starts_D1=_starts(sizes_D), num_moved=len(empty_D))


def _lognormal(rng: PortableRandom, count: int, sigma: float) -> FloatArray:
    """Return lognormal floats with mean 1."""
    return np.asarray(np.exp(sigma * rng.normals(count) - sigma * sigma / 2))


def _by_weight(weights_D: FloatArray, num_examples: int, rng: PortableRandom) -> DisjointPartition:
    """Give one example to each device, and divide the rest by weight."""
    weights_int_D = np.rint(weights_D / weights_D.max() * MAX_WEIGHT).astype(np.int64)
    cuts_D1 = _starts(weights_int_D)
    num_devices = len(weights_D)
    extra_D1 = np.floor(cuts_D1 / cuts_D1[-1] * (num_examples - num_devices)).astype(np.int64)
    starts_D1 = np.arange(num_devices + 1, dtype=np.int64) + extra_D1
    return DisjointPartition(order_E=rng.permutation(num_examples), starts_D1=starts_D1)


def _urn(ages_E: IntArray, concentration: float, rng: PortableRandom) -> IntArray:
    """Return, for each draw from an urn, the array index of the first draw of its colour.

    ``ages_E`` counts the earlier draws from the same urn; the array holds several urns in sequence.
    With probability c / (c + age) a draw has a new colour; otherwise it repeats the colour of a
    uniformly chosen earlier draw. These are draws with proportions from Dirichlet(c) (Blackwell and
    MacQueen 1973).
    """
    count = len(ages_E)
    index_E = np.arange(count, dtype=np.int64)
    is_new_E = rng.uniform(count) * (concentration + ages_E) < concentration
    is_new_E |= ages_E == 0
    earlier_E = index_E - ages_E + rng.integers(np.maximum(ages_E, 1), count)
    roots_E = np.where(is_new_E, index_E, earlier_E)
    while True:  # at most log2 of the longest chain: each step doubles the distance
        further_E = roots_E[roots_E]
        if np.array_equal(further_E, roots_E):
            return roots_E
        roots_E = further_E


def _by_urn(column: Column, alpha: float, num_devices: int, rng: PortableRandom) -> IntArray:
    """Divide each value's examples by its own proportions from Dirichlet(alpha, ..., alpha)."""
    num_examples = len(column.codes_E)
    sorted_E, starts_V1 = column.examples_by_value(np.arange(num_examples))
    sizes_V = np.diff(starts_V1)
    ages_E = np.arange(num_examples) - np.repeat(starts_V1[:-1], sizes_V)
    roots_E = _urn(ages_E, alpha * num_devices, rng)
    devices_E = np.empty(num_examples, dtype=np.int64)
    devices_E[sorted_E] = rng.integers(num_devices, num_examples)[roots_E]
    return devices_E


def _by_value(column: Column, num_devices: int, rng: PortableRandom) -> IntArray:
    """Give all examples of a value to one device; devices differ by at most one value."""
    if column.num_values < num_devices:
        raise NoSuchPartition(
            f"the column has {column.num_values:,} values, too few for {num_devices:,} devices",
            remedy=f"{USE_FEWER_DEVICES}, or {DRAW_INSTEAD}",
        )
    ranks_V = np.argsort(rng.permutation(column.num_values))
    return np.asarray(ranks_V[column.codes_E] % num_devices)


def _starts(sizes: IntArray) -> IntArray:
    """Return 0 and the cumulative sums of the sizes."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])


# Sampled partitions.


def _drawn(
    rule: PartitionRule, column: Column | None, per_device: int, num_examples: int, num_devices: int
) -> SampledPartition:
    """Return the partition in which each device draws ``per_device`` examples independently."""
    if per_device > num_examples:
        raise NoSuchPartition(
            f"each device should draw {per_device:,} different examples, and there are "
            f"{num_examples:,}",
            remedy="lower --examples-per-device",
        )
    if column is not None:
        draw = _draw_by_value(rule, column, per_device)
        return SampledPartition(num_devices=num_devices, draw=draw)
    size_of = _size_of(rule, per_device, num_examples)

    def draw_any(device: int) -> IntArray:
        rng = _device_rng(rule, device)
        return rng.sample(size_of(rng), num_examples)

    return SampledPartition(num_devices=num_devices, draw=draw_any)


def _device_rng(rule: PartitionRule, device: int) -> PortableRandom:
    return PortableRandom("drawn", rule.seed, rule.kind, device)


def _draw_by_value(
    rule: PartitionRule, column: Column, per_device: int
) -> Callable[[int], IntArray]:
    """Return a function that draws a device's examples, so many of each value of the column."""
    if rule.kind == "labels" and rule.amount > min(column.num_values, per_device):
        raise NoSuchPartition(
            f"each device should have {rule.amount:,.0f} labels; there are {column.num_values:,}, "
            f"and each draws {per_device:,} examples",
            remedy="ask for fewer labels on each, or raise --examples-per-device",
        )
    sorted_E, starts_V1 = column.examples_by_value(np.arange(len(column.codes_E)))
    values_V = PortableRandom("values", rule.seed, rule.kind).permutation(column.num_values)

    def draw(device: int) -> IntArray:
        """Draw the rule's number of examples of each value, or all that the value has."""
        rng = _device_rng(rule, device)
        if rule.kind == "dirichlet":
            counts = _mix(column.codes_E, column.num_values * rule.amount, per_device, rng)
        elif rule.kind == "labels":
            values = rng.sample(int(rule.amount), column.num_values).tolist()
            counts = {
                value: per_device // len(values) + (at < per_device % len(values))
                for at, value in enumerate(values)
            }
        else:
            counts = {int(values_V[device % column.num_values]): per_device}
        return np.concatenate(
            [
                sorted_E[start + rng.sample(min(count, end - start), end - start)]
                for value, count in counts.items()
                for start, end in (starts_V1[value : value + 2].tolist(),)
            ]
        )

    return draw


def _size_of(rule: PartitionRule, mean: int, num_examples: int) -> Callable[[PortableRandom], int]:
    """Return a function that draws a device's number of examples, from 1 to all, by the rule."""

    def size(rng: PortableRandom) -> int:
        if rule.kind == "iid":
            return mean
        if rule.law == "lognormal":
            factor = float(_lognormal(rng, 1, rule.amount)[0])
        else:
            factor = rng.gamma(rule.amount) / rule.amount
        return max(min(math.floor(mean * factor + 0.5), num_examples), 1)

    return size


def _mix(
    codes_E: IntArray, concentration: float, count: int, rng: PortableRandom
) -> dict[int, int]:
    """Return the number of examples of each value that a device draws.

    Its mix is drawn from Dirichlet(concentration x the values' fractions of all examples).
    """
    roots = _urn(np.arange(count, dtype=np.int64), concentration, rng)
    values = codes_E[rng.integers(len(codes_E), count)][roots]
    distinct, counts = np.unique(values, return_counts=True)
    return dict(zip(distinct.tolist(), counts.tolist(), strict=True))
