"""What a run knows of its clients from round to round: a table, and what each event changes in it.

A client describes itself when it joins, and again when it was left out; a description is read when
the client's turn comes. After a round its speed, vitals and lateness are followed.
"""

from __future__ import annotations

import logging
from collections.abc import (
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from itertools import compress, repeat
from typing import Any, NamedTuple

import numpy as np

from headwater.common.errors import HeadwaterError, LateUpdate
from headwater.common.estimates import training_speed
from headwater.common.estimates.linear_fit import Line
from headwater.common.messages import DeviceReport, ReadyReport, UpdateReport
from headwater.server.planning.cohort import ConnectedClients, Selection
from headwater.server.planning.device_estimates import (
    DEADLINE_SHARE,
    UNTOLD_EXAMPLES,
    DeviceEstimate,
    EstimateColumns,
    to_json,
)
from headwater.server.planning.vitals_columns import Floats, Ints, VitalsColumns

log = logging.getLogger(__name__)

# The share of the deadline in which a client trains: it shrinks each time that the client is late,
# so that model and update have time to travel, and grows a little each time that it is not.
LATE_FACTOR, IN_TIME_FACTOR, MIN_SHARE = 0.6, 1.02, 0.05


class Told(NamedTuple):
    """What the answers of some clients tell of their memory and speed, in columns."""

    names: Sequence[str]
    vitals: VitalsColumns
    num_steps: Ints
    work: Ints | Floats
    """The work of each step of all, one client after another; and its seconds."""
    seconds: Floats
    owned: Mapping[str, int] = {}
    """The number of examples of each client whose data have changed."""

    @staticmethod
    def by(reports: Collection[UpdateReport]) -> Told:
        """Return what updates tell."""
        steps = [step for report in reports for step in report.measured]
        work, seconds = np.array(steps, dtype=np.float64).reshape(-1, 2).T
        return Told(
            [one.name for one in reports],
            VitalsColumns.of(one.vitals for one in reports),
            np.array([len(one.measured) for one in reports], dtype=np.int64),
            work,
            seconds,
            {one.name: one.num_owned for one in reports if one.num_owned is not None},
        )

    @staticmethod
    def by_ready(reports: Collection[ReadyReport]) -> Told:
        """Return what clients tell that keep their steps private: their speed stays as it was."""
        return Told(
            [one.name for one in reports],
            VitalsColumns.of(one.vitals for one in reports),
            np.zeros(len(reports), dtype=np.int64),
            np.zeros(0),
            np.zeros(0),
        )


class KnownClients(Mapping[str, DeviceEstimate]):
    """A table of all clients that a run has seen; by name, a client's row."""

    def __init__(self, *, is_by_data: bool = False) -> None:
        """``is_by_data``: whether updates are weighed by the clients' numbers of examples."""
        self._is_by_data = is_by_data
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        """Rows of clients that were forgotten."""
        self._table = EstimateColumns.unknown(0)
        self._awaited: set[str] = set()
        """Clients that were left out and asked to describe themselves again, and have not yet."""
        self._untold: set[str] = set()
        """Clients without a number of examples, in a run that weighs updates by it."""
        self._measured_again: dict[str, int] = {}
        """The number of requests to each client of masked rounds to measure its speed again."""
        self._awaited_speed: set[str] = set()
        """Clients with such a request that have not described themselves since."""
        self._is_resumed = False
        """Whether the next round is the first one after ``restore``."""

    def restore(self, estimates: Mapping[str, DeviceEstimate]) -> None:
        """Take the estimates of a checkpoint. Every client that is not connected counts as gone."""
        self._rows = {name: row for row, name in enumerate(estimates)}
        self._free = []
        self._table = EstimateColumns.of(estimates.values())
        self._is_resumed = True

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return plain data for the checkpoint; ``device_estimates.from_json`` reads it."""
        names = list(self._rows)
        return to_json(names, self.columns(names))

    def columns(self, names: Sequence[str]) -> EstimateColumns:
        """Return these clients' estimates as they are now."""
        return self._table.some(self._at(names))

    def note_changes(
        self, clients: ConnectedClients, *, counted: Container[str], busy: Container[str]
    ) -> None:
        """Mark clients that left, or that have described themselves again.

        One that left is forgotten if no sum counted it: names cost a stranger nothing.
        """
        left = [*clients.disconnected]
        if self._is_resumed:
            self._is_resumed = False
            left += self._rows.keys() - set(clients.reports)
        for name in left:
            self._awaited.discard(name)
            if name in self._rows and (name in counted or name in busy):
                self._table.is_outdated[self._rows[name]] = True
            else:
                self._forget(name)
        for name in clients.described:
            self._awaited.discard(name)
            row = self._rows.get(name)
            if row is None:
                continue
            self._table.num_examples[row] = 0  # what is new is read in the client's next turn
            if name in self._awaited_speed:
                self._awaited_speed.discard(name)
                self._table.base[row] = self._table.each[row] = np.nan
                self._table.is_outdated[row] = True

    def _forget(self, name: str) -> None:
        row = self._rows.pop(name, None)
        if row is not None:
            self._free.append(row)
        self._measured_again.pop(name, None)
        self._awaited_speed.discard(name)
        self._untold.discard(name)

    def waiting_since(self, names: Container[str]) -> dict[str, int]:
        """Return the round since which each of these clients that is left out waits."""
        if not self._table.waiting_since.any():
            return {}
        rounds = self._table.waiting_since.tolist()
        return {
            name: rounds[row] for name, row in self._rows.items() if rounds[row] and name in names
        }

    def describable(
        self, names: Sequence[str], reports: Mapping[str, DeviceReport], excluded: Container[str]
    ) -> list[str]:
        """Return the clients with an estimate, and not excluded; reads their new descriptions.

        A client may turn out to be unable to describe itself; it has no estimate.
        """
        able = [name for name in names if name not in excluded]
        table, at = self._table, np.fromiter(map(self._rows.get, able, repeat(-1)), np.int64)
        is_read = at >= 0
        known = at[is_read]
        is_read[is_read] = (table.num_examples[known] > 0) & ~table.is_outdated[known]
        if not is_read.all():
            unable = self._read(list(compress(able, ~is_read)), reports)
            able = [name for name in able if name not in unable]
        if not self._is_by_data:
            return able
        is_told = self._table.num_examples[self._at(able)] != UNTOLD_EXAMPLES
        for name in compress(able, ~is_told):
            if name in self._untold:
                continue
            log.warning(
                "%s: it does not tell its number of examples, by which its update would be "
                "weighed (--declared-examples); it is not invited",
                name,
            )
            self._untold.add(name)
        return list(compress(able, is_told))

    def _read(self, names: Sequence[str], reports: Mapping[str, DeviceReport]) -> set[str]:
        """Read what these clients say of themselves; returns those that cannot.

        If an estimate is not outdated, only the number of examples is read. A client that was
        disconnected keeps the speed that was measured in its rounds. A client that was left out as
        too slow does not: it may have become faster, and its description is the only sign of it.
        """
        told: dict[str, DeviceReport] = {}
        unable = set()
        for name in names:
            row = self._rows.get(name)
            if row is not None and self._table.num_examples[row] and name in self._awaited:
                continue  # its new description is on its way
            try:
                told[name] = reports[name]
            except KeyError:
                unable.add(name)
        for name in told:
            if name not in self._rows:
                self._add(name)
        at, new = self._at(told), list(told.values())
        table = self._table
        table.num_examples[at] = [one.num_examples or UNTOLD_EXAMPLES for one in new]
        outdated = table.is_outdated[at]
        at, new = at[outdated], list(compress(new, outdated))
        table.vitals.follow(at, VitalsColumns.of(one.vitals for one in new))
        table.is_outdated[at] = False
        takes_speed = np.isnan(table.base[at]) | (table.waiting_since[at] > 0)
        rows = [
            DeviceEstimate(
                line=training_speed.reported_line(one),
                fastest_micro_batch_size=one.fastest_micro_batch_size,
            )
            for one in compress(new, takes_speed)
        ]
        at, described = at[takes_speed], EstimateColumns.of(rows)
        table.base[at], table.each[at] = described.base, described.each
        table.fastest_micro_batch_size[at] = described.fastest_micro_batch_size
        table.deadline_share[at] = DEADLINE_SHARE
        return unable

    def _add(self, name: str) -> None:
        """Give a new client a row; the table doubles where it is full."""
        if not self._free:
            number = len(self._table)
            self._table = EstimateColumns.joined(
                [self._table, EstimateColumns.unknown(max(number, 16))]
            )
            self._free = list(range(len(self._table) - 1, number - 1, -1))
        row = self._rows[name] = self._free.pop()
        self._table.put(np.array([row]), EstimateColumns.unknown(1))

    def to_measure(self, names: Iterable[str], *, round_number: int) -> list[str]:
        """Return which of these clients are to measure their speed again after this round.

        A masked update tells no speed, so one bad measurement would last. Requests go out after
        rounds 2, 4, 8 and so on: a slow machine is not measured more often than needed.
        """
        due = [n for n in names if round_number >= 2 << self._measured_again.get(n, 0)]
        found = self.await_speed(due)
        for name in found:
            self._measured_again[name] = self._measured_again.get(name, 0) + 1
        return found

    def await_speed(self, names: Iterable[str]) -> list[str]:
        """Return which of these clients are known; their next description's speed is read."""
        found = [name for name in names if name in self._rows]
        self._awaited_speed.update(found)
        return found

    def note_selection(
        self, selection: Selection, waiting: Collection[str], round_number: int
    ) -> None:
        """Mark the clients that are left out, and those of the waiting that are invited."""
        table = self._table
        table.waiting_since[self._at(set(waiting).intersection(selection.names))] = 0
        at = self._at(selection.left_out)
        table.is_outdated[at] = True
        since = table.waiting_since[at]
        table.waiting_since[at] = np.where(since > 0, since, round_number)
        self._awaited.update(selection.left_out)

    def learn(
        self,
        invited: Iterable[str],
        *,
        told: Sequence[Told],
        refused: Mapping[str, HeadwaterError],
        exceptions: Collection[str] = (),
    ) -> None:
        """Follow the invited clients' speed, vitals and lateness, whether or not the round counts.

        ``refused`` are the errors of the clients without an update. ``exceptions`` are invited
        clients that are too slow: that they were late says nothing of their link.
        """
        for one in told:
            at = self._at(one.names)
            self._table.vitals.follow(at, one.vitals)
            self._follow_speed(at, one)
            for name, number in one.owned.items():
                self._table.num_examples[self._rows[name]] = number
        late = {name for name, error in refused.items() if isinstance(error, LateUpdate)}
        names = list(invited)
        self._note_late(self._at([n for n in names if n in late and n not in exceptions]))
        self._note_in_time(self._at([n for n in names if n not in late] if late else names))

    def _follow_speed(self, at: Ints, told: Told) -> None:
        """Follow the speed that steps show; most took what was expected of them."""
        base, each = self._table.base[at], self._table.each[at]
        of_step = np.repeat(np.arange(len(at)), told.num_steps)
        is_expected = training_speed.is_expected(
            base[of_step] + each[of_step] * told.work, told.seconds
        )
        is_changed = np.bincount(of_step[~is_expected], minlength=len(at)) > 0
        ends = np.cumsum(told.num_steps)
        for row in np.flatnonzero(is_changed & ~np.isnan(base)).tolist():
            own = slice(ends[row] - told.num_steps[row], ends[row])
            measured = list(zip(told.work[own].tolist(), told.seconds[own].tolist(), strict=True))
            line = Line(base=float(base[row]), each=float(each[row]))
            line = training_speed.updated_line(line, measured)
            self._table.base[at[row]], self._table.each[at[row]] = line.base, line.each

    def _note_late(self, at: Ints) -> None:
        """Give clients that were late a smaller share of the deadline."""
        table = self._table
        table.deadline_share[at] = np.maximum(table.deadline_share[at] * LATE_FACTOR, MIN_SHARE)
        table.times_late[at] += 1

    def _note_in_time(self, at: Ints) -> None:
        """Give clients that were not late a part of the lost share back."""
        table = self._table
        share = np.minimum(table.deadline_share[at] * IN_TIME_FACTOR, DEADLINE_SHARE)
        table.deadline_share[at], table.times_late[at] = share, 0

    def _at(self, names: Collection[str]) -> Ints:
        return np.fromiter(map(self._rows.__getitem__, names), np.int64, len(names))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> DeviceEstimate:
        return self._table.estimate(self._rows[name])
