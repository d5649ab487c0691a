"""Fairness: who is invited to a round, and what a device's update weighs.

Everybody is invited, or a seeded sample that gives each device its turn. A device that is too slow
for the deadline gives its place to the next, and is asked all the same once in so many rounds: it
may be faster than the server believes, and its data is nobody else's.
"""

from __future__ import annotations

import hashlib
import operator
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

# With dataset weighting, the most that one device weighs, in median devices: what a device owns is
# what it says it owns.
HEAVIEST = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Invited:
    """A round's cohort: names in the order of ``select``."""

    names: list[str]
    asked_anyway: dict[str, str] = field(default_factory=dict)
    """Why who is too slow is among them."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why who is too slow is not."""


def select(names: Sequence[str], *, size: int | None, seed: int, round_number: int) -> list[str]:
    """Return the names in whose turn the round is, sorted by name.

    A sample walks through a seeded shuffle of the population, ``size`` names a round, so that each
    device is invited once before any is invited twice, as long as the population stays the same.
    The choice depends on the names, the seed and the round alone.
    """
    size = len(names) if size is None else size
    walk = Laps().walk(names, size=size, seed=seed, round_number=round_number)
    return _in_order(list(islice(walk, size)))


class Laps:
    """The shuffled population of a lap, kept until the next lap or until devices come or go."""

    def __init__(self) -> None:
        self._of: tuple[int, int] | None = None
        self._names: Collection[str] = ()
        self._listed: tuple[str, ...] = ()
        self._shuffled: list[str] = []

    def walk(
        self, names: Collection[str], *, size: int | None, seed: int, round_number: int
    ) -> Iterator[str]:
        """Yield the shuffled names of the round's lap from the round's turn on, and round to it.

        All of them, in their own order, where all are invited. What gave the names of the round
        before, if it is given again, must give the same.
        """
        if size is None or size >= len(names):
            yield from names
            return
        lap, turn = divmod(round_number - 1, -(-len(names) // size))
        if (seed, lap) != self._of or names is not self._names:
            listed = tuple(names)
            if (seed, lap) != self._of or listed != self._listed:
                self._shuffled = sorted(listed, key=lambda name: _digest(seed, str(lap), name))
            self._of, self._names, self._listed = (seed, lap), names, listed
        yield from islice(self._shuffled, turn * size, None)
        # The last turn of a lap is filled up from its start.
        yield from islice(self._shuffled, turn * size)


def invite(
    names: Collection[str],
    *,
    size: int | None,
    seed: int,
    round_number: int,
    slowness: Callable[[str], float | None],
    explain: Callable[[str], str],
    waiting_since: Mapping[str, int],
    within_rounds: int,
    min_clients: int = 1,
    laps: Laps | None = None,
) -> Invited:
    """Invite whose turn it is, and in the place of each that is too slow the next in the walk.

    ``slowness`` is above 1 for who is too slow, and the more so the slower; ``explain`` says why.
    It is None for who cannot be invited at all; nobody is asked for it but whose turn comes.
    ``waiting_since`` is the round since which a device has been left out. Guarantees:

    * Where nobody is too slow or has been, the names are those of ``select``.
    * Who is left out of a round, and is here in the next ``within_rounds`` - 1, is asked in one of
      them. Those rounds are spread by the seed, so that not all slow devices are asked in the
      same, and they come beside the ``size`` others.
    * Where fewer than ``min_clients`` are fast enough, the fastest of the others are asked too:
      without them the round cannot count.
    """
    size = len(names) if size is None else min(size, len(names))

    def is_due(name: str) -> bool:
        return _is_due(name, waiting_since.get(name), seed, round_number, within_rounds)

    able: list[str] = []
    slow: dict[str, float] = {}
    walk = (laps or Laps()).walk(names, size=size, seed=seed, round_number=round_number)
    for name in walk:
        if len(able) == size:
            break
        found = slowness(name)
        if found is None:
            continue
        if found > 1:
            slow[name] = found
        else:
            able.append(name)
    met = {*able, *slow}
    for name in waiting_since:
        if name in names and name not in met and is_due(name):
            found = slowness(name)
            if found is None:
                continue
            if found > 1:
                slow[name] = found
            else:
                able.append(name)
    anyway = {
        name: f"one example, asked once in {within_rounds} rounds though {explain(name)}"
        for name in slow
        if is_due(name)
    }
    missing = max(min_clients - len(able) - len(anyway), 0)
    for name in sorted(slow.keys() - anyway.keys(), key=lambda name: (slow[name], name))[:missing]:
        anyway[name] = f"one example, as {min_clients} devices are needed though {explain(name)}"
    return Invited(
        names=_in_order([*able, *anyway]),
        asked_anyway=anyway,
        left_out={name: explain(name) for name in _in_order(slow.keys() - anyway.keys())},
    )


def _is_due(name: str, since: int | None, seed: int, round_number: int, within: int) -> bool:
    """Say whether a slow device is to be asked: in its round of ``within``, or if it missed it."""
    phase = int.from_bytes(_digest(seed, "due", name)[:8], "big")
    missed = since is not None and round_number - since >= within - 1
    return missed or (round_number + phase) % within == 0


def dataset_weights(owned: Mapping[str, int]) -> dict[str, int]:
    """Return what each device's update weighs with dataset weighting: the examples it owns.

    At most HEAVIEST times the cohort's median, so that no device outweighs all others by a claim.
    """
    most = HEAVIEST * int(statistics.median_low(owned.values())) if owned else 0
    return {name: min(num_examples, most) for name, num_examples in owned.items()}


def _digest(*parts: object) -> bytes:
    return hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()


def _in_order(names: Sequence[str] | set[str]) -> list[str]:
    """Sort names so that 2 comes before 10."""
    if all(map(str.isdecimal, names)):
        numbers = list(map(int, names))
        if all(map(operator.lt, numbers, numbers[1:])):  # as a simulator's are
            return list(names)
    return sorted(names, key=lambda n: (0, int(n), n) if n.isdecimal() else (1, 0, n))
