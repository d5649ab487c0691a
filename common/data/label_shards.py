"""Just so many labels on each device: shards of one label each, and devices that take them.

McMahan et al. 2017, section 3, cut the examples, sorted by label, into as many shards for each
device; there a shard may lie across two labels, and a device may be dealt the same one twice. Here
neither happens.
"""

from __future__ import annotations

import heapq

import numpy as np

from headwater.common.data.partition_spec import DRAW, FEWER
from headwater.common.data.portable_random import Chance, Whole
from headwater.common.errors import NoSuchPartition

# Dimensions: E examples, V different labels.


def owners_by_labels(
    sorted_E: Whole, starts_V1: Whole, per_device: int, num_devices: int, chance: Chance
) -> Whole:
    """Give each device examples of ``per_device`` different labels; return each example's device.

    ``sorted_E`` are the examples by label, and ``starts_V1`` where each label begins. A label is
    cut into shards as equal as may be, at most one a device; ``_dealers_choice`` finds the devices.

    Raises:
        NoSuchPartition: it cannot be: more labels than shards, or too few examples or labels.
    """
    sizes_V = np.diff(starts_V1)
    shards_V = _shards(sizes_V, per_device, num_devices)
    owners_E = np.empty(len(sorted_E), dtype=np.int64)
    hands: list[list[int]] = [[] for _ in range(per_device)]
    hands.append(list(range(num_devices)))
    for label in chance.order(len(sizes_V)).tolist():
        num_shards, size = int(shards_V[label]), int(sizes_V[label])
        devices = np.array(_dealers_choice(hands, num_shards, chance))
        mine = sorted_E[starts_V1[label] : starts_V1[label + 1]]
        owners_E[mine] = devices[np.arange(size) * num_shards // size]
    return owners_E


def _shards(sizes_V: Whole, per_device: int, num_devices: int) -> Whole:
    """Return how many shards each label is cut into, so that the largest shard is smallest."""
    num_labels, total = len(sizes_V), per_device * num_devices
    most_V = np.minimum(sizes_V, num_devices)
    if per_device > num_labels:
        raise NoSuchPartition(
            f"each device should have {per_device:,} labels, and there are {num_labels:,}",
            remedy="ask for fewer labels on each: --partition labels:N",
        )
    if num_labels > total:
        raise NoSuchPartition(
            f"{num_devices:,} devices with {per_device:,} labels each hold {total:,} at the most, "
            f"and there are {num_labels:,}: the others would be nowhere",
            remedy=f"ask for {-(-num_labels // num_devices):,} labels on each, or for more devices",
        )
    if int(most_V.sum()) < total:
        raise NoSuchPartition(
            f"{num_devices:,} devices with {per_device:,} labels each need {total:,} shards, and "
            f"these examples can be cut into {int(most_V.sum()):,}, one a device and label",
            remedy=f"{FEWER} or fewer labels on each, or {DRAW}",
        )
    shards = [1] * num_labels
    largest = [(-float(size), label) for label, size in enumerate(sizes_V) if most_V[label] > 1]
    heapq.heapify(largest)
    for _ in range(total - num_labels):
        _, label = heapq.heappop(largest)
        shards[label] += 1
        if shards[label] < most_V[label]:
            heapq.heappush(largest, (-int(sizes_V[label]) / shards[label], label))
    return np.array(shards)


def _dealers_choice(hands: list[list[int]], count: int, chance: Chance) -> list[int]:
    """Take ``count`` different devices of those with the most places left, at random among equals.

    ``hands[r]`` are the devices with r places left; those that are taken lose one. By Gale and
    Ryser (1957) this never runs out where any way of dealing exists, and one does if no label has
    more shards than there are devices.
    """
    moved: list[tuple[int, list[int]]] = []
    wanted = count
    for left in range(len(hands) - 1, 0, -1):
        hand = hands[left]
        taken = []
        for share in chance.shares(min(wanted, len(hand))).tolist():
            at = int(share * len(hand))
            hand[at], hand[-1] = hand[-1], hand[at]
            taken.append(hand.pop())
        moved.append((left - 1, taken))
        wanted -= len(taken)
    assert wanted == 0
    for left, devices in moved:
        hands[left] += devices
    return [device for _, devices in moved for device in devices]
