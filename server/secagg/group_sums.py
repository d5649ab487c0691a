"""A masked round's sum: one session of all clients, or one for each group while a liar is sought.

The sessions of a round share their encoding, so their sums are added in the ring, without another
rounding, and are divided once. A sum out of range is thrown away with its updates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headwater.common.errors import (
    HeadwaterError,
    RoundAborted,
    SessionRefused,
    SumOutOfRange,
)
from headwater.server.secagg.encoding_state import check_numbers
from headwater.server.secagg.group_testing import Names, Suspicion, after_round
from headwater.server.secagg.session import ReadyCohort, Refuse
from headwater.server.secagg.unmask_phase import UnmaskedSum

log = logging.getLogger(__name__)

Group = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSums:
    """What the sessions of a round's groups gave; ``error`` is the last abort, if any."""

    good: tuple[UnmaskedSum, ...]
    false: tuple[Group, ...]
    aborted: tuple[Group, ...]
    error: RoundAborted | None

    def after(self, suspicion: Suspicion) -> tuple[Suspicion, Names]:
        """Return the suspicion after this round, and the clients to name."""
        return after_round(
            suspicion,
            good=[one.survived for one in self.good],
            false=self.false,
            aborted=self.aborted,
        )

    def total(self) -> UnmaskedSum:
        """Return the sum over all groups that count.

        Raises:
            RoundAborted: none does.
        """
        if not self.good:
            assert self.error is not None
            raise self.error
        return added(self.good)


def sum_groups(
    cohort: ReadyCohort,
    groups: Sequence[Group],
    *,
    run_session: Callable[[ReadyCohort], UnmaskedSum],
    check: Callable[[UnmaskedSum], object] = check_numbers,
    refuse: Refuse,
) -> GroupSums:
    """Open each group's sum and check it; ``refuse`` each client that is in no good sum.

    ``run_session`` runs a group's session, and refuses the clients that leave it. ``check`` raises
    ``SumOutOfRange`` for a sum that no members have who follow their plans.
    """
    good: list[UnmaskedSum] = []
    false: list[Group] = []
    aborted: list[Group] = []
    error: RoundAborted | None = None
    for group in groups:
        try:
            unmasked = run_session(cohort.without(cohort.ready.keys() - set(group)))
        except RoundAborted as found:
            aborted.append(group)
            error = found
            continue
        try:
            check(unmasked)
        except SumOutOfRange as found:
            false.append(unmasked.survived)
            error = found
            _refuse_all(unmasked.survived, found, refuse)
        else:
            good.append(unmasked)
    in_none = cohort.ready.keys() - set().union(*groups)
    reason = "not in this round's groups, which are to show who masks a false number"
    _refuse_all(sorted(in_none), SessionRefused(reason), refuse)
    if good and error is not None:  # the round counts, and nothing else shows the error
        log.warning("%s: %s", error.code, error)
    return GroupSums(good=tuple(good), false=tuple(false), aborted=tuple(aborted), error=error)


def _refuse_all(names: Sequence[str], error: HeadwaterError, refuse: Refuse) -> None:
    for name in names:
        refuse(name, error)


def added(sums: Sequence[UnmaskedSum]) -> UnmaskedSum:
    """Add sums of disjoint groups with one encoding, in the memory of the first."""
    first, *others = sums
    if not others:
        return first
    for other in others:
        np.add(first.vector_P, other.vector_P, out=first.vector_P)
        np.add(first.sums_S, other.sums_S, out=first.sums_S)
    members = {name: row for one in sums for name, row in one.session.members.items()}
    return UnmaskedSum(
        session=replace(first.session, members=members),
        vector_P=first.vector_P,
        sums_S=first.sums_S,
        numbers={name: sum(one.numbers[name] for one in sums) for name in first.numbers},
        survived=tuple(sorted(name for one in sums for name in one.survived)),
        dropped=tuple(sorted(name for one in sums for name in one.dropped)),
    )
