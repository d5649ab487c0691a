"""The planner: memory sets each device's micro-batch, compute its quota, and K follows.

A device needs finish(q) = overhead + ceil(q / m) a + q b seconds for q examples in micro-batches of
m. The planner looks for the smallest common finish T at which the quotas reach the target effective
batch, so that nobody waits for the slow one; or takes T from the deadline. Pure functions of what
the devices reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common import settings
from common.update import DeviceReport

# Share of the deadline that is planned; the rest is for what was not foreseen.
DEADLINE_SHARE = 0.9
UNMEASURED_SECONDS = 1e-3
# A report names each accumulation step, and must fit in one frame of the wire.
MOST_STEPS = 4096
LEAST_SECONDS = 1e-9  # per example; what a device claims below it is rounding, or a lie


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What the planner asks of one device, and why."""

    quota: int
    micro_batch_size: int
    reason: str


def assign(
    reports: Sequence[DeviceReport],
    chosen: settings.Plan,
    *,
    deadline_seconds: float | None,
    image_bytes: int = 0,
    update_bytes: int = 0,
) -> dict[str, Assignment]:
    """Assign quotas and micro-batches; a device that cannot finish in time is left out.

    With ``accumulation_steps`` set, every device gets K micro-batches of the same size, and no more
    than it has examples. Otherwise quotas are by equal finish.
    """
    sizes = {r.name: micro_batch_size(r, chosen) for r in reports}
    if chosen.accumulation_steps is not None:
        return {
            r.name: Assignment(
                quota=min(chosen.accumulation_steps * sizes[r.name][0], r.num_examples),
                micro_batch_size=sizes[r.name][0],
                reason=f"K set to {chosen.accumulation_steps}; {sizes[r.name][1]}",
            )
            for r in reports
        }
    quotas = equal_finish(
        reports,
        {name: size for name, (size, _) in sizes.items()},
        target=chosen.effective_batch_size,
        finish_seconds=None if deadline_seconds is None else deadline_seconds * DEADLINE_SHARE,
        overheads={r.name: transfer_seconds(r, image_bytes, update_bytes) for r in reports},
    )
    return {
        r.name: Assignment(
            quota=quotas[r.name],
            micro_batch_size=min(sizes[r.name][0], quotas[r.name]),
            reason=_reason(r, quotas[r.name], sizes[r.name]),
        )
        for r in reports
        if quotas[r.name] > 0
    }


def micro_batch_size(report: DeviceReport, chosen: settings.Plan) -> tuple[int, str]:
    """Return the largest micro-batch that the device's memory holds, and what bound it.

    base + size x bytes per example must stay within ``memory_fraction`` of the limit; one example
    is asked for in any case, as the device itself has the last word.
    """
    is_set = chosen.micro_batch_size is not None or chosen.accumulation_steps is not None
    largest = chosen.micro_batch_size or (
        chosen.set_micro_batch_size if is_set else chosen.max_micro_batch_size
    )
    bound = "micro-batch as set" if is_set else "micro-batch at its maximum"
    if report.num_examples < largest and not is_set:
        largest, bound = report.num_examples, "all its examples fit in one micro-batch"
    limit, slope = report.vitals.memory_limit_bytes, report.vitals.bytes_per_example
    if limit is None or not slope:
        return largest, bound
    room = limit * chosen.memory_fraction - (report.vitals.base_bytes or 0)
    fitting = int(max(min(room / slope, largest), 1))
    if fitting < largest:
        plural = "" if fitting == 1 else "s"
        return fitting, f"memory-bound: {fitting} example{plural} in {limit / 2**20:.0f} MiB"
    return largest, bound


def transfer_seconds(report: DeviceReport, image_bytes: int, update_bytes: int) -> float:
    """Return the seconds of a device's download and upload, as far as its link is known."""
    down, up = report.vitals.download_bytes_per_second, report.vitals.upload_bytes_per_second
    return (image_bytes / down if down else 0.0) + (update_bytes / up if up else 0.0)


def _reason(report: DeviceReport, quota: int, size: tuple[int, str]) -> str:
    if quota == report.num_examples:
        return f"all its {quota} examples; {size[1]}"
    return f"speed-bound: {quota} example{'' if quota == 1 else 's'}; {size[1]}"


def equal_finish(
    reports: Sequence[DeviceReport],
    sizes: Mapping[str, int],
    *,
    target: int,
    finish_seconds: float | None,
    overheads: Mapping[str, float] | None = None,
) -> dict[str, int]:
    """Return each device's quota: the same finish for all, at least ``target`` examples in all.

    Without a given finish every device gets at least one example, and the smallest finish that
    reaches the target, or all examples there are, is found by bisection. With one, no device is
    asked for more than it finishes by then, and one that cannot finish a single example gets 0.
    """
    fleet = _Fleet.of(reports, sizes, overheads or {})
    target = min(target, int(fleet.num_examples.sum()))
    # Who can finish one example in time takes part: no device's data is left out for speed.
    least = np.ones_like(fleet.num_examples)
    if finish_seconds is not None:
        least = np.minimum(fleet.quotas(finish_seconds), least)

    def reaches(finish: float) -> bool:
        return int(np.maximum(fleet.quotas(finish), least).sum()) >= target

    if finish_seconds is not None and not reaches(finish_seconds):
        quotas = fleet.quotas(finish_seconds)
        return dict(zip(fleet.names, quotas.tolist(), strict=True))

    # From below: one device that says it needs a century must not coarsen the search for all.
    low, high = 0.0, float(fleet.finish(np.ones_like(fleet.num_examples)).min())
    while not reaches(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    quotas = np.maximum(fleet.quotas(high), least)
    return dict(zip(fleet.names, quotas.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fleet:
    """The reports as columns."""

    names: list[str]
    num_examples: NDArray[np.int64]
    size: NDArray[np.int64]
    dispatch: NDArray[np.float64]  # a, seconds per micro-batch
    each: NDArray[np.float64]  # b, seconds per example
    overhead: NDArray[np.float64]

    @staticmethod
    def of(
        reports: Sequence[DeviceReport], sizes: Mapping[str, int], overheads: Mapping[str, float]
    ) -> _Fleet:
        return _Fleet(
            names=[r.name for r in reports],
            num_examples=np.array(
                [min(r.num_examples, MOST_STEPS * sizes[r.name]) for r in reports], dtype=np.int64
            ),
            size=np.array([sizes[r.name] for r in reports], dtype=np.int64),
            dispatch=np.array([r.seconds_per_micro_batch or 0.0 for r in reports]),
            each=np.array(
                [max(r.seconds_per_example or UNMEASURED_SECONDS, LEAST_SECONDS) for r in reports]
            ),
            overhead=np.array([overheads.get(r.name, 0.0) for r in reports]),
        )

    def finish(self, quotas: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds each device needs for its quota."""
        num_micro_batches = -(-quotas // self.size)
        seconds: NDArray[np.float64] = self.overhead + num_micro_batches * self.dispatch
        return seconds + quotas * self.each

    def quotas(self, finish_seconds: float) -> NDArray[np.int64]:
        """Return the most examples that each device finishes in time; 0 if none."""
        budget = np.maximum(finish_seconds - self.overhead, 0.0) * (1 + 1e-12)
        whole = np.floor(budget / (self.dispatch + self.size * self.each))
        whole = np.minimum(whole, self.num_examples // self.size)
        left = budget - whole * (self.dispatch + self.size * self.each)
        more = np.clip(np.floor((left - self.dispatch) / self.each), 0, self.size - 1)
        quotas: NDArray[np.int64] = np.minimum(whole * self.size + more, self.num_examples).astype(
            np.int64
        )
        return quotas
