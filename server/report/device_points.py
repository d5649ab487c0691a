"""Each device's figures in a round, as the page draws them: one column for each figure.

A simulation may commit ten rounds of a thousand devices between two looks at the page. So a round's
figures are taken column by column, and one device's are put together when they are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.server.report.round_points import Point, finite
from headwater.server.rounds.round_row import Row, field_of, figure_of

# The field of a client's row for each figure.
FIGURES = {
    "name": "name",
    "k": "accumulation_steps",
    "size": "micro_batch_size",
    "examples": "num_examples",
    "weight": "weight",
    "seconds": "seconds",
    "loss": "loss",
    "memory": "peak_bytes",
    "reason": "reason",
    "plan": "plan",
}


@dataclass(frozen=True, slots=True)
class RoundParts:
    """The figures of a round's devices; ``names`` and every column have one value of each."""

    round: int
    names: Sequence[str]
    columns: Mapping[str, Sequence[Any]]

    def __len__(self) -> int:
        return len(self.names)

    def of(self, name: str) -> Point | None:
        """Return one device's figures; None if it is not in the round."""
        try:
            return self.point(self.names.index(name))
        except ValueError:
            return None

    def point(self, at: int) -> Point:
        """Return the figures of the device at a position; what is unknown or not finite is None."""
        found = {name: finite(column[at]) for name, column in self.columns.items()}
        return found | {"round": self.round, "memory": found["memory"] or None}

    def only(self, names: Collection[str]) -> RoundParts:
        """Return the figures of the devices that are among these names."""
        kept = [at for at, name in enumerate(self.names) if name in names]
        columns = {name: [column[at] for at in kept] for name, column in self.columns.items()}
        return RoundParts(self.round, [self.names[at] for at in kept], columns)


def parts_of(row: Row) -> RoundParts:
    """Return the figures of a round's devices, from a live row or a line of rounds.jsonl.

    ``weight_share`` is a device's share of the round's weight; under masks of the plans' examples.
    """
    columns = {name: figure_of(row, field) for name, field in FIGURES.items()}
    weights = columns.pop("weight")
    total = math.fsum(weight or 0 for weight in weights) or 1.0
    columns["weight_share"] = [None if weight is None else weight / total for weight in weights]
    return RoundParts(field_of(row, "round"), columns.pop("name"), columns)


def newest(rounds: Sequence[RoundParts]) -> Iterator[tuple[str, Point]]:
    """Yield each device's name and its figures in the last of the rounds that it is in."""
    seen: set[str] = set()
    for parts in reversed(rounds):
        for at, name in enumerate(parts.names):
            if name not in seen:
                yield name, parts.point(at)
        seen.update(parts.names)
