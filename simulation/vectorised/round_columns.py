"""Predicted work of a cohort's devices in one round, as columns: D devices, and S steps of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.common.messages import StopReason
from headwater.server.planning.vitals_columns import VitalsColumns
from headwater.simulation.fleet.devices import ClientPlans
from headwater.simulation.fleet.position_columns import PlaceColumns, ranges
from headwater.simulation.fleet.window_columns import (
    Samplers,
    places_after,
    window_positions,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NO_INTS: Ints = np.zeros(0, dtype=np.int64)
# Rows of one group may be padded to the longest if each is at least this share of it.
MIN_SHARE_OF_LONGEST = 0.75


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundColumns:
    """The devices of a round: the examples that each uses, in which steps, and their times.

    ``parts`` [D] are the devices' numbers. A device uses ``num_examples`` [D] of the ``num_owned``
    [D] examples that it trains on, from its place on. Its ``num_steps`` [D] steps follow those of
    the device before it in ``sizes``, ``step_seconds`` and ``peak_bytes`` [S]; ``local_step`` [S]
    is the number, from 0, of the local step that each of them is part of: 0 for all where the
    device sums exactly. ``weigh_as`` [D] are the weights that the plans set, or 0.
    """

    clients: ClientPlans
    parts: Ints
    num_examples: Ints
    num_owned: Ints
    places: PlaceColumns
    micro_batch_size: Ints
    weigh_as: Ints
    seconds: Floats
    reasons: Sequence[StopReason]
    vitals: VitalsColumns
    num_steps: Ints
    sizes: Ints
    step_seconds: Floats
    peak_bytes: Ints
    local_step: Ints
    _step_starts: Ints = field(init=False, default_factory=lambda: NO_INTS)

    def __post_init__(self) -> None:
        starts = np.concatenate([[0], np.cumsum(self.num_steps)])
        object.__setattr__(self, "_step_starts", starts)

    def __len__(self) -> int:
        return len(self.num_examples)

    @property
    def is_whole(self) -> Bools:
        """Whether each device uses all its examples, so that their sum needs no permutation."""
        is_whole: Bools = self.num_examples == self.num_owned
        return is_whole

    @property
    def after(self) -> PlaceColumns:
        """The devices' places after the round."""
        return places_after(self._samplers, self.places, self.num_examples)

    @property
    def _samplers(self) -> Samplers:
        return Samplers(
            names=self.clients.names,
            run_seed=self.clients[0].plan.run_seed,
            num_owned=self.num_owned,
        )

    @property
    def num_local_steps(self) -> Ints:
        """The local steps that each device takes; 1 where it sums exactly."""
        return self.local_step[self._step_starts[1:] - 1] + 1

    def steps_of(self, at: int) -> slice:
        """Return the slice of a device's steps."""
        return slice(int(self._step_starts[at]), int(self._step_starts[at + 1]))

    @property
    def first_of_local_steps(self) -> Ints:
        """Where each local step of each device begins among all steps."""
        is_first = np.ones(len(self.sizes), dtype=np.bool_)
        is_first[1:] = self.local_step[1:] != self.local_step[:-1]
        is_first[self._step_starts[:-1]] = True
        return np.flatnonzero(is_first)

    def local_step_bounds(self, at: int) -> list[int]:
        """Return where each local step of a device begins among its steps, and the end."""
        own = self.local_step[self.steps_of(at)]
        return [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), len(own)]

    def rows_of_steps(self, at: Ints) -> Ints:
        """Return where these devices' steps are in the columns of steps, one after another."""
        return ranges(self._step_starts[at], self.num_steps[at])

    def positions(self, at: Ints) -> Ints:
        """Return the examples that these devices use, in order, one device after another."""
        if not len(at):
            return NO_INTS
        places, num_examples = self.places.some(at), self.num_examples[at]
        return window_positions(self._samplers.some(at), places, num_examples)

    def some(self, at: Ints) -> RoundColumns:
        """Return the columns of these devices."""
        steps = self.rows_of_steps(at)
        columns: dict[str, Any] = {name: getattr(self, name)[at] for name in _OF_DEVICES}
        columns |= {name: getattr(self, name)[steps] for name in _OF_STEPS}
        columns["reasons"] = [self.reasons[row] for row in at.tolist()]
        tables = {name: getattr(self, name).some(at) for name in _TABLES}
        return RoundColumns(**columns, **tables)

    @staticmethod
    def joined(parts: Sequence[RoundColumns]) -> RoundColumns:
        """Return the columns of several sets of devices as one."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            columns: dict[str, Any] = dict.fromkeys((*_OF_DEVICES, *_OF_STEPS), NO_INTS)
            places, vitals = PlaceColumns.of([]), VitalsColumns.of([])
            nobody = ClientPlans.of([])
            return RoundColumns(**columns, places=places, vitals=vitals, clients=nobody, reasons=[])
        columns = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in (*_OF_DEVICES, *_OF_STEPS)
        }
        columns["reasons"] = list(chain.from_iterable(part.reasons for part in parts))
        columns["clients"] = ClientPlans.of(
            list(chain.from_iterable(part.clients for part in parts))
        )
        places = PlaceColumns.joined([part.places for part in parts])
        vitals = VitalsColumns.joined([part.vitals for part in parts])
        return RoundColumns(**columns, places=places, vitals=vitals)


_TABLES = ("clients", "places", "vitals")
_OF_STEPS = ("sizes", "step_seconds", "peak_bytes", "local_step")
_OF_DEVICES = tuple(
    one.name
    for one in fields(RoundColumns)
    if one.init and one.name not in ("reasons", *_TABLES, *_OF_STEPS)
)


# Rows of different lengths, computed together.


def groups_of_similar_size(
    sizes: Ints, at_once: int, *, least_share: float = MIN_SHARE_OF_LONGEST
) -> Iterator[Ints]:
    """Yield indices of groups of similar size, whose padded sizes sum to at most ``at_once``.

    The smallest of a group is at least ``least_share`` of its largest. A group of one may be larger
    than ``at_once``.
    """
    order = np.argsort(-sizes, kind="stable")
    start = 0
    while start < len(order):
        largest = int(sizes[order[start]])
        shortest = -largest * least_share
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
