"""The clients' estimates as numpy columns: the planner computes with all clients at once."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from headwater.common.stats.linear_fit import Line
from headwater.server.planning.device_estimates import DeviceEstimate

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_UNKNOWN_LINE = Line(base=np.nan, each=np.nan)


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateColumns:
    """The fields of n estimates that enter a plan; an unknown value is NaN."""

    num_examples: Ints
    deadline_share: Floats
    fastest: Floats
    """The micro-batch size that was measured to be the fastest."""
    memory_limit: Floats
    """Bytes; ``base_bytes`` and ``bytes_per_example`` too."""
    base_bytes: Floats
    bytes_per_example: Floats
    base: Floats
    """Seconds per micro-batch while the client trains, in addition to its examples."""
    each: Floats
    """Seconds per example while the client trains."""
    share: Floats
    """The share of its time that the client gives."""
    is_on_battery: Floats
    download: Floats
    """Bytes per second, 0 or NaN where they are unknown; ``upload`` too."""
    upload: Floats

    @classmethod
    def of(cls, estimates: Sequence[DeviceEstimate]) -> EstimateColumns:
        """Return the columns of some estimates."""
        vitals = [one.vitals for one in estimates]
        lines = [one.line or _UNKNOWN_LINE for one in estimates]

        def column(items: Iterable[object], name: str) -> Floats:
            return np.array(list(map(operator.attrgetter(name), items)), dtype=np.float64)

        return cls(
            num_examples=column(estimates, "num_examples").astype(np.int64),
            deadline_share=column(estimates, "deadline_share"),
            fastest=column(estimates, "fastest_micro_batch_size"),
            memory_limit=column(vitals, "memory_limit_bytes"),
            base_bytes=column(vitals, "base_bytes"),
            bytes_per_example=column(vitals, "bytes_per_example"),
            base=column(lines, "base"),
            each=column(lines, "each"),
            share=column(vitals, "share"),
            is_on_battery=column(vitals, "is_on_battery"),
            download=column(vitals, "download_bytes_per_second"),
            upload=column(vitals, "upload_bytes_per_second"),
        )

    def with_rows(self, at: Ints, rows: EstimateColumns) -> EstimateColumns:
        """Return the columns with these rows in the place of those at ``at``."""
        columns = {one.name: getattr(self, one.name).copy() for one in fields(self)}
        for name, column in columns.items():
            column[at] = getattr(rows, name)
        return EstimateColumns(**columns)

    def some(self, at: Ints) -> EstimateColumns:
        """Return the columns of these clients."""
        return EstimateColumns(**{one.name: getattr(self, one.name)[at] for one in fields(self)})
