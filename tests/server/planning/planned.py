"""Clients to plan for: of a known speed, or drawn; and when their updates arrive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from headwater.common.estimates.linear_fit import Line
from headwater.common.messages import Vitals
from headwater.common.settings import schema as settings
from headwater.server.planning import cohort, planner
from headwater.server.planning.device_estimates import DeviceEstimate, EstimateColumns
from headwater.server.planning.planner import Assigned, Assignment, TransferCosts

MIB = 2**20
VITALS = tuple(Vitals.model_fields)


class Candidate(NamedTuple):
    """A client that work is assigned to."""

    name: str
    estimate: DeviceEstimate
    exception: str | None = None
    """Why it is invited although it is too slow."""


def device(
    name: str = "pi",
    num_examples: int = 100,
    *,
    base: float = 0.0,
    each: float | None = None,
    **known: Any,
) -> Candidate:
    """Return a client of this speed; ``known`` are fields of its vitals, or of its estimate."""
    vitals = {key: known.pop(key) for key in VITALS if key in known}
    line = None if each is None else Line(base=base, each=each)
    estimate = DeviceEstimate(
        num_examples=num_examples, line=line, vitals=Vitals(**vitals), is_outdated=False, **known
    )
    return Candidate(name, estimate)


def assign(devices: Sequence[Candidate], chosen: settings.PlanSettings, **others: Any) -> Assigned:
    """Assign work to some clients."""
    return planner.assign(
        [one.name for one in devices],
        EstimateColumns.of(one.estimate for one in devices),
        {one.name: one.exception for one in devices if one.exception is not None},
        chosen,
        **others,
    )


def slowness(
    one: Candidate, *, deadline_seconds: float | None, costs: TransferCosts
) -> cohort.Slowness | None:
    """Return by how much a client is too slow; None if it is not."""
    known = EstimateColumns.of([one.estimate])
    found = cohort.slowness([one.name], known, deadline_seconds=deadline_seconds, costs=costs)
    return found.get(one.name)


def plan(**changes: Any) -> settings.PlanSettings:
    return settings.PlanSettings.model_validate(changes)


SECONDS = st.floats(1e-6, 1e3)
RATE = st.none() | st.floats(1e3, 1e9)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "num_examples": st.integers(1, 5000),
            "base": st.just(0.0) | SECONDS,
            "each": st.none() | SECONDS,
            "fastest_micro_batch_size": st.none() | st.integers(1, 300),
            "share": st.just(1.0) | st.floats(0.01, 1),
            "upload_bytes_per_second": RATE,
            "download_bytes_per_second": RATE,
            "memory_limit_bytes": st.none() | st.integers(1, 4096 * MIB),
            "base_bytes": st.none() | st.integers(0, 300 * MIB),
            "bytes_per_example": st.none() | st.floats(0, 64 * MIB),
        }
    ),
    min_size=1,
    max_size=12,
)
COSTS = st.builds(
    TransferCosts,
    image_bytes=st.integers(1, 10**8),
    update_bytes=st.integers(1, 10**8),
    turn_seconds=st.just(0.0) | st.floats(1e-6, 1.0),
)


def devices_of(rows: list[dict[str, Any]]) -> list[Candidate]:
    return [device(f"d{at}", **row) for at, row in enumerate(rows)]


def here_after(assigned: Assignment, quota: int, costs: TransferCosts) -> float:
    """Return download + (ceil(q / m) a + q b) / share + upload, at the believed speed."""
    vitals, line = assigned.estimate.vitals, assigned.estimate.line
    assert line is not None
    down, up = vitals.download_bytes_per_second, vitals.upload_bytes_per_second
    work = math.ceil(quota / assigned.max_micro_batch_size) * line.base + quota * line.each
    transfers = (costs.image_bytes / down if down else 0) + (costs.update_bytes / up if up else 0)
    return transfers + work * assigned.speed_cut / vitals.share
