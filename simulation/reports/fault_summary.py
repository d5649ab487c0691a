"""What became of the faults that were injected: what was refused, and what went into the sum.

Read from the rows of rounds.jsonl and from the faults themselves, which say again what they did. So
it holds for a run that was taken up again, and for each way of computing a round. Attempts that
were aborted leave no row; how many there were is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.common.errors import ConnectionLost, LateUpdate
from headwater.common.settings.schema import Settings
from headwater.simulation.fleet.faults import FleetFaults, lies, slowed
from headwater.simulation.fleet.profiles import faults_of, moment_of

WENT_IN = "went in"


@dataclass(kw_only=True, slots=True)
class _Struck:
    """Which devices one kind of fault struck, and what became of their answers."""

    names: set[str] = field(default_factory=set)
    fates: Counter[str] = field(default_factory=Counter)

    def count(self, name: str, fate: str) -> None:
        self.names.add(name)
        self.fates[fate] += 1

    @property
    def devices(self) -> str:
        return f"{len(self.names)} device{'' if len(self.names) == 1 else 's'}"


def fault_lines(rows: Sequence[Mapping[str, Any]], settings: Settings) -> list[tuple[str, str]]:
    """Return a title and a line for each kind of fault that a run had; none if it had none."""
    faults = faults_of(settings)
    if not faults:
        return []
    liars: dict[str, _Struck] = {}
    slow, gone, num_invited = _Struck(), _Struck(), 0
    for row in rows:
        for name, fate in _fates(row):
            num_invited += 1
            moment = moment_of(settings, int(name), round_number=row["round"])
            for kind in {told.kind for told in lies(faults, moment)}:
                liars.setdefault(kind, _Struck()).count(name, fate)
            if slowed(faults, moment) > 1:
                slow.count(name, fate)
            if fate == ConnectionLost.__name__:
                gone.count(name, fate)
    return list(_lines(faults, liars, slow, gone, num_invited, _num_aborted(rows)))


def _fates(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each invited device of a round, with the error that its answer was refused by."""
    for client in (*row["clients"], *row.get("masked_clients", [])):
        yield client["name"], WENT_IN
    for name, why in row["refused"].items():
        if name.isdecimal():  # else it is said of a second answer of the same device
            yield name, why.partition(":")[0]


def _num_aborted(rows: Sequence[Mapping[str, Any]]) -> int:
    return sum(row.get("num_aborted", 0) for row in rows)


def _lines(
    faults: FleetFaults,
    liars: Mapping[str, _Struck],
    slow: _Struck,
    gone: _Struck,
    num_invited: int,
    num_aborted: int,
) -> Iterator[tuple[str, str]]:
    if faults.liar:
        told = "; ".join(
            f"{kind}: {struck.devices}, {_of(struck.fates)}"
            for kind, struck in sorted(liars.items())
        )
        yield "liars", told or "none was invited"
    if faults.dropout:
        lost = gone.fates.total()
        yield "dropouts", f"{lost} of {num_invited} invitations were not answered to the end"
    if faults.slow_link:
        late = slow.fates[LateUpdate.__name__]
        yield "slow links", f"{slow.devices}, answers: {slow.fates.total()}, too late: {late}"
    if num_aborted:
        yield "aborted", f"{num_aborted} attempts of rounds, of which nothing is counted above"


def _of(fates: Counter[str]) -> str:
    """Say how many updates went into the sum, and by which error the others were refused."""
    words = []
    for fate, count in sorted(fates.items()):
        words.append(f"{count} {fate}" if fate == WENT_IN else f"{count} refused ({fate})")
    return ", ".join(reversed(words))
