"""Predicted work of a cohort's devices in one round, as columns: D devices, and S steps of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.client.training.sampler import (
    MAX_SHORT,
    next_position,
    permutation,
    permutations,
    sampler_seed,
)
from headwater.common.messages import StopReason, Vitals
from headwater.simulation.fleet.devices import ClientPlan

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NO_INTS: Ints = np.zeros(0, dtype=np.int64)
# Rows of one group may be padded to the longest if each is at least this share of it.
MIN_SHARE_OF_LONGEST = 0.75


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return start, start + 1, ... of each length, one range after another."""
    numbers: Ints = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    numbers += np.arange(len(numbers))
    return numbers


def draw_positions(
    clients: Sequence[ClientPlan], epoch: Ints, offset: Ints, num_examples: Ints, num_owned: Ints
) -> Ints:
    """Return ``num_examples`` [D] examples of each device, one device after another.

    They follow ``offset`` [D] in the device's permutation of ``epoch`` [D] of its ``num_owned`` [D]
    examples. Short permutations are drawn all at once; a long one is cached from round to round.
    """
    positions = np.empty(num_examples.sum(), dtype=np.int64)
    is_short = num_owned <= MAX_SHORT
    lengths = num_owned[is_short]
    seeds = [sampler_seed(one.plan.run_seed, one.name) for one in compress(clients, is_short)]
    drawn = permutations(np.array(seeds, dtype=np.uint64), epoch[is_short], lengths)
    starts = np.cumsum(lengths) - lengths + offset[is_short]
    positions[np.repeat(is_short, num_examples)] = drawn[ranges(starts, num_examples[is_short])]
    ends = np.cumsum(num_examples)
    for at in np.flatnonzero(~is_short).tolist():
        one, start, number = clients[at], offset[at], num_examples[at]
        order = permutation(one.plan.run_seed, int(epoch[at]), one.name, int(num_owned[at]))
        positions[ends[at] - number : ends[at]] = order[start : start + number]
    return positions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundColumns:
    """The devices of a round: the examples that each uses, in which steps, and their times.

    A device uses ``num_examples`` [D] of the ``num_owned`` [D] examples that it trains on, from
    ``offset`` [D] on in its permutation of ``epoch`` [D]. Its ``num_steps`` [D] steps follow those
    of the device before it in ``sizes``, ``step_seconds`` and ``peak_bytes`` [S].
    """

    clients: Sequence[ClientPlan]
    num_examples: Ints
    num_owned: Ints
    epoch: Ints
    offset: Ints
    micro_batch_size: Ints
    seconds: Floats
    reasons: Sequence[StopReason]
    vitals: Sequence[Vitals]
    num_steps: Ints
    sizes: Ints
    step_seconds: Floats
    peak_bytes: Ints
    _step_starts: Ints = field(init=False, default_factory=lambda: NO_INTS)

    def __post_init__(self) -> None:
        starts = np.concatenate([[0], np.cumsum(self.num_steps)])
        object.__setattr__(self, "_step_starts", starts)

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def is_whole(self) -> Bools:
        """Whether each device uses all its examples, so that their sum needs no permutation."""
        is_whole: Bools = self.num_examples == self.num_owned
        return is_whole

    @property
    def num_left(self) -> Ints:
        """The number of examples that each device's epoch has left after the round."""
        left: Ints = np.maximum(self.num_owned - self.offset - self.num_examples, 0)
        return left

    @property
    def after(self) -> Ints:
        """The epochs and offsets after the round [2, D]."""
        return np.stack(next_position(self.epoch, self.offset + self.num_examples, self.num_owned))

    def steps_of(self, at: int) -> slice:
        """Return the slice of a device's steps."""
        return slice(int(self._step_starts[at]), int(self._step_starts[at + 1]))

    def positions(self, at: Ints) -> Ints:
        """Return the examples that these devices use, in order, one device after another."""
        return draw_positions(
            [self.clients[row] for row in at.tolist()],
            self.epoch[at],
            self.offset[at],
            self.num_examples[at],
            self.num_owned[at],
        )

    def some(self, at: Ints) -> RoundColumns:
        """Return the columns of these devices."""
        steps = ranges(self._step_starts[at], self.num_steps[at])
        columns: dict[str, Any] = {name: getattr(self, name)[at] for name in _OF_DEVICES}
        columns |= {name: getattr(self, name)[steps] for name in _OF_STEPS}
        rows = at.tolist()
        columns |= {name: [getattr(self, name)[row] for row in rows] for name in _LISTS}
        return RoundColumns(**columns)

    @staticmethod
    def joined(parts: Sequence[RoundColumns]) -> RoundColumns:
        """Return the columns of several sets of devices as one."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            columns: dict[str, Any] = dict.fromkeys((*_OF_DEVICES, *_OF_STEPS), NO_INTS)
            return RoundColumns(**columns, clients=[], reasons=[], vitals=[])
        columns = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in (*_OF_DEVICES, *_OF_STEPS)
        }
        columns |= {
            name: list(chain.from_iterable(getattr(part, name) for part in parts))
            for name in _LISTS
        }
        return RoundColumns(**columns)


_LISTS = ("clients", "reasons", "vitals")
_OF_STEPS = ("sizes", "step_seconds", "peak_bytes")
_OF_DEVICES = tuple(
    one.name for one in fields(RoundColumns) if one.init and one.name not in (*_LISTS, *_OF_STEPS)
)


# Rows of different lengths, computed together.


def groups_of_similar_size(sizes: Ints, at_once: int) -> Iterator[Ints]:
    """Yield indices of groups of similar size, whose padded sizes sum to at most ``at_once``.

    A group of one may be larger.
    """
    order = np.argsort(-sizes, kind="stable")
    start = 0
    while start < len(order):
        largest = int(sizes[order[start]])
        shortest = -largest * MIN_SHARE_OF_LONGEST
        end = start + int(np.searchsorted(-sizes[order[start:]], shortest, "right"))
        end = min(end, start + max(at_once // largest, 1))
        yield order[start:end]
        start = end


def padded(starts: Ints, sizes: Ints) -> tuple[Ints, Bools]:
    """Return the row numbers of each [R, M], padded with its first, and which are not padding."""
    at = np.arange(sizes.max())
    mask = at[None, :] < sizes[:, None]
    return np.where(mask, starts[:, None] + at[None, :], starts[:, None]), mask


def runs(sizes: Ints, limit: int) -> Iterator[slice]:
    """Cut a row of sizes into runs that sum to at most ``limit``; a larger size is alone."""
    ends = np.cumsum(sizes)
    start = before = 0
    while start < len(sizes):
        end = max(int(np.searchsorted(ends, before + limit, "right")), start + 1)
        yield slice(start, end)
        start, before = end, int(ends[end - 1])
