"""What the devices of a cohort will do in a round, in columns: D devices, and S steps of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.client.training.micro_batches import SHORT, order, orders, walk_seed
from headwater.common.messages import StopReason, Vitals
from headwater.simulation.fleet.devices import Called

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NO_INTS: Ints = np.zeros(0, dtype=np.int64)


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return start, start + 1, ... of each length, one behind the other."""
    found: Ints = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    found += np.arange(len(found))
    return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Foreseen:
    """A cohort's round: who takes which examples, in which steps, and how long they take.

    A device takes ``num_examples`` [D] of the ``num_owned`` [D] that it trains on, from ``offset``
    [D] on in its order of ``epoch`` [D]. Its ``num_steps`` [D] steps lie behind those of the device
    before it in ``sizes``, ``step_seconds`` and ``peak_bytes`` [S].
    """

    called: Sequence[Called]
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
        return len(self.called)

    @property
    def is_whole(self) -> NDArray[np.bool_]:
        """Whether each device takes all that it trains on: their sum needs no order."""
        found: NDArray[np.bool_] = self.num_examples == self.num_owned
        return found

    @property
    def num_left(self) -> Ints:
        """What each device's epoch has left behind its window."""
        left: Ints = np.maximum(self.num_owned - self.offset - self.num_examples, 0)
        return left

    @property
    def after(self) -> Ints:
        """The epochs and offsets behind the windows [2, D]; see ``client.training.micro_batches.Window``."""
        end = self.offset + self.num_examples
        is_over = end >= self.num_owned
        return np.stack([self.epoch + is_over, np.where(is_over, 0, end)])

    def steps_of(self, at: int) -> slice:
        """Return where a device's steps lie."""
        return slice(int(self._step_starts[at]), int(self._step_starts[at + 1]))

    def positions(self, at: Ints) -> Ints:
        """Return the examples of these devices in the order of their walks, device behind device.

        Short orders are drawn all at once; a long one is kept from round to round.
        """
        taken, owned = self.num_examples[at], self.num_owned[at]
        found = np.empty(taken.sum(), dtype=np.int64)
        is_short = owned <= SHORT
        own, lengths = at[is_short], owned[is_short]
        called = [self.called[row] for row in own.tolist()]
        seeds = [walk_seed(one.plan.run_seed, one.name) for one in called]
        walks = orders(np.array(seeds, dtype=np.uint64), self.epoch[own], lengths)
        windows = np.cumsum(lengths) - lengths + self.offset[own]
        found[np.repeat(is_short, taken)] = walks[ranges(windows, taken[is_short])]
        ends = np.cumsum(taken)
        for place in np.flatnonzero(~is_short).tolist():
            found[ends[place] - taken[place] : ends[place]] = self._of_long_walk(int(at[place]))
        return found

    def _of_long_walk(self, row: int) -> Ints:
        one, offset = self.called[row], int(self.offset[row])
        walk = order(one.plan.run_seed, int(self.epoch[row]), one.name, int(self.num_owned[row]))
        return walk[offset : offset + int(self.num_examples[row])]

    def some(self, at: Ints) -> Foreseen:
        """Return these devices."""
        steps = ranges(self._step_starts[at], self.num_steps[at])
        columns: dict[str, Any] = {name: getattr(self, name)[at] for name in _OF_DEVICES}
        columns |= {name: getattr(self, name)[steps] for name in _OF_STEPS}
        rows = at.tolist()
        columns |= {name: [getattr(self, name)[row] for row in rows] for name in _LISTS}
        return Foreseen(**columns)

    @staticmethod
    def joined(parts: Sequence[Foreseen]) -> Foreseen:
        """Return several cohorts as one."""
        if len(parts) == 1:
            return parts[0]
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in (*_OF_DEVICES, *_OF_STEPS)
        }
        columns |= {
            name: list(chain.from_iterable(getattr(part, name) for part in parts))
            for name in _LISTS
        }
        return Foreseen(**columns)


_LISTS = ("called", "reasons", "vitals")
_OF_STEPS = ("sizes", "step_seconds", "peak_bytes")
_OF_DEVICES = tuple(
    one.name for one in fields(Foreseen) if one.init and one.name not in (*_LISTS, *_OF_STEPS)
)
