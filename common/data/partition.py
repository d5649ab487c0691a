"""Who gets which examples: the positions in a data set that a partition deals out to each device.

There are two ways. *Dealt out once*: each example is on exactly one device, and none is left
without any. It is worked out for all devices at once and kept as two arrays, of E positions and of
D + 1 starts, with D <= E. *Drawn*: with ``examples_per_device`` a device draws its own examples,
different from one another, and others may draw the same. That takes nothing but the device's
number, so there may be a million of them, of which only those exist that are asked for.

Everything is a pure function of the rule, its seed, the column, the number of examples, and that of
devices: no process has to tell another.

Sources: labels by shares from Dirichlet, Yurochkin et al. 2019, section 4, and Li et al. 2022
(NIID-Bench), where sizes by Dirichlet are too; the mix of a device that draws, Hsu et al. 2019;
labels per device, McMahan et al. 2017, section 3. Where these cut by shares that were drawn from a
Dirichlet distribution, here one example after another is drawn from its urn (Blackwell and MacQueen
1973). That is a multinomial draw by Dirichlet shares, and takes time and memory by the number of
examples, whatever the number of devices and labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headwater.common.data.label_shards import owners_by_labels
from headwater.common.data.partition_spec import DRAW, FEWER, Rule
from headwater.common.data.portable_random import Chance, Shares, Whole
from headwater.common.errors import NoSuchPartition

# Dimensions: E examples, D devices, V different values of a column.

# Weights are rounded to whole numbers, of which the largest is this: see common.chance.
LARGEST_WEIGHT = 2.0**36


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """What one column says of each example: ``values_V[codes_E[example]]``."""

    codes_E: Whole
    values_V: np.ndarray[Any, Any]

    @property
    def num_values(self) -> int:
        """How many different values there are."""
        return len(self.values_V)

    def examples_by_value(self, order_E: Whole) -> tuple[Whole, Whole]:
        """Return the examples sorted by value, alike ones as in ``order_E``, and V + 1 starts."""
        sorted_E = order_E[np.argsort(self.codes_E[order_E], kind="stable")]
        sizes_V = np.bincount(self.codes_E, minlength=self.num_values)
        return sorted_E, _starts(sizes_V)


class Dealing(Protocol):
    """What each device has."""

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        ...

    def positions(self, device: int) -> Whole:
        """Return the positions of a device's examples in the whole data set: at least one."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DealtOnce:
    """Each example is on one device; device d has ``order_E[starts_D1[d] : starts_D1[d + 1]]``.

    ``num_moved`` of them were taken from the largest devices for those that had none.
    """

    order_E: Whole
    starts_D1: Whole
    num_moved: int = 0

    @property
    def num_devices(self) -> int:
        return len(self.starts_D1) - 1

    def positions(self, device: int) -> Whole:
        """See ``Dealing``; a view of the common array."""
        return self.order_E[self.starts_D1[device] : self.starts_D1[device + 1]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Each device draws its own examples when it is asked for."""

    num_devices: int
    draw: Callable[[int], Whole]

    def positions(self, device: int) -> Whole:
        return self.draw(device)


def deal(rule: Rule, column: Column | None, *, num_examples: int, num_devices: int) -> Dealing:
    """Deal the examples out; the column is the one that the rule names, if it names one.

    Raises:
        NoSuchPartition: there are too few examples, labels or values for so many devices.
    """
    if rule.examples_per_device is not None:
        return _drawn(rule, column, rule.examples_per_device, num_examples, num_devices)
    if num_devices > num_examples:
        raise NoSuchPartition(
            f"{num_examples:,} examples cannot be dealt out to {num_devices:,} devices",
            remedy=f"{FEWER}, or {DRAW}",
        )
    chance = Chance("dealt", rule.seed, rule.kind, num_devices)
    if rule.kind == "quantity" and rule.law == "lognormal":
        return _by_weight(_lognormal(chance, num_devices, rule.amount), num_examples, chance)
    if rule.kind == "iid":
        starts_D1 = np.arange(num_devices + 1, dtype=np.int64) * num_examples // num_devices
        return DealtOnce(order_E=chance.order(num_examples), starts_D1=starts_D1)
    if rule.kind == "quantity":
        column = Column(codes_E=np.zeros(num_examples, dtype=np.int64), values_V=np.zeros(1))
    assert column is not None
    if rule.kind == "labels":
        sorted_E, starts_V1 = column.examples_by_value(chance.order(num_examples))
        owners_E = owners_by_labels(sorted_E, starts_V1, int(rule.amount), num_devices, chance)
    elif rule.kind == "column":
        owners_E = _by_value(column, num_devices, chance)
    else:
        owners_E = _by_urn(column, rule.amount, num_devices, chance)
    return none_empty(owners_E, num_devices, chance)


# Dealt out once.


def none_empty(owners_E: Whole, num_devices: int, chance: Chance) -> DealtOnce:
    """Sort the examples by owner; who has none gets one, at random, of those who have the most."""
    order_E = chance.order(len(owners_E))
    order_E = order_E[np.argsort(owners_E[order_E], kind="stable")]
    sizes_D = np.bincount(owners_E, minlength=num_devices)
    poor = np.flatnonzero(sizes_D == 0)
    if len(poor):
        # An example's height is its number on its device: the highest are taken off first, so it
        # is always one of the largest devices that loses one, and never its last.
        heights_E = np.arange(len(order_E)) - np.repeat(_starts(sizes_D)[:-1], sizes_D)
        taken = order_E[np.argsort(-heights_E, kind="stable")[: len(poor)]]
        owners_E = owners_E.copy()
        owners_E[taken] = poor
        order_E = order_E[np.argsort(owners_E[order_E], kind="stable")]
        sizes_D = np.bincount(owners_E, minlength=num_devices)
    return DealtOnce(order_E=order_E, starts_D1=_starts(sizes_D), num_moved=len(poor))


def _lognormal(chance: Chance, count: int, sigma: float) -> Shares:
    """Return lognormal numbers of mean 1."""
    return np.asarray(np.exp(sigma * chance.normals(count) - sigma * sigma / 2))


def _by_weight(weights_D: Shares, num_examples: int, chance: Chance) -> DealtOnce:
    """Give one example to each device, and cut the others by weight."""
    whole_D = np.rint(weights_D / weights_D.max() * LARGEST_WEIGHT).astype(np.int64)
    cuts_D1 = _starts(whole_D)
    num_devices = len(weights_D)
    beyond_D1 = np.floor(cuts_D1 / cuts_D1[-1] * (num_examples - num_devices)).astype(np.int64)
    starts_D1 = np.arange(num_devices + 1, dtype=np.int64) + beyond_D1
    return DealtOnce(order_E=chance.order(num_examples), starts_D1=starts_D1)


def _urn(ages_E: Whole, concentration: float, chance: Chance) -> Whole:
    """Return for each draw from an urn the first draw of its colour, as a place in the array.

    ``ages_E`` counts the draws before each, from 0 in each urn; several urns stand one behind the
    other. With the chance c / (c + age) a draw is of a fresh colour, else it has that of an earlier
    one, each as likely. Blackwell and MacQueen 1973: these are draws by shares from Dirichlet(c).
    """
    count = len(ages_E)
    places_E = np.arange(count, dtype=np.int64)
    is_fresh_E = chance.shares(count) * (concentration + ages_E) < concentration
    is_fresh_E |= ages_E == 0
    earlier_E = places_E - ages_E + chance.below(np.maximum(ages_E, 1), count)
    roots_E = np.where(is_fresh_E, places_E, earlier_E)
    while True:  # at most log2 of the longest way back, as each step doubles what it goes
        further_E = roots_E[roots_E]
        if np.array_equal(further_E, roots_E):
            return roots_E
        roots_E = further_E


def _by_urn(column: Column, alpha: float, num_devices: int, chance: Chance) -> Whole:
    """Deal each value's examples out by shares of its own from Dirichlet(alpha, ..., alpha)."""
    num_examples = len(column.codes_E)
    sorted_E, starts_V1 = column.examples_by_value(np.arange(num_examples))
    sizes_V = np.diff(starts_V1)
    ages_E = np.arange(num_examples) - np.repeat(starts_V1[:-1], sizes_V)
    roots_E = _urn(ages_E, alpha * num_devices, chance)
    owners_E = np.empty(num_examples, dtype=np.int64)
    owners_E[sorted_E] = chance.below(num_devices, num_examples)[roots_E]
    return owners_E


def _by_value(column: Column, num_devices: int, chance: Chance) -> Whole:
    """Give all examples of a value to one device, each device as many values, give or take one."""
    if column.num_values < num_devices:
        raise NoSuchPartition(
            f"the column has {column.num_values:,} values, which are too few for {num_devices:,} "
            "devices",
            remedy=f"{FEWER}, or {DRAW}",
        )
    ranks_V = np.argsort(chance.order(column.num_values))
    return np.asarray(ranks_V[column.codes_E] % num_devices)


def _starts(sizes: Whole) -> Whole:
    """Return 0 and the sums of the first one, two, ... sizes."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])


# Drawn by each device.


def _drawn(
    rule: Rule, column: Column | None, per_device: int, num_examples: int, num_devices: int
) -> Drawn:
    """Return what each device draws, whatever the others have."""
    if per_device > num_examples:
        raise NoSuchPartition(
            f"each device should draw {per_device:,} different examples, and there are "
            f"{num_examples:,}",
            remedy="lower --examples-per-device",
        )

    def chance_of(device: int) -> Chance:
        return Chance("drawn", rule.seed, rule.kind, device)

    if column is None:
        size_of = _size_of(rule, per_device, num_examples)

        def draw(device: int) -> Whole:
            chance = chance_of(device)
            return chance.some(size_of(chance), num_examples)

        return Drawn(num_devices=num_devices, draw=draw)
    if rule.kind == "labels" and rule.amount > min(column.num_values, per_device):
        raise NoSuchPartition(
            f"each device should have {rule.amount:,.0f} labels; there are {column.num_values:,}, "
            f"and each draws {per_device:,} examples",
            remedy="ask for fewer labels on each, or raise --examples-per-device",
        )
    sorted_E, starts_V1 = column.examples_by_value(np.arange(num_examples))
    values_V = Chance("values", rule.seed, rule.kind).order(column.num_values)

    def draw_by_value(device: int) -> Whole:
        """Draw of each value as many as the rule says, or all that it has."""
        chance = chance_of(device)
        if rule.kind == "dirichlet":
            counts = _mix(column.codes_E, column.num_values * rule.amount, per_device, chance)
        elif rule.kind == "labels":
            values = chance.some(int(rule.amount), column.num_values).tolist()
            counts = {
                value: per_device // len(values) + (at < per_device % len(values))
                for at, value in enumerate(values)
            }
        else:
            counts = {int(values_V[device % column.num_values]): per_device}
        return np.concatenate(
            [
                sorted_E[start + chance.some(min(count, end - start), end - start)]
                for value, count in counts.items()
                for start, end in (starts_V1[value : value + 2].tolist(),)
            ]
        )

    return Drawn(num_devices=num_devices, draw=draw_by_value)


def _size_of(rule: Rule, mean: int, num_examples: int) -> Callable[[Chance], int]:
    """Return the number of examples that a device draws, from 1 to all, by the law of its rule."""

    def size(chance: Chance) -> int:
        if rule.kind == "iid":
            return mean
        if rule.law == "lognormal":
            factor = float(_lognormal(chance, 1, rule.amount)[0])
        else:
            factor = chance.gamma(rule.amount) / rule.amount
        return max(min(math.floor(mean * factor + 0.5), num_examples), 1)

    return size


def _mix(codes_E: Whole, concentration: float, count: int, chance: Chance) -> dict[int, int]:
    """Return how many examples of each value a device draws, by its own mix.

    The mix is from Dirichlet(concentration x the values' shares of all examples).
    """
    roots = _urn(np.arange(count, dtype=np.int64), concentration, chance)
    values = codes_E[chance.below(len(codes_E), count)][roots]
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))
