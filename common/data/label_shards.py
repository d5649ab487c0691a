"""Partitions examples so that each device has a given number of labels, by shards of one label.

McMahan et al. 2017, section 3, sort the examples by label and cut them into a number of shards per
device; there a shard may contain two labels, and a device may get two shards of the same label.
Neither happens here.
"""

from __future__ import annotations

import heapq

import numpy as np

from headwater.common.data.partition_spec import DRAW_INSTEAD, USE_FEWER_DEVICES
from headwater.common.data.portable_random import IntArray, PortableRandom
from headwater.common.errors import NoSuchPartition

# Dimensions: E examples, V different labels.


def assign_label_shards(
    sorted_E: IntArray, starts_V1: IntArray, per_device: int, num_devices: int, rng: PortableRandom
) -> IntArray:
    """Give each device examples of ``per_device`` different labels; return each example's device.

    ``sorted_E`` are the examples sorted by label, ``starts_V1`` the start of each label. A label is
    cut into shards of nearly equal size, at most one per device.

    Raises:
        NoSuchPartition: there are more labels than shards, or too few examples or labels.
    """
    sizes_V = np.diff(starts_V1)
    shards_V = _shards(sizes_V, per_device, num_devices)
    devices_E = np.empty(len(sorted_E), dtype=np.int64)
    by_vacancies: list[list[int]] = [[] for _ in range(per_device)]
    by_vacancies.append(list(range(num_devices)))
    for label in rng.permutation(len(sizes_V)).tolist():
        num_shards, size = int(shards_V[label]), int(sizes_V[label])
        devices = np.array(_take_devices(by_vacancies, num_shards, rng))
        members = sorted_E[starts_V1[label] : starts_V1[label + 1]]
        devices_E[members] = devices[np.arange(size) * num_shards // size]
    return devices_E


def _shards(sizes_V: IntArray, per_device: int, num_devices: int) -> IntArray:
    """Return the number of shards of each label that makes the largest shard smallest."""
    num_labels, total = len(sizes_V), per_device * num_devices
    max_V = np.minimum(sizes_V, num_devices)
    if per_device > num_labels:
        raise NoSuchPartition(
            f"each device should have {per_device:,} labels, and there are {num_labels:,}",
            remedy="ask for fewer labels on each: --partition labels:N",
        )
    if num_labels > total:
        raise NoSuchPartition(
            f"{num_devices:,} devices with {per_device:,} labels each have {total:,} labels "
            f"at most, and there are {num_labels:,}",
            remedy=f"ask for {-(-num_labels // num_devices):,} labels on each, or for more devices",
        )
    if int(max_V.sum()) < total:
        raise NoSuchPartition(
            f"{num_devices:,} devices with {per_device:,} labels each need {total:,} shards, and "
            f"these examples can be cut into {int(max_V.sum()):,}, one per device and label",
            remedy=f"{USE_FEWER_DEVICES} or fewer labels on each, or {DRAW_INSTEAD}",
        )
    shards = [1] * num_labels
    largest = [(-float(size), label) for label, size in enumerate(sizes_V) if max_V[label] > 1]
    heapq.heapify(largest)
    for _ in range(total - num_labels):
        _, label = heapq.heappop(largest)
        shards[label] += 1
        if shards[label] < max_V[label]:
            heapq.heappush(largest, (-int(sizes_V[label]) / shards[label], label))
    return np.array(shards)


def _take_devices(by_vacancies: list[list[int]], count: int, rng: PortableRandom) -> list[int]:
    """Take ``count`` distinct devices with the most vacancies, at random among equals.

    ``by_vacancies[r]`` are the devices that need r more labels; a device that is taken needs one
    fewer. By Gale and Ryser (1957) this finds an assignment whenever one exists, and one exists if
    no label has more shards than there are devices.
    """
    taken_by_vacancies: list[tuple[int, list[int]]] = []
    num_missing = count
    for vacancies in range(len(by_vacancies) - 1, 0, -1):
        candidates = by_vacancies[vacancies]
        taken = []
        for uniform in rng.uniform(min(num_missing, len(candidates))).tolist():
            at = int(uniform * len(candidates))
            candidates[at], candidates[-1] = candidates[-1], candidates[at]
            taken.append(candidates.pop())
        taken_by_vacancies.append((vacancies - 1, taken))
        num_missing -= len(taken)
    assert num_missing == 0
    for vacancies, devices in taken_by_vacancies:
        by_vacancies[vacancies] += devices
    return [device for _, devices in taken_by_vacancies for device in devices]
