"""The planner: each client's micro-batch follows from its memory, its quota from its speed.

The micro-batch is the largest that fits in the client's memory with a margin, up to the size beyond
which the client measured no gain. Quotas are by equal finish (``server.planning.equal_finish``), so
that no client waits for a slower one. K = ceil(quota / micro-batch size). All functions are pure,
and each assignment records what bound it (``server.planning.plan_reasons``).

Clients may make false claims. A speed is believed up to MAX_SPEED_RATIO times that of the cohort's
median client with the same micro-batch; the cut is counted and reported. A lying client can still:

* be assigned as much as MAX_SPEED_RATIO median clients with the memory that it claims, and send
  nothing or a false sum. The other quotas shrink, but never to zero.
* be assigned a single example, by claiming a century for each, little memory or a slow link. That
  costs the other clients nothing but its turn at the server.
* keep a round without a deadline waiting, as any client can that does not answer.
* move the median, if half of the cohort lies in the same way.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from headwater.common.messages import MAX_STEPS, Vitals
from headwater.common.settings import schema as settings
from headwater.common.stats.linear_fit import Line
from headwater.common.stats.training_speed import MIN_SECONDS_PER_EXAMPLE
from headwater.server.planning.device_estimates import DEADLINE_SHARE, DeviceEstimate
from headwater.server.planning.equal_finish import CohortColumns, Floats, Ints, equal_finish

# A fleet of Pi Zeros and laptops is sixteen times apart; a client that is farther than this from
# the median more likely has a clock that jumped, or lies.
MAX_SPEED_RATIO = 32.0
UNMEASURED_SECONDS = 1e-3
MIN_BYTES = 1e-3  # per example
MAX_TRANSFER_SECONDS = 1e9
# A speed that is measured in less time is mostly the scheduler's noise: it should end no window.
MIN_FINISH_SECONDS = 1.0
MAX_FINISH_SECONDS = 30 * 86_400.0


class Candidate(NamedTuple):
    """A client that the planner assigns work to."""

    name: str
    estimate: DeviceEstimate
    exception: str | None = None
    """Why the client is invited for one example although it is too slow; None if it is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferCosts:
    """The bytes that a round moves for each client, and the server's seconds for each update."""

    image_bytes: int = 0
    update_bytes: int = 0
    turn_seconds: float = 0.0
    """The server's seconds to check and add one update; it takes one update after another."""

    def transfer_seconds(self, vitals: Vitals) -> float:
        """Return the seconds of a client's download and upload; 0 where its link is unknown."""
        down, up = vitals.download_bytes_per_second, vitals.upload_bytes_per_second
        seconds = self.image_bytes / down if down else 0.0
        seconds += self.update_bytes / up if up else 0.0
        return min(seconds, MAX_TRANSFER_SECONDS)


class SizeBound(Enum):
    """The limit that a micro-batch's size is at."""

    SET = "as set"
    MAXIMUM = "at its maximum"
    FASTEST = "fastest measured"
    DATA = "what its epoch has left"
    MEMORY = "what fits in memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What the planner assigns to a client, and what bound it.

    Candidates with the same plan share one assignment, whose ``candidate`` is the first of them.
    """

    candidate: Candidate
    quota: int
    max_micro_batch_size: int
    """The largest micro-batch allowed; the quota may be smaller."""
    size_bound: SizeBound
    accumulation_steps: int | None = None
    """K, where the operator has set it."""
    speed_cut: float = 1.0
    """The claimed speed over the believed one, at least 1."""
    ahead: float = 0.0
    """The part of the round by which the client's turn is before the end."""
    transfers: float = 0.0
    """The part of the round that its download and upload take; 1 or more: all of it."""
    free_seconds: float = 0.0
    """Seconds until T, less its transfers and its turn."""

    @property
    def micro_batch_size(self) -> int:
        """The size in use: K = 1 where the quota fits in one micro-batch."""
        return min(self.max_micro_batch_size, self.quota)

    @property
    def time_share(self) -> float | None:
        """The share of the client's time that the quota counts on; None where K is set."""
        return None if self.accumulation_steps is not None else self.candidate.estimate.time_share

    def finish_seconds(self, micro_batch_size: int) -> float | None:
        """Return when the client should have trained on its quota, and may stop.

        It is computed from the figures that the quota was planned with, in the share of its time
        that the client gives. At that speed the client ends with exactly its quota, and the
        cohort's sum is the target. A client without more examples than its quota may take until T.
        None where K is set, where the speed is unknown, where the client is expected to be late,
        and where the time is too short to measure a speed in.
        """
        line = self.candidate.estimate.line
        if self.accumulation_steps is not None or line is None:
            return None
        if self.candidate.exception is not None:
            return None
        num_micro_batches = -(-self.quota // micro_batch_size)
        seconds = (num_micro_batches * line.base + self.quota * line.each) * self.speed_cut
        most = min(self.candidate.estimate.examples_left, MAX_STEPS * self.max_micro_batch_size)
        if self.quota == most:
            seconds = max(seconds, self.candidate.estimate.time_share * self.free_seconds)
        is_measurable = MIN_FINISH_SECONDS <= seconds <= MAX_FINISH_SECONDS
        return seconds if is_measurable else None


NO_COSTS = TransferCosts()


def assign(
    names: Sequence[str],
    estimates: Sequence[DeviceEstimate],
    exceptions: Mapping[str, str],
    chosen: settings.PlanSettings,
    *,
    target: int,
    deadline_seconds: float | None = None,
    costs: TransferCosts = NO_COSTS,
) -> dict[str, Assignment]:
    """Assign a quota of at least one example and a micro-batch size to every client, by name.

    ``exceptions`` says why a client is invited for one example although it is too slow.

    With ``accumulation_steps`` set, each gets K micro-batches of the same size, but no more than
    its epoch has left. Otherwise quotas are by equal finish, and their sum is ``target`` examples
    if the clients' bounds and the deadline allow it. Clients for which everything that enters a
    plan is the same share one assignment.
    """
    if not names:
        return {}
    candidates = list(map(Candidate, names, estimates, map(exceptions.get, names)))
    steps = chosen.accumulation_steps
    sizes, bounds = micro_batch_sizes(candidates, chosen)
    if steps is not None:
        left = np.array([one.estimate.examples_left for one in candidates], dtype=np.int64)
        nothing = np.zeros(len(candidates))
        columns = (np.minimum(steps * sizes, left), nothing + 1.0, nothing, nothing, nothing)
    else:
        columns = _equal_quotas(candidates, sizes, target, deadline_seconds, costs)
    figures = [sizes.tolist(), bounds, *(column.tolist() for column in columns)]
    inputs = plan_inputs(candidates, bounds, is_k_set=steps is not None)
    first_of: dict[tuple[object, ...], int] = {}
    assigned: list[Assignment] = []
    for at, kind in enumerate(zip(*figures, inputs, strict=True)):
        first = first_of.setdefault(kind, at)
        if first < at:
            assigned.append(assigned[first])
            continue
        size, bound, quota, cut, ahead, transfers, free, _ = kind
        assigned.append(
            Assignment(
                candidate=candidates[at],
                quota=quota,
                max_micro_batch_size=size,
                size_bound=bound,
                accumulation_steps=steps,
                speed_cut=cut,
                ahead=ahead,
                transfers=transfers,
                free_seconds=free,
            )
        )
    return dict(zip(names, assigned, strict=True))


def plan_inputs(
    candidates: Sequence[Candidate], bounds: Sequence[SizeBound], *, is_k_set: bool
) -> Iterable[tuple[object, ...]]:
    """Yield what of each candidate enters its plan and the plan's reason, other than its name."""
    values = _INPUTS_OF_SET_K if is_k_set else _INPUTS
    for (_, estimate, exception), bound in zip(candidates, bounds, strict=True):
        limit = estimate.vitals.memory_limit_bytes if bound is SizeBound.MEMORY else None
        yield (*values(estimate), limit, exception)


_INPUTS_OF_SET_K = operator.attrgetter("num_examples", "num_left", "deadline_share")
_INPUTS = operator.attrgetter(
    *("num_examples", "num_left", "deadline_share"),
    *("line", "vitals.share", "vitals.is_on_battery"),
)


def _equal_quotas(
    candidates: Sequence[Candidate],
    sizes: Ints,
    target: int,
    deadline_seconds: float | None,
    costs: TransferCosts,
) -> tuple[Ints, Floats, Floats, Floats, Floats]:
    """Return the quotas by equal finish, and four more columns of the assignments."""
    cohort, speed_cuts = _columns(candidates, sizes, deadline_seconds, costs)
    quotas, finish_seconds = equal_finish(
        cohort,
        target=target,
        finish_seconds=None if deadline_seconds is None else deadline_seconds * DEADLINE_SHARE,
    )
    ahead = cohort.ahead(cohort.turns(), finish_seconds)
    free = finish_seconds - ahead - cohort.fixed
    return quotas, speed_cuts, ahead / finish_seconds, cohort.fixed / finish_seconds, free


def micro_batch_sizes(
    candidates: Sequence[Candidate], chosen: settings.PlanSettings
) -> tuple[Ints, list[SizeBound]]:
    """Return the largest micro-batches that fit in the clients' memories, and what bound each.

    base + size x bytes per example must stay within ``memory_fraction`` of the limit; one example
    is assigned in any case, as the device itself decides in the end. Where no size is set, it is at
    most what the device measured to be the fastest, and what its epoch has left.
    """
    estimates = [one.estimate for one in candidates]
    fitting = _fitting_sizes(estimates, chosen.memory_fraction)
    if chosen.micro_batch_size is not None or chosen.accumulation_steps is not None:
        largest = chosen.micro_batch_size or chosen.set_micro_batch_size
        kinds = [SizeBound.SET, SizeBound.MEMORY]
        limits = [np.full_like(fitting, largest), fitting]
    else:
        kinds = [SizeBound.MAXIMUM, SizeBound.FASTEST, SizeBound.DATA, SizeBound.MEMORY]
        fastest = [one.fastest_micro_batch_size or math.inf for one in estimates]
        left = [float(one.examples_left) for one in estimates]
        limits = [
            np.full_like(fitting, chosen.max_micro_batch_size),
            np.array(fastest),
            np.array(left),
            fitting,
        ]
    rows = np.stack(limits)
    first = rows.argmin(axis=0)  # of equal limits the first
    return rows.min(axis=0).astype(np.int64), [kinds[at] for at in first.tolist()]


def _fitting_sizes(estimates: Sequence[DeviceEstimate], fraction: float) -> Floats:
    """Return the largest micro-batches that fit in memory; 2^40 where that is unknown."""
    rows = [_MEMORY(one.vitals) for one in estimates]
    limit, base, slope = np.array(rows, dtype=np.float64).T  # None becomes NaN
    is_known = (limit >= 0) & (slope > 0)
    base[np.isnan(base)] = 0.0
    room = np.where(is_known, np.maximum(limit * fraction - base, 0.0), np.inf)
    sizes = room / np.where(is_known, np.maximum(slope, MIN_BYTES), 1.0)
    fitting: Floats = np.maximum(np.floor(np.minimum(sizes, 2.0**40)), 1.0)
    return fitting


_MEMORY = operator.attrgetter("memory_limit_bytes", "base_bytes", "bytes_per_example")


def _columns(
    candidates: Sequence[Candidate],
    sizes: Ints,
    deadline_seconds: float | None,
    costs: TransferCosts,
) -> tuple[CohortColumns, Floats]:
    """Return the candidates as columns, and the claimed speed over the believed one of each."""
    estimates = [one.estimate for one in candidates]
    share = np.array([one.time_share for one in estimates])
    lines = [one.line for one in estimates]
    base = np.array([math.nan if line is None else line.base for line in lines]) / share
    each = np.array([math.nan if line is None else line.each for line in lines]) / share
    # Clients that are invited as an exception claim to be slow: their claims cannot raise a quota.
    is_measured = np.array([line is not None for line in lines])
    is_regular = is_measured & np.array([one.exception is None for one in candidates])
    median = _median_line(base[is_regular], each[is_regular], largest=int(sizes.max()))
    base[~is_measured], each[~is_measured] = median.base, median.each
    believed = (median.base + sizes * median.each) / MAX_SPEED_RATIO
    speed_cuts = np.where(is_regular, np.maximum(believed / (base + sizes * each), 1.0), 1.0)
    deadline = math.inf if deadline_seconds is None else deadline_seconds
    most = [
        min(one.estimate.examples_left, MAX_STEPS * size) if one.exception is None else 1
        for one, size in zip(candidates, sizes.tolist(), strict=True)
    ]
    cohort = CohortColumns(
        size=sizes,
        base=base * speed_cuts,
        each=each * speed_cuts,
        fixed=np.array([costs.transfer_seconds(one.vitals) for one in estimates]),
        most=np.array(most, dtype=np.int64),
        longest=deadline * np.array([one.deadline_share for one in estimates]),
        turn_seconds=costs.turn_seconds,
    )
    return cohort, speed_cuts


def _median_line(base: Floats, each: Floats, *, largest: int) -> Line:
    """Return the line of a median client, through the medians at size 1 and at the largest size.

    So a client is compared with one of the same micro-batch size: more memory is no claim of speed.
    The medians are of logarithms: of two clients neither is far from the middle, unless they are
    far apart.
    """
    if not len(base):
        return Line(base=0.0, each=UNMEASURED_SECONDS)
    one, many = (
        float(np.exp(np.median(np.log(base + size * each)))) for size in (1, max(largest, 2))
    )
    per_example = max((many - one) / (max(largest, 2) - 1), MIN_SECONDS_PER_EXAMPLE)
    return Line(base=max(one - per_example, 0.0), each=per_example)
