"""Finds the client that masks a false number, by dividing the following rounds into groups.

If a sum of masked numbers is out of range, one of its clients lied, and the masks hide which. From
then on a round has several sessions, each of a part of its clients and with a sum of its own: the
sums within their range are added and count, a sum out of range is thrown away and points at fewer
suspects (adaptive group testing: Dorfman 1943; Du and Hwang, "Combinatorial Group Testing and Its
Applications", 2000). No group is smaller than the fewest members of a session, so the search opens
no sum that a session could not open anyway; where the clients are too few for two groups, one group
is drawn and the rest sit out.

A client is named if it must be a liar in both of these cases:

one liar
    It is in every false sum, whenever it lies: the liar is the only client that all false sums have
    in common. If they have none in common, this is not the case.
liars that always lie
    A client of a good sum is no liar: a liar is the only client of a false sum that was in no good
    sum. If all clients of a false sum were in good ones, this is not the case.

What remains: several liars that choose when to lie can have an honest client named. A liar that is
quiet for ``QUIET_ROUNDS`` is forgotten, so that a single wrong number does not divide the rounds
forever. With exactly the fewest members no group can leave a client out, and nobody can be named.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Names = frozenset[str]

QUIET_ROUNDS = 20
MAX_FALSE_SUMS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspicion:
    """The false sums so far, and the clients of good sums since the first of them."""

    false_sums: tuple[Names, ...] = ()
    cleared: Names = frozenset()
    num_liars: int = 1
    """The most false sums of one round, which had no client in common."""
    num_quiet: int = 0
    """Rounds since the last false sum."""
    least: int = 0
    """The size of the smallest group that may still open a sum; smaller ones were aborted."""

    @property
    def suspects(self) -> Names:
        """The clients of which one or more lied."""
        common = self._common
        return common or functools.reduce(frozenset.union, self.false_sums, Names()) - self.cleared

    @property
    def _common(self) -> Names:
        return functools.reduce(frozenset.intersection, self.false_sums or (Names(),))

    def is_narrower(self, before: Suspicion) -> bool:
        """Whether fewer clients are suspects than before, or some where none were."""
        suspects = self.suspects
        return bool(suspects) and (not before.suspects or suspects < before.suspects)

    def culprits(self) -> Names:
        """Return the clients to name, as the module says."""
        left = [false - self.cleared for false in self.false_sums]
        if not self._common:
            return Names().union(*(names for names in left if len(names) == 1))
        is_proven = self._common in left or Names() in left
        return self._common if len(self._common) == 1 and is_proven else Names()


def groups(
    names: Iterable[str], suspicion: Suspicion, *, least: int, seed: bytes
) -> list[tuple[str, ...]]:
    """Return a round's groups: disjoint, sorted, each of ``least`` or more clients.

    Without suspects, or with no more than ``least`` clients, one group has all clients. Suspects
    are dealt evenly to one group more than liars are known. If the clients do not suffice for two
    groups, the only group has about half of the suspects, and the remaining clients are in none.
    """
    everybody, least = sorted(names), max(least, suspicion.least)
    suspects = suspicion.suspects.intersection(everybody)
    if not suspects or len(everybody) <= least:
        return [tuple(everybody)]
    tried = f" {len(suspicion.false_sums)} {suspicion.num_quiet} ".encode()

    def place(name: str) -> bytes:
        return hashlib.sha256(seed + tried + name.encode()).digest()

    order = sorted(everybody, key=place)
    order.sort(key=lambda name: name not in suspects)  # suspects first, each part in its order
    num_groups = min(suspicion.num_liars + 1, len(everybody) // least)
    if num_groups < 2:
        half = order[: len(suspects) // 2]  # none of one: the group shows that all others are good
        rest = order[len(suspects) :] + order[len(half) : len(suspects)]
        return [tuple(sorted([*half, *rest][: max(least, len(half))]))]
    return [tuple(sorted(order[start::num_groups])) for start in range(num_groups)]


def after_round(
    suspicion: Suspicion,
    *,
    good: Sequence[Iterable[str]],
    false: Sequence[Iterable[str]],
    aborted: Sequence[Collection[str]] = (),
) -> tuple[Suspicion, Names]:
    """Return the suspicion after a round with these groups, and the clients to name.

    ``aborted`` are groups that opened no sum. If a round has no others, larger groups are tried
    next: clients may have a higher minimum of their own.
    """
    if not suspicion.false_sums and not false:
        return suspicion, Names()
    too_small = 0 if good or false else max(map(len, aborted), default=0)
    sums = (*suspicion.false_sums, *map(Names, false))[-MAX_FALSE_SUMS:]
    found = Suspicion(
        false_sums=sums,
        cleared=suspicion.cleared.union(*good),
        num_liars=max(suspicion.num_liars, len(false)),
        num_quiet=0 if false else suspicion.num_quiet + 1,
        least=max(suspicion.least, too_small + 1),
    )
    named = found.culprits()
    left = tuple(sum_ for sum_ in found.false_sums if not sum_ & named)
    if not left or found.num_quiet >= QUIET_ROUNDS:
        return Suspicion(), named
    found = replace(found, false_sums=left)
    # Liars that lied now and then were cleared: begin again with the newest false sums.
    return (found if found.suspects else Suspicion(false_sums=left[-1:])), named


def to_json(suspicion: Suspicion) -> dict[str, Any]:
    """Return plain data for the checkpoint."""
    return {
        "false_sums": [sorted(names) for names in suspicion.false_sums],
        "cleared": sorted(suspicion.cleared),
        "num_liars": suspicion.num_liars,
        "num_quiet": suspicion.num_quiet,
        "least": suspicion.least,
    }


def from_json(row: Mapping[str, Any]) -> Suspicion:
    """Return the suspicion that ``to_json`` wrote; none from an empty row."""
    if not row:
        return Suspicion()
    return Suspicion(
        false_sums=tuple(map(Names, row["false_sums"])),
        cleared=Names(row["cleared"]),
        num_liars=row["num_liars"],
        num_quiet=row["num_quiet"],
        least=row["least"],
    )
