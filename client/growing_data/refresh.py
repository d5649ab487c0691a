"""Looks at a device's data again where an epoch has ended, and goes on with what is there.

The data are opened once; for the length of an epoch the device trains on what it found then. Where
the next epoch has begun, it compares the names, sizes and times of the files with those of the last
opening. Only if they differ, it opens the data again: new examples join the walk, removed ones
leave it, and none is used twice in an epoch. After a restart in mid-epoch the data may differ as
well: then removed examples leave at once, and new ones wait for the epoch's end.

A file that disappears within an epoch cannot be read: that example is left out and counted, as any
example that raises (``common.data.example_faults``).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from headwater.client.growing_data.known_examples import KnownExamples
from headwater.client.growing_data.listing import listing_digest
from headwater.client.growing_data.position_change import DataChange, change_between, moved
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.training.sampler import SamplerState
from headwater.common.errors import HeadwaterError
from headwater.common.messages import Plan
from headwater.common.task import Examples
from headwater.common.wording import counted

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RefreshedData:
    """A device's position after a look at its data, what identifies them, and what changed."""

    sampler: SamplerState
    known: KnownExamples
    change: DataChange | None = None


_watches: WeakKeyDictionary[Trainer, DataWatch] = WeakKeyDictionary()


def watch_of(trainer: Trainer) -> DataWatch:
    """Return what watches the data that a trainer has opened."""
    return _watches.setdefault(trainer, DataWatch())


@dataclass(kw_only=True, slots=True)
class _OpenData:
    """The data as this process has opened them."""

    examples: Examples
    digest: str
    is_compared: bool = False
    """Whether they are known to be those of the device's state file."""


class DataWatch:
    """The openings of one process's data; a process has one device, and so one path."""

    def __init__(self) -> None:
        self._open: _OpenData | None = None
        self._notified = ""

    def refreshed(
        self,
        trainer: Trainer,
        identity: Identity,
        plan: Plan,
        sampler: SamplerState,
        known: KnownExamples | None,
    ) -> RefreshedData | None:
        """Return the position to train from; None if the device goes on as it is.

        ``known`` are the examples that the position is in; None if that was never noted.

        Raises:
            HeadwaterError: the data cannot be opened for the first time, see
                ``ClientExamples.of``; or see ``KnownExamples.of``.
        """
        if identity.data is None or identity.rule is not None:
            return None  # bundled data, which the task divides
        examples = trainer.examples(identity)
        if self._open is None or self._open.examples is not examples:
            self._open = _OpenData(examples=examples, digest=listing_digest(identity.data))
        settled = sampler.settle(plan.counted_round)
        epoch = settled.place.of_existing(len(examples)).epoch
        if known is None:
            self._open.is_compared = True
            return RefreshedData(sampler=sampler, known=KnownExamples.of(examples, epoch=epoch))
        if (why := _why_not(plan)) is not None:
            self._notify(identity.data, why, epoch=epoch, known=known)
            return None
        if not self._open.is_compared:
            self._open.is_compared = True
            after = KnownExamples.of(examples, epoch=settled.place.epoch)
            if not known.is_same(after):
                return self._changed(settled, known, after, plan, identity)
        if epoch <= known.epoch:
            return None
        digest = listing_digest(identity.data)
        if digest != self._open.digest:
            self._reopen(trainer, identity, digest)
        after = KnownExamples.of(self._open.examples, epoch=epoch)
        if known.is_same(after):
            return RefreshedData(sampler=sampler, known=after)
        return self._changed(settled, known, after, plan, identity)

    def _reopen(self, trainer: Trainer, identity: Identity, digest: str) -> None:
        """Open the data again; if that fails, go on with those of the last epoch, and say so."""
        assert self._open is not None
        self._open.digest = digest
        try:
            examples = trainer.reopen(identity)
        except HeadwaterError as error:
            log.warning(
                "%s has changed and cannot be opened; the next epoch has the examples of the last "
                "one: %s",
                identity.data,
                error,
            )
            return
        self._open = _OpenData(examples=examples, digest=digest, is_compared=True)

    def _changed(
        self,
        settled: SamplerState,
        before: KnownExamples,
        after: KnownExamples,
        plan: Plan,
        identity: Identity,
    ) -> RefreshedData:
        place = moved(settled.place, before, after, run_seed=plan.run_seed, name=identity.name)
        change = change_between(before, after)
        log.info(
            "%s: %s joined, %s left; epoch %d has %s",
            identity.data,
            counted(change.num_joined, "example"),
            counted(change.num_left, "example"),
            place.epoch,
            counted(after.number, "example"),
        )
        sampler = SamplerState(place=place, settled_round=settled.settled_round)
        return RefreshedData(sampler=sampler, known=after, change=change)

    def _notify(self, data: Path, why: str, *, epoch: int, known: KnownExamples) -> None:
        """Log once that a change of the data is not followed."""
        assert self._open is not None
        if epoch <= known.epoch or self._notified == why:
            return
        if listing_digest(data) != self._open.digest:
            self._notified = why
            log.warning("%s has changed, and the device keeps the examples it has: %s", data, why)


def _why_not(plan: Plan) -> str | None:
    """Return why a plan forbids that the data change; None if they may."""
    if plan.hides_data:
        return (
            "in masked rounds it must know which examples each of its vectors had "
            "(docs/secure-aggregation.md)"
        )
    if plan.uses_whole_window:
        return "the budget of each example counts the epochs of a fixed number of examples"
    if plan.overlaps:
        return "with --overlap two windows at a time are places in one order of the examples"
    if plan.held_out_fraction > 0:
        return "examples would move between training and the held-out test"
    return None
