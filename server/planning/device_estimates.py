"""What the server knows of each client: training speed, memory, examples and lateness.

One immutable ``DeviceEstimate`` for each client, and pure functions from one value to the next. The
checkpoint stores the estimates, so that a resumed run plans what the unbroken run would plan.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headwater.common.errors import HeadwaterError, LateUpdate
from headwater.common.messages import DeviceReport, ReadyReport, UpdateReport, Vitals
from headwater.common.stats import training_speed
from headwater.common.stats.linear_fit import Line

# Share of the deadline that is planned; the rest is for the unforeseen.
DEADLINE_SHARE = 0.9
# The share of the deadline in which a client trains: it shrinks each time that the client is late,
# so that model and update have time to travel, and grows a little each time that it is not.
LATE_FACTOR, IN_TIME_FACTOR, MIN_SHARE = 0.6, 1.02, 0.05
# A client that was late so many times in a row is invited as rarely as one that is too slow.
MAX_TIMES_LATE = 3
MIN_TIME_SHARE = 1e-6

NO_VITALS = Vitals()
UNTOLD_EXAMPLES = 2**40
"""The number of examples of a client that does not tell it: it bounds no plan."""


def told(num_examples: int) -> int | None:
    """Return the number of examples that a client has told; None if it tells none."""
    return num_examples if 0 < num_examples < UNTOLD_EXAMPLES else None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceEstimate:
    """What is known of one client.

    ``num_examples`` is what the client owns, ``UNTOLD_EXAMPLES`` if it does not tell it; 0 until a
    report of it has been read. The checkpoint does not store it: a resumed server has new reports.
    ``line`` gives the seconds of a micro-batch; None if the run needs no speeds (K is set). With K
    set, only the memory figures of ``vitals`` are followed, as nothing else enters a plan.
    ``times_late`` counts the rounds in a row in which the client was late or did not answer.
    ``waiting_since`` is the first round since its last invitation in which the client was left out
    as too slow; None if there is none.
    ``is_outdated`` means that the client's next description of itself is to be read.
    """

    num_examples: int = 0
    line: Line | None = None
    fastest_micro_batch_size: int | None = None
    vitals: Vitals = NO_VITALS
    deadline_share: float = DEADLINE_SHARE
    times_late: int = 0
    waiting_since: int | None = None
    is_outdated: bool = True

    @property
    def time_share(self) -> float:
        """The share of its time that the client gives."""
        return max(self.vitals.share, MIN_TIME_SHARE)

    def after_description(self, report: DeviceReport) -> DeviceEstimate:
        """Return the estimate after the client's description of itself.

        If the estimate is not outdated, only the number of examples is read. A client that was
        disconnected keeps the speed that was measured in its rounds. A client that was left out as
        too slow does not: it may have become faster, and its description is the only sign of it.
        """
        changes: dict[str, Any] = {"num_examples": report.num_examples or UNTOLD_EXAMPLES}
        if self.is_outdated:
            changes |= {"vitals": _merged(self.vitals, report.vitals), "is_outdated": False}
            if self.line is None or self.waiting_since is not None:
                changes |= {
                    "line": training_speed.reported_line(report),
                    "fastest_micro_batch_size": report.fastest_micro_batch_size,
                    "deadline_share": DEADLINE_SHARE,
                }
        return replace(self, **changes)

    def after_disconnect(self) -> DeviceEstimate:
        """Return the estimate after the client disconnected: its next description is to be read."""
        return replace(self, is_outdated=True)

    def after_round(
        self,
        report: UpdateReport | None,
        ready: ReadyReport | None,
        error: HeadwaterError | None,
        *,
        is_k_set: bool,
        was_expected_late: bool = False,
    ) -> DeviceEstimate:
        """Follow the client's speed, vitals and lateness after a round, even an aborted one.

        The client has the report of an accepted update, that of a masked one, or an error. A client
        that is too slow for one example was expected to be late: this says nothing of its link.
        """
        known = self
        if report is not None:
            if not (is_k_set and have_same_memory(report.vitals, self.vitals)):
                known = self.after_update(report)
        elif ready is not None:
            known = self.after_masked_update(ready)
        if not isinstance(error, LateUpdate):
            return known.after_timely_update()
        return known if was_expected_late else known.after_late_update()

    @property
    def is_in_time(self) -> bool:
        """Whether the client was never late, or nothing is left of it."""
        return not self.times_late and self.deadline_share == DEADLINE_SHARE

    def after_update(self, report: UpdateReport) -> DeviceEstimate:
        """Follow the speed that an update's steps show, and the vitals that it reports."""
        line = self.line
        line = None if line is None else training_speed.updated_line(line, report.measured)
        vitals = _merged(self.vitals, report.vitals)
        if (line, vitals) == (self.line, self.vitals):
            return self
        return replace(self, line=line, vitals=vitals)

    def after_masked_update(self, ready: ReadyReport) -> DeviceEstimate:
        """Take the vitals of a client that keeps its steps private; its speed stays as it told."""
        return replace(self, vitals=_merged(self.vitals, ready.vitals))

    def after_late_update(self) -> DeviceEstimate:
        """Give a client that was late a smaller share of the deadline."""
        share = max(self.deadline_share * LATE_FACTOR, MIN_SHARE)
        return replace(self, deadline_share=share, times_late=self.times_late + 1)

    def after_timely_update(self) -> DeviceEstimate:
        """Give a client that was not late a part of the lost share back."""
        if self.is_in_time:
            return self
        share = min(self.deadline_share * IN_TIME_FACTOR, DEADLINE_SHARE)
        return replace(self, deadline_share=share, times_late=0)

    def after_leaving_out(self, round_number: int) -> DeviceEstimate:
        """Return the estimate of a client that is left out of a round as too slow."""
        since = round_number if self.waiting_since is None else self.waiting_since
        return replace(self, waiting_since=since, is_outdated=True)

    def after_invitation(self) -> DeviceEstimate:
        """Return the estimate of a client that is invited to a round."""
        return replace(self, waiting_since=None)


_MEMORY = operator.attrgetter("memory_limit_bytes", "base_bytes", "bytes_per_example")


def have_same_memory(one: Vitals, other: Vitals) -> bool:
    """Whether two reports say the same of memory, which is all that counts where K is set."""
    return one is other or _MEMORY(one) == _MEMORY(other)  # mostly one object, see ``_merged``


def _merged(known: Vitals, reported: Vitals) -> Vitals:
    """Return the reported vitals, with the known values where the report has none.

    If the result equals the report, it is the report: a million clients need no copies.
    """
    if reported is known:
        return known
    # By ``vars``: comparing or iterating over pydantic models takes five times as long.
    fields = vars(reported)
    update = {name: value for name, value in fields.items() if value is not None}
    return reported if vars(known) | update == fields else known.model_copy(update=update)


def to_json(estimates: Mapping[str, DeviceEstimate]) -> dict[str, dict[str, Any]]:
    """Return plain data for the checkpoint, without the values at their defaults."""
    rows = {}
    for name, one in estimates.items():
        row: dict[str, Any] = {"vitals": one.vitals.model_dump(exclude_defaults=True)}
        if one.line is not None:
            row["line"] = [one.line.base, one.line.each]
        for key in _PLAIN:
            if getattr(one, key) != getattr(UNKNOWN_DEVICE, key):
                row[key] = getattr(one, key)
        rows[name] = row
    return rows


def from_json(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, DeviceEstimate]:
    """Return the estimates that ``to_json`` wrote."""
    estimates = {}
    for name, row in rows.items():
        plain = {key: value for key, value in row.items() if key not in _REMOVED}
        line = plain.pop("line", None)
        estimates[name] = DeviceEstimate(
            vitals=Vitals(**plain.pop("vitals")),
            line=None if line is None else Line(base=line[0], each=line[1]),
            **plain,
        )
    return estimates


UNKNOWN_DEVICE = DeviceEstimate()
_PLAIN = (
    "fastest_micro_batch_size",
    "deadline_share",
    "times_late",
    "waiting_since",
    "is_outdated",
)
_REMOVED = ("num_left",)  # in checkpoints of earlier versions
