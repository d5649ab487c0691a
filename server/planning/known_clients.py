"""What a run knows of its clients from round to round: their estimates, and new descriptions.

A client describes itself when it joins, and again when it was left out; a description is read when
the client's turn comes.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import NamedTuple

import numpy as np

from headwater.common.errors import HeadwaterError
from headwater.common.messages import DeviceReport, ReadyReport, UpdateReport, Vitals
from headwater.common.stats import training_speed
from headwater.server.planning.cohort import ConnectedClients, Selection
from headwater.server.planning.device_estimates import (
    UNKNOWN_DEVICE,
    UNTOLD_EXAMPLES,
    DeviceEstimate,
    have_same_memory,
)
from headwater.server.planning.estimate_columns import EstimateColumns, Floats, Ints

log = logging.getLogger(__name__)


class ToldBlock(NamedTuple):
    """What the updates of a block of clients tell of their memory and speed, in columns."""

    names: Sequence[str]
    vitals: Sequence[Vitals]
    num_steps: Ints
    sizes: Ints
    """The examples of each step of all, one client after another; and its seconds."""
    seconds: Floats


@dataclass(slots=True)
class KnownClients:
    """The estimates of all clients that a run has seen."""

    is_k_set: bool
    """Whether the setting gives K, so that no speed is estimated."""
    is_by_data: bool
    """Whether updates are weighed by the clients' numbers of examples."""
    estimates: dict[str, DeviceEstimate] = field(default_factory=dict)
    _awaited: set[str] = field(default_factory=set)
    """Clients that were left out and asked to describe themselves again, and have not yet."""
    _untold: set[str] = field(default_factory=set)
    """Clients without a number of examples, in a run that weighs updates by it."""
    _measured_again: dict[str, int] = field(default_factory=dict)
    """The number of requests to each client of masked rounds to measure its speed again."""
    _awaited_speed: set[str] = field(default_factory=set)
    """Clients with such a request that have not described themselves since."""
    _columns: tuple[Sequence[DeviceEstimate], EstimateColumns | None] = ((), None)
    """The estimates of the last call of ``columns``, and its result."""
    _is_resumed: bool = False
    """Whether the next round is the first one after ``restore``."""

    def restore(self, estimates: Mapping[str, DeviceEstimate]) -> None:
        """Take the estimates of a checkpoint. Every client that is not connected counts as gone."""
        self.estimates = dict(estimates)
        self._is_resumed = True

    def note_changes(
        self, clients: ConnectedClients, *, counted: Container[str], busy: Container[str]
    ) -> None:
        """Mark the estimates of clients that left, or that have described themselves again.

        One that left is forgotten if no sum counted it: names cost a stranger nothing.
        """
        known, left = self.estimates, [*clients.disconnected]
        if self._is_resumed:
            self._is_resumed = False
            left += known.keys() - set(clients.reports)
        for name in left:
            self._awaited.discard(name)
            if name in known and (name in counted or name in busy):
                known[name] = known[name].after_disconnect()
            else:
                known.pop(name, None)
                self._measured_again.pop(name, None)
                self._awaited_speed.discard(name)
                self._untold.discard(name)
        for name in clients.described:
            self._awaited.discard(name)
            if name not in known:
                continue
            # What is new is read in the client's next turn.
            known[name] = replace(known[name], num_examples=0)
            if name in self._awaited_speed:
                self._awaited_speed.discard(name)
                known[name] = replace(known[name], line=None, is_outdated=True)

    def waiting_since(self, names: Container[str]) -> dict[str, int]:
        """Return the round since which each of these clients that is left out waits."""
        return {
            name: one.waiting_since
            for name, one in self.estimates.items()
            if one.waiting_since is not None and name in names
        }

    def describable(
        self, names: Sequence[str], reports: Mapping[str, DeviceReport], excluded: Container[str]
    ) -> list[str]:
        """Return the clients with an estimate, and not excluded; reads their new descriptions.

        A client may turn out to be unable to describe itself; it has no estimate.
        """
        estimates, awaited = self.estimates, self._awaited
        able = []
        for name in names:
            if name in excluded:
                continue
            known = estimates.get(name, UNKNOWN_DEVICE)
            if not known.num_examples or (known.is_outdated and name not in awaited):
                try:
                    estimates[name] = known.after_description(reports[name])
                except KeyError:
                    continue
            if self.is_by_data and estimates[name].num_examples == UNTOLD_EXAMPLES:
                if name not in self._untold:
                    log.warning(
                        "%s: it does not tell its number of examples, by which its update "
                        "would be weighed (--declared-examples); it is not invited",
                        name,
                    )
                    self._untold.add(name)
                continue
            able.append(name)
        return able

    def columns(self, estimates: Sequence[DeviceEstimate]) -> EstimateColumns:
        """Return estimates as columns; reads those that have changed since the last call.

        An estimate that has not changed is the same object.
        """
        before, columns = self._columns
        changed = list(map(operator.is_not, estimates, before))
        if columns is None or len(before) != len(estimates) or all(changed):
            columns = EstimateColumns.of(estimates)
        elif any(changed):
            columns = columns.with_rows(
                np.flatnonzero(changed), EstimateColumns.of(list(compress(estimates, changed)))
            )
        self._columns = estimates, columns
        return columns

    def to_measure(self, names: Iterable[str], *, round_number: int) -> list[str]:
        """Return which of these clients are to measure their speed again after this round.

        A masked update tells no speed, so one bad measurement would last. Requests go out after
        rounds 2, 4, 8 and so on: a slow machine is not measured more often than needed.
        """
        due = [
            name
            for name in names
            if round_number >= 2 << self._measured_again.get(name, 0) and name in self.estimates
        ]
        for name in due:
            self._measured_again[name] = self._measured_again.get(name, 0) + 1
        self._awaited_speed.update(due)
        return due

    def note_selection(
        self, selection: Selection, waiting: Collection[str], round_number: int
    ) -> None:
        """Mark the clients that are left out, and those of the waiting that are invited."""
        known = self.estimates
        for name in set(waiting).intersection(selection.names):
            known[name] = known[name].after_invitation()
        for name in selection.left_out:
            known[name] = known[name].after_leaving_out(round_number)
            self._awaited.add(name)

    def learn(
        self,
        invited: Iterable[str],
        *,
        exceptions: Collection[str],
        accepted: Mapping[str, UpdateReport],
        ready: Mapping[str, ReadyReport],
        refused: Mapping[str, HeadwaterError],
        blocks: Sequence[ToldBlock] = (),
    ) -> None:
        """Follow the invited clients' speed, vitals and lateness, whether or not the round counts.

        ``exceptions`` are the invited clients that are too slow, ``accepted`` the reports of the
        updates, ``ready`` those of masked updates, ``refused`` the errors of the clients without
        an update. ``blocks`` are those of the accepted reports that came as columns.
        """
        estimates = self.estimates
        as_known = {name for block in blocks for name in self._as_known(block)} - refused.keys()
        for name in invited:
            if name not in as_known:
                estimates[name] = estimates[name].after_round(
                    accepted.get(name),
                    ready.get(name),
                    refused.get(name),
                    is_k_set=self.is_k_set,
                    was_expected_late=name in exceptions,
                )

    def _as_known(self, block: ToldBlock) -> list[str]:
        """Return the clients whose reports surely change nothing of their estimates.

        The others' estimates follow from ``DeviceEstimate.after_round``, which may find the same.
        """
        known = list(map(self.estimates.__getitem__, block.names))
        is_same = np.array([one.is_in_time for one in known])
        is_like = have_same_memory if self.is_k_set else operator.is_
        is_same &= list(map(is_like, block.vitals, map(_VITALS, known)))
        lines = [one.line for one in known]
        if not self.is_k_set and None not in lines:
            num_steps = block.num_steps
            base, each = (
                np.repeat(list(map(operator.attrgetter(figure), lines)), num_steps)
                for figure in ("base", "each")
            )
            is_expected = training_speed.is_expected(base + each * block.sizes, block.seconds)
            is_same &= np.logical_and.reduceat(is_expected, np.cumsum(num_steps) - num_steps)
        elif not self.is_k_set:
            is_same[:] = False
        return list(compress(block.names, is_same.tolist()))


_VITALS = operator.attrgetter("vitals")
