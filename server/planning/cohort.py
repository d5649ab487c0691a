"""Selects a round's cohort from the connected clients, and weighs their updates.

All clients are invited, or a seeded sample that gives each client its turn. The next client in the
order takes the place of one that is too slow for the deadline. A slow client is still invited once
in so many rounds: it may be faster than the server believes, and no other client has its data.
"""

from __future__ import annotations

import hashlib
import math
import operator
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np

from headwater.common.messages import DeviceReport
from headwater.common.wording import natural
from headwater.server.planning import plan_reasons
from headwater.server.planning.device_estimates import (
    DEADLINE_SHARE,
    MAX_TIMES_LATE,
    EstimateColumns,
)
from headwater.server.planning.planner import TransferCosts

# The maximal weight of one client with dataset weighting, in median clients: the number of examples
# that a client owns is its own claim.
MAX_MEDIANS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectedClients:
    """The clients that are connected as a round begins, and what changed since the last one."""

    reports: Mapping[str, DeviceReport]
    """Each client's description of itself, by name."""
    described: Collection[str] = ()
    """The clients that described themselves again; new clients may be missing here."""
    disconnected: Collection[str] = ()
    """The clients that were connected as the last round began, and no longer are."""
    others: Mapping[str, DeviceReport] = field(default_factory=dict)
    """Those that are connected, and whom the run is not for."""

    @property
    def all_reports(self) -> Mapping[str, DeviceReport]:
        """The descriptions of all that are connected."""
        return {**self.reports, **self.others} if self.others else self.reports


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """A round's cohort; ``names`` are in the order of ``in_order``."""

    names: list[str]
    exceptions: dict[str, str] = field(default_factory=dict)
    """Why each client of the cohort that is too slow is invited."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why each client that is too slow is not invited."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowness:
    """By which factor a client is too slow, above 1, and why."""

    factor: float
    reason: str


# Returns the shuffled names of a population: of the run's seed and the number of the lap.
PopulationOrder = Callable[[Collection[str], int, int], Sequence[str]]
# Judges some clients: returns those that can be invited as usual, and those that are too slow.
Judge = Callable[[Sequence[str]], tuple[Sequence[str], Mapping[str, Slowness]]]


def population_order(names: Collection[str], seed: int, lap: int) -> list[str]:
    """Return the names in the order of a lap: each client is invited once in a lap.

    The order depends on the seed, the lap and the set of the names alone.
    """
    return sorted(names, key=lambda name: _digest(seed, str(lap), name))


def candidates_in_turn(
    names: Collection[str],
    *,
    size: int | None,
    seed: int,
    round_number: int,
    order: PopulationOrder = population_order,
) -> Iterator[str]:
    """Return all names once: those whose turn the round is first, then the next in the order.

    If all clients are invited, they come in their own order.
    """
    if size is None or size >= len(names):
        return iter(names)
    lap, turn = divmod(round_number - 1, -(-len(names) // size))
    shuffled = order(names, seed, lap)
    # The last turn of a lap is filled up from the lap's start.
    return chain(islice(shuffled, turn * size, None), islice(shuffled, turn * size))


def select(
    names: Collection[str],
    *,
    size: int | None,
    seed: int,
    round_number: int,
    judge: Judge,
    waiting_since: Mapping[str, int],
    within_rounds: int,
    min_clients: int = 1,
    order: PopulationOrder = population_order,
    turns: Sequence[str] | None = None,
) -> Selection:
    """Select the cohort of a round.

    ``judge`` is called only for clients whose turn comes. ``waiting_since`` gives the round since
    which a client has been left out. ``turns`` are the names in an order of the caller's, None: in
    that of ``candidates_in_turn``. Guarantees:

    * If no client is or has been too slow, the cohort is the seeded sample: the choice depends on
      the names, the seed and the round alone.
    * A client that is left out of a round, and is connected in the next ``within_rounds`` - 1, is
      invited in one of them, in addition to ``size`` other clients. The seed spreads these rounds,
      so that not all slow clients are invited in the same one.
    * If fewer than ``min_clients`` clients are fast enough, the fastest slow ones are invited too:
      without them the round cannot count.
    """
    size = len(names) if size is None else min(size, len(names))
    able: list[str] = []
    slow: dict[str, Slowness] = {}

    def add(batch: Sequence[str]) -> None:
        fast_enough, too_slow = judge(batch)
        able.extend(fast_enough)
        slow.update(too_slow)

    def is_due(name: str) -> bool:
        return _is_due(name, waiting_since.get(name), seed, round_number, within_rounds)

    candidates = (
        candidates_in_turn(names, size=size, seed=seed, round_number=round_number, order=order)
        if turns is None
        else iter(turns)
    )
    while batch := list(islice(candidates, size - len(able))):
        add(batch)
    seen = {*able, *slow} if waiting_since else set()
    add([name for name in waiting_since if name not in seen and name in names and is_due(name)])
    exceptions = {
        name: f"one example, asked once in {within_rounds} rounds though {one.reason}"
        for name, one in slow.items()
        if is_due(name)
    }
    num_missing = max(min_clients - len(able) - len(exceptions), 0)
    fastest = sorted(slow.keys() - exceptions.keys(), key=lambda name: (slow[name].factor, name))
    for name in fastest[:num_missing]:
        why = slow[name].reason
        exceptions[name] = f"one example, as {min_clients} devices are needed though {why}"
    return Selection(
        names=in_order([*able, *exceptions]),
        exceptions=exceptions,
        left_out={name: slow[name].reason for name in in_order(slow.keys() - exceptions.keys())},
    )


def slowness(
    names: Sequence[str],
    known: EstimateColumns,
    *,
    deadline_seconds: float | None,
    costs: TransferCosts,
) -> dict[str, Slowness]:
    """Return which clients are too slow for a round, and by how much; not those of unknown speed.

    A client that was late several times in a row is too slow as well: otherwise a device that
    never answers would delay every round. A client must train on one example, and transfer model
    and update, in DEADLINE_SHARE of the deadline; the training alone must fit in the share that
    leaves time for the transfers, as earlier rounds have shown.
    """
    deadline = math.inf if deadline_seconds is None else deadline_seconds
    seconds = (known.base + known.each) / known.time_share
    longest = deadline * known.deadline_share
    is_trained = seconds <= longest
    transfers = costs.transfer_seconds(known.vitals) + costs.turn_seconds
    seconds = np.where(is_trained, seconds + transfers, seconds)
    longest = np.where(is_trained, deadline * DEADLINE_SHARE, longest)
    is_absent = known.times_late >= MAX_TIMES_LATE
    found = {}
    for row in np.flatnonzero(is_absent | (seconds > longest)).tolist():
        times, takes, most = int(known.times_late[row]), float(seconds[row]), float(longest[row])
        found[names[row]] = (
            Slowness(factor=float(times), reason=plan_reasons.of_lateness(times))
            if is_absent[row]
            else Slowness(factor=takes / most, reason=plan_reasons.of_too_slow(takes, most))
        )
    return found


def _is_due(name: str, since: int | None, seed: int, round_number: int, within: int) -> bool:
    """Whether a slow client is to be invited: in its round of ``within``, or if it missed it."""
    phase = int.from_bytes(_digest(seed, "due", name)[:8], "big")
    has_missed = since is not None and round_number - since >= within - 1
    return has_missed or (round_number + phase) % within == 0


def dataset_weights(owned: Mapping[str, int]) -> dict[str, int]:
    """Return the weight of each client's update with dataset weighting: the examples it owns.

    At most MAX_MEDIANS times the cohort's median, so that no claim outweighs all other clients.
    """
    most = MAX_MEDIANS * int(statistics.median_low(owned.values())) if owned else 0
    return {name: min(num_examples, most) for name, num_examples in owned.items()}


def _digest(*parts: object) -> bytes:
    return hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()


def in_order(names: Sequence[str] | set[str]) -> list[str]:
    """Return the names in natural order: 2 comes before 10, and pi2 before pi10."""
    if all(map(str.isdecimal, names)):
        numbers = list(map(int, names))
        if all(map(operator.lt, numbers, numbers[1:])):  # as a simulator's are
            return list(names)
    return sorted(names, key=natural)
