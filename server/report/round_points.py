"""A round's figures, and each device's, as the page draws them: of a live row or of rounds.jsonl.

A simulation may commit ten rounds of a thousand devices between two looks at the page. So devices'
figures are taken column by column, and one device's are put together when they are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.common.system.printable import printable
from headwater.server.rounds.round_row import Row, field_of, figure_of

Point = dict[str, Any]

FIGURES = (
    *("round", "num_clients", "num_invited", "num_examples", "weight", "loss", "learning_rate"),
    *("seconds", "virtual_seconds", "slowest_client_seconds", "bytes_up", "bytes_down"),
    *("target", "noise_scale", "gradient_variance", "squared_gradient", "heterogeneity"),
    *("num_examples_left_out", "num_aborted", "num_epoch_examples", "epsilon", "delta"),
)
# By name the field of a device's row.
DEVICE_FIGURES = {
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
MAX_NAMES = 3  # of the clients that hardly have a share
MAX_METRICS = 12
MAX_NAME_CHARACTERS = 128  # as many as a device's name may have


def point_of(row: Row) -> Point:
    """Return a round's figures by name; what is unknown or not finite is None."""
    point = {name: finite(field_of(row, name)) for name in FIGURES}
    metrics = dict(list(field_of(row, "metrics").items())[:MAX_METRICS])
    steps = figure_of(row, "accumulation_steps")
    return point | {
        "metrics": {label(name): finite(value) for name, value in metrics.items()},
        "split": _finite_parts(field_of(row, "seconds_split")),
        "client_split": _finite_parts(field_of(row, "client_seconds")),
        "k_min": min(steps, default=None),
        "k_max": max(steps, default=None),
        "num_left_out": len(field_of(row, "left_out") or ()),
        "below_share": [label(name) for name in (field_of(row, "below_share") or ())[:MAX_NAMES]],
        "num_below_share": len(field_of(row, "below_share") or ()),
        "num_refused": len(field_of(row, "refused") or ()),
        "is_masked": bool(field_of(row, "masked_clients")),
    }


def finite(value: Any) -> Any:
    """Return the value; None in place of NaN and infinities, which JSON has no numbers for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _finite_parts(parts: Mapping[str, float] | None) -> dict[str, Any]:
    return {name: finite(value) for name, value in (parts or {}).items()}


def label(name: str) -> str:
    """Return a name of the task's or of a device's, fit to be shown."""
    return printable(name, max_characters=MAX_NAME_CHARACTERS)


def ring_of(row: Row) -> dict[str, Any] | None:
    """Return what the server saw of a masked round, in its ring; None of a plain round."""
    masked, opened = field_of(row, "ring_masked"), field_of(row, "ring_opened")
    if not masked or not opened:
        return None
    return {"round": field_of(row, "round"), "masked": [*masked], "opened": [*opened]}


def task_label(task: str | None) -> str:
    """Return a task's name without the folders before it."""
    return label((task or "headwater").rpartition("/")[2])


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
    columns = {name: figure_of(row, field) for name, field in DEVICE_FIGURES.items()}
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
