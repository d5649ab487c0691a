"""What the server knows of its clients, as rows: training speed, memory, examples and lateness.

The planner computes with all rows at once; a row by itself is a ``DeviceEstimate``. The checkpoint
stores the rows, so that a resumed run plans what the unbroken run would plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwater.common.estimates.linear_fit import Line
from headwater.common.messages import Vitals
from headwater.server.planning.vitals_columns import Bools, Columns, Floats, Ints, VitalsColumns

# Share of the deadline that is planned; the rest is for the unforeseen.
DEADLINE_SHARE = 0.9
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
    ``line`` gives the seconds of a micro-batch; None if the run needs no speeds (K is set).
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


UNKNOWN_DEVICE = DeviceEstimate()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EstimateColumns(Columns):
    """The estimates of n clients; see ``DeviceEstimate``."""

    num_examples: Ints
    base: Floats
    """Seconds per micro-batch while the client trains, in addition to its examples; NaN: unknown.
    """
    each: Floats
    """Seconds per example while the client trains."""
    fastest_micro_batch_size: Floats
    """The size that was measured to be the fastest; NaN: none was."""
    deadline_share: Floats
    times_late: Ints
    waiting_since: Ints
    """0: it does not wait."""
    is_outdated: Bools
    vitals: VitalsColumns

    @staticmethod
    def of(estimates: Iterable[DeviceEstimate]) -> EstimateColumns:
        """Return the columns of some estimates."""
        rows = list(estimates)

        def column(name: str, kind: type = np.float64) -> Any:
            values = [getattr(one, name) for one in rows]
            return np.array(values if kind is np.float64 else [one or 0 for one in values], kind)

        unknown = Line(base=math.nan, each=math.nan)
        lines = np.array([(line.base, line.each) for line in (one.line or unknown for one in rows)])
        return EstimateColumns(
            num_examples=column("num_examples", np.int64),
            base=lines.reshape(-1, 2)[:, 0].copy(),
            each=lines.reshape(-1, 2)[:, 1].copy(),
            fastest_micro_batch_size=column("fastest_micro_batch_size"),
            deadline_share=column("deadline_share"),
            times_late=column("times_late", np.int64),
            waiting_since=column("waiting_since", np.int64),
            is_outdated=column("is_outdated", np.bool_),
            vitals=VitalsColumns.of(one.vitals for one in rows),
        )

    @staticmethod
    def unknown(number: int) -> EstimateColumns:
        """Return the rows of so many clients of which nothing is known."""
        return EstimateColumns.of([UNKNOWN_DEVICE]).some(np.zeros(number, dtype=np.int64))

    @property
    def time_share(self) -> Floats:
        """The share of its time that each client gives."""
        return np.maximum(self.vitals.share, MIN_TIME_SHARE)

    def estimate(self, at: int) -> DeviceEstimate:
        """Return one client's estimate."""
        base, fastest = float(self.base[at]), float(self.fastest_micro_batch_size[at])
        return DeviceEstimate(
            num_examples=int(self.num_examples[at]),
            line=None if math.isnan(base) else Line(base=base, each=float(self.each[at])),
            fastest_micro_batch_size=None if math.isnan(fastest) else int(fastest),
            vitals=self.vitals[at],
            deadline_share=float(self.deadline_share[at]),
            times_late=int(self.times_late[at]),
            waiting_since=int(self.waiting_since[at]) or None,
            is_outdated=bool(self.is_outdated[at]),
        )

    def __len__(self) -> int:
        return len(self.num_examples)


def to_json(names: Iterable[str], known: EstimateColumns) -> dict[str, dict[str, Any]]:
    """Return plain data of clients for the checkpoint, without the values at their defaults."""
    columns = {key: getattr(known, key).tolist() for key in _PLAIN}
    lines = zip(known.base.tolist(), known.each.tolist(), strict=True)
    rows = zip(names, known.vitals.told(), lines, zip(*columns.values(), strict=True), strict=True)
    found = {}
    for name, vitals, line, values in rows:
        row: dict[str, Any] = {"vitals": vitals}
        if not math.isnan(line[0]):
            row["line"] = line
        for key, value, default in zip(columns, values, _PLAIN.values(), strict=True):
            if value != default and value == value:
                row[key] = int(value) if key == FASTEST else value
        found[name] = row
    return found


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


FASTEST = "fastest_micro_batch_size"
_PLAIN = {
    FASTEST: None,
    "deadline_share": DEADLINE_SHARE,
    "times_late": 0,
    "waiting_since": 0,
    "is_outdated": True,
}
"""The columns that a row has by their name, and what an unknown client's is."""
_REMOVED = ("num_left",)  # in checkpoints of earlier versions
