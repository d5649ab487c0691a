"""Summarizes the injected faults of a run: which updates were refused, and which were summed.

It reads the rows of rounds.jsonl, and draws again which faults affected each device. So it is right
for a resumed run, and for each way of computing a round. Aborted attempts leave no row; the summary
only counts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.common.errors import ConnectionLost, LateUpdate, StaleUpdate
from headwater.common.settings.schema import Settings
from headwater.server.rounds.round_row import figure_of
from headwater.simulation.fleet.faults import absent_seconds, falsifications, link_slowdown
from headwater.simulation.fleet.fleet_spec import fleet_spec
from headwater.simulation.fleet.identities import identities_of

SUMMED = "went in"


@dataclass(kw_only=True, slots=True)
class FaultCount:
    """The devices that one kind of fault has affected, and the outcomes of their replies."""

    names: set[str] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, outcome: str) -> None:
        """Count one reply of a device."""
        self.names.add(name)
        self.outcomes[outcome] += 1

    @property
    def devices(self) -> str:
        """The number of devices, in words."""
        return f"{len(self.names)} device{'' if len(self.names) == 1 else 's'}"


def fault_lines(rows: Sequence[Mapping[str, Any]], settings: Settings) -> list[tuple[str, str]]:
    """Return a title and a line for each kind of fault in a run; nothing without faults."""
    fleet = fleet_spec(settings)
    faults = fleet.faults
    if not faults:
        return []
    liars: dict[str, FaultCount] = {}
    slow, absent, num_vanished, num_invited = FaultCount(), FaultCount(), 0, 0
    parts = {identities_of(settings).name(part): part for part in range(fleet.num_devices)}
    for row in rows:
        for name, outcome in _outcomes(row, parts):
            num_invited += 1
            num_vanished += outcome == ConnectionLost.__name__
            moment = fleet.moment(parts[name], round_number=_sent_in(row, name))
            for kind in {fault.kind for fault in falsifications(faults, moment)}:
                liars.setdefault(kind, FaultCount()).add(name, outcome)
            if link_slowdown(faults, moment) > 1:
                slow.add(name, outcome)
            if absent_seconds(faults, moment):
                absent.add(name, outcome)
    lines = []
    if faults.liar:
        kinds = [
            f"{kind}: {count.devices}, {_count_outcomes(count.outcomes)}"
            for kind, count in sorted(liars.items())
        ]
        lines.append(("liars", "; ".join(kinds) or "none was invited"))
    if faults.dropout:
        dropouts = f"{num_vanished} of {num_invited} invitations ended with a lost device"
        lines.append(("dropouts", dropouts))
    if faults.slow_link:
        late = slow.outcomes[LateUpdate.__name__]
        replies = f"{slow.devices}, replies: {slow.outcomes.total()}, too late: {late}"
        lines.append(("slow links", replies))
    if faults.absence:
        late = sum(absent.outcomes[error.__name__] for error in (LateUpdate, StaleUpdate))
        replies = f"{absent.devices}, replies: {absent.outcomes.total()}, too late: {late}"
        lines.append(("absences", replies))
    num_aborted = sum(row.get("num_aborted", 0) for row in rows)
    if num_aborted:
        lines.append(("aborted", f"{num_aborted} attempts of rounds, not counted above"))
    return lines


def _sent_in(row: Mapping[str, Any], name: str) -> int:
    """Return the round whose plan a device answered: an asynchronous row has answers to several."""
    version: int | None = row.get("model_versions", {}).get(name)
    return int(row["round"]) if version is None else version + 1


def _outcomes(row: Mapping[str, Any], names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each invited device of a round, with SUMMED or the error that refused its update."""
    for name in figure_of(row, "name"):
        yield name, SUMMED
    for name, reason in row["refused"].items():
        if name in names:  # another name marks a second update of the same device
            yield name, reason.partition(":")[0]


def _count_outcomes(outcomes: Counter[str]) -> str:
    """Return how many updates were summed, and how many each error refused."""
    words = []
    for outcome, count in sorted(outcomes.items()):
        words.append(f"{count} {outcome}" if outcome == SUMMED else f"{count} refused ({outcome})")
    return ", ".join(reversed(words))
