"""What the server learns of each device, from what it tells at joining and from every round.

One value per device, and pure functions from one value to the next: how fast it trains, what it
last told of itself, how many examples its epoch has left, how much of the deadline it may train,
and since when it has been left out. The checkpoint keeps them, so that a run that is taken up again
plans what the unbroken run would have planned.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headwater.common.messages import DeviceReport, ReadyReport, ReportFields, Vitals
from headwater.common.stats import training_speed as pace
from headwater.common.stats.linear_fit import Line

# Share of the deadline that is planned; the rest is for what was not foreseen.
DEADLINE_SHARE = 0.9
# The share of the deadline in which a device trains: less each time that it comes too late, so that
# model and update have time to travel, and a little more again each time that it does not.
LATE_FACTOR, IN_TIME_FACTOR, LEAST_SHARE = 0.6, 1.02, 0.05
# Who has come too late so often, one time after the other, is asked as seldom as who is too slow.
MOST_TIMES_LATE = 3

NO_VITALS = Vitals()


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """What is known of one device beside its name and the number of its examples.

    ``line`` gives the seconds of a micro-batch; it is None where speeds were not asked for.
    Where K is set only the memory of ``vitals`` is followed: nothing else counts there.
    ``num_left`` is None at an epoch's start, when all its examples are left.
    ``times_late`` counts the times in a row that it came too late, or not at all.
    ``waiting_since`` is the first round that it was left out of, being too slow, since it was last
    asked; None if it was not. ``is_outdated`` means that what it tells of itself next counts.
    """

    line: Line | None = None
    fastest_micro_batch_size: int | None = None
    vitals: Vitals = NO_VITALS
    num_left: int | None = None
    deadline_share: float = DEADLINE_SHARE
    times_late: int = 0
    waiting_since: int | None = None
    is_outdated: bool = True

    def told(self, report: DeviceReport) -> Learned:
        """Take over what a device tells of itself, if that is to count.

        A device that was gone for a while keeps the pace at which it was seen to work. One that was
        left out for its pace does not: it may have become faster, and has no other way to say so.
        """
        if not self.is_outdated:
            return self
        told = replace(self, vitals=_merged(self.vitals, report.vitals), is_outdated=False)
        if self.line is not None and self.waiting_since is None:
            return told
        return replace(
            told,
            line=pace.told(report),
            fastest_micro_batch_size=report.fastest_micro_batch_size,
            deadline_share=DEADLINE_SHARE,
        )

    def gone(self) -> Learned:
        """Take note that the device is not there: when it comes back, it tells its vitals anew."""
        return self if self.is_outdated else replace(self, is_outdated=True)

    def trained(self, report: ReportFields) -> Learned:
        """Follow the pace that an update shows, and the vitals that it tells."""
        line, told = self.line, report.vitals
        if line is None and told is self.vitals:
            return self
        line = None if line is None else pace.followed(line, report.steps)
        vitals = _merged(self.vitals, told)
        if line is self.line and vitals is self.vitals:
            return self
        return replace(self, line=line, vitals=vitals)

    def holds_as_much(self, told: Vitals) -> bool:
        """Say whether the device told of the same memory: all that a plan with K set follows."""
        return told is self.vitals or _MEMORY(told) == _MEMORY(self.vitals)

    def shown(self, ready: ReadyReport) -> Learned:
        """Take over the pace and the vitals of a device that keeps its steps to itself."""
        line, told = self.line, (ready.seconds_per_micro_batch, ready.seconds_per_example)
        if line is not None and told[0] is not None and told[1] is not None:
            line = pace.bounded(Line(base=told[0], each=told[1]))
        return replace(self, line=line, vitals=_merged(self.vitals, ready.vitals))

    def late(self) -> Learned:
        """Let a device that came too late train for less of the deadline."""
        share = max(self.deadline_share * LATE_FACTOR, LEAST_SHARE)
        return replace(self, deadline_share=share, times_late=self.times_late + 1)

    def in_time(self) -> Learned:
        """Give a device that did not come too late some of its time back."""
        if self.deadline_share == DEADLINE_SHARE and not self.times_late:
            return self
        share = min(self.deadline_share * IN_TIME_FACTOR, DEADLINE_SHARE)
        return replace(self, deadline_share=share, times_late=0)

    def counted(self, report: ReportFields) -> Learned:
        """Move on in the epoch: the device's update is part of a sum that was committed."""
        num_left = report.num_left or None
        return self if num_left == self.num_left else replace(self, num_left=num_left)

    def skipped(self) -> Learned:
        """Forget the place in the epoch: the device went past a window that gave no update."""
        return replace(self, num_left=None)

    def left_out(self, round_number: int) -> Learned:
        """Take note that the device was too slow for a round; what it tells next counts."""
        since = round_number if self.waiting_since is None else self.waiting_since
        return replace(self, waiting_since=since, is_outdated=True)

    def asked(self) -> Learned:
        """Take note that the device has a part in a round."""
        return self if self.waiting_since is None else replace(self, waiting_since=None)


_MEMORY = operator.attrgetter("memory_limit_bytes", "base_bytes", "bytes_per_example")


def _merged(known: Vitals, told: Vitals) -> Vitals:
    """Lay what is told over what is known; what is not told this time stays as it was."""
    if told is known:
        return known
    # By ``vars``: to iterate over a model takes five times as long.
    update = {name: value for name, value in vars(told).items() if value is not None}
    # What tells as much as is known stands for both: a device that tells the same again is news to
    # nobody, and costs nothing.
    is_whole = all(name in update for name, value in vars(known).items() if value is not None)
    return told if is_whole else known.model_copy(update=update)


def to_json(learned: Mapping[str, Learned]) -> dict[str, dict[str, Any]]:
    """Return plain data for the checkpoint; what is at its default is left out."""
    rows = {}
    for name, one in learned.items():
        row: dict[str, Any] = {"vitals": one.vitals.model_dump(exclude_defaults=True)}
        if one.line is not None:
            row["line"] = [one.line.base, one.line.each]
        for key in _PLAIN:
            if getattr(one, key) != getattr(NOTHING, key):
                row[key] = getattr(one, key)
        rows[name] = row
    return rows


def of_json(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Learned]:
    """Return what ``to_json`` gave."""
    learned = {}
    for name, row in rows.items():
        plain = dict(row)
        line = plain.pop("line", None)
        learned[name] = Learned(
            vitals=Vitals(**plain.pop("vitals")),
            line=None if line is None else Line(base=line[0], each=line[1]),
            **plain,
        )
    return learned


NOTHING = Learned()
_PLAIN = (
    "fastest_micro_batch_size",
    "num_left",
    "deadline_share",
    "times_late",
    "waiting_since",
    "is_outdated",
)
