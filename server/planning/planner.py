"""The planner: each client's micro-batch follows from its memory, its quota from its speed.

The micro-batch is the largest that fits in the client's memory with a margin, up to the size beyond
which the client measured no gain. Quotas are by equal finish (``server.planning.equal_finish``), so
that no client waits for a slower one. K = ceil(quota / micro-batch size). All functions are pure,
and each assignment records what bound it (``server.planning.plan_reasons``).

Clients may make false claims. A speed is believed up to MAX_SPEED_RATIO times that of the cohort's
median client with the same micro-batch; the cut is counted and reported. A lying client can still:

* be assigned as much as MAX_SPEED_RATIO median clients with the memory that it claims, and send
  nothing or a false sum. The other quotas shrink, but never to zero.
* be assigned a single example, by claiming a century for each, or little memory. That costs the
  other clients nothing but its turn at the server.
* be assigned an equal share of the target, by claiming a slow link.
* keep a round without a deadline waiting, as any client can that does not answer.
* move the median, if half of the cohort lies in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.common.estimates.linear_fit import Line
from headwater.common.estimates.training_speed import MIN_SECONDS_PER_EXAMPLE
from headwater.common.messages import MAX_STEPS
from headwater.common.settings import schema as settings
from headwater.server.planning.device_estimates import (
    DEADLINE_SHARE,
    DeviceEstimate,
    EstimateColumns,
)
from headwater.server.planning.equal_finish import (
    CohortColumns,
    equal_finish,
    round_end,
    share_wait,
)
from headwater.server.planning.memory_limit import SIZE_BOUNDS, SizeBound, micro_batch_sizes
from headwater.server.planning.vitals_columns import Floats, Ints, VitalsColumns

if TYPE_CHECKING:
    from headwater.server.planning.target_batch import Demand

# A fleet of Pi Zeros and laptops is sixteen times apart; a client that is farther than this from
# the median more likely has a clock that jumped, or lies.
MAX_SPEED_RATIO = 32.0
UNMEASURED_SECONDS = 1e-3
MAX_TRANSFER_SECONDS = 1e9
# A speed that is measured in less time is mostly the scheduler's noise: it should end no window.
MIN_FINISH_SECONDS = 1.0
MAX_FINISH_SECONDS = 30 * 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferCosts:
    """The bytes that a round moves for each client, and the server's seconds for each update."""

    image_bytes: int = 0
    update_bytes: int = 0
    turn_seconds: float = 0.0
    """The server's seconds to check and add one update; it takes one update after another."""
    round_seconds: float = 0.0
    """What the last round's training took by the server's clock; 0 if it is unknown."""

    def transfer_seconds(self, vitals: VitalsColumns) -> Floats:
        """Return the seconds of each client's download and upload; 0 where its link is unknown."""
        rates = vitals.download_bytes_per_second, vitals.upload_bytes_per_second
        down, up = (np.where(rate > 0, rate, np.inf) for rate in rates)
        with np.errstate(over="ignore"):
            seconds: Floats = self.image_bytes / down + self.update_bytes / up
        return np.minimum(seconds, MAX_TRANSFER_SECONDS)


class Assignment(NamedTuple):
    """What the planner assigns to a client, and what bound it: a row of ``Assigned``."""

    known: EstimateColumns
    row: int
    """The client's row of what is known."""
    quota: int
    max_micro_batch_size: int
    """The largest micro-batch allowed; the quota may be smaller."""
    size_bound: SizeBound
    exception: str | None = None
    """Why the client is invited for one example although it is too slow; None if it is not."""
    accumulation_steps: int | None = None
    """K, where the operator has set it."""
    speed_cut: float = 1.0
    """The claimed speed over the believed one, at least 1."""
    ahead: float = 0.0
    """The part of the round by which the client's turn is before the end."""
    transfers: float = 0.0
    """The part of the round that its download and upload take; 1 or more: all of it."""

    @property
    def micro_batch_size(self) -> int:
        """The size in use: K = 1 where the quota fits in one micro-batch."""
        return min(self.max_micro_batch_size, self.quota)

    @property
    def num_examples(self) -> int:
        """The examples that the client owns."""
        return int(self.known.num_examples[self.row])

    @property
    def estimate(self) -> DeviceEstimate:
        """All that is known of the client."""
        return self.known.estimate(self.row)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Assigned(Mapping[str, Assignment]):
    """What is assigned to the clients of a round, in columns of n; by name, a client's row."""

    rows: Mapping[str, int]
    """The clients' rows, by name and in order."""
    known: EstimateColumns
    exceptions: Mapping[str, str]
    """Why a client is invited for one example although it is too slow, by name."""
    accumulation_steps: int | None
    """K, where the operator has set it; the speeds then bound nothing."""
    quota: Ints
    max_micro_batch_size: Ints
    size_bound: Ints
    """Indices of SIZE_BOUNDS."""
    speed_cut: Floats
    ahead: Floats
    transfers: Floats
    free_seconds: Floats
    """Seconds until T, less the client's transfers and its turn."""

    @property
    def micro_batch_size(self) -> Ints:
        """The sizes in use: K = 1 where the quota fits in one micro-batch."""
        return np.minimum(self.max_micro_batch_size, self.quota)

    @property
    def time_share(self) -> Floats:
        """The share of each client's time that the quota counts on; NaN where K is set."""
        if self.accumulation_steps is not None:
            return np.full(len(self), np.nan)
        return self.known.time_share

    def predicted_seconds(self, sizes: Ints) -> Floats:
        """Return how long each trains on its quota, in such micro-batches; NaN of unknown speed."""
        num_micro_batches = -(-self.quota // sizes)
        known = self.known
        seconds: Floats = (num_micro_batches * known.base + self.quota * known.each) * (
            self.speed_cut
        )
        return seconds

    def finish_seconds(self, sizes: Ints) -> Floats:
        """Return when each client should have trained on its quota, and may stop.

        It is computed from the figures that the quota was planned with, in the share of its time
        that the client gives. At that speed the client ends with exactly its quota, and the
        cohort's sum is the target. A client without more examples than its quota may take until T.
        NaN where K is set, where the speed is unknown, where the client is expected to be late,
        and where the time is too short to measure a speed in.
        """
        if self.accumulation_steps is not None:
            return np.full(len(self), np.nan)
        seconds = self.predicted_seconds(sizes)
        most = np.minimum(self.known.num_examples, MAX_STEPS * self.max_micro_batch_size)
        until_end = np.maximum(seconds, self.time_share * self.free_seconds)
        seconds = np.where(self.quota == most, until_end, seconds)
        is_measurable = (seconds >= MIN_FINISH_SECONDS) & (seconds <= MAX_FINISH_SECONDS)
        is_measurable[[self.rows[name] for name in self.exceptions]] = False
        return np.where(is_measurable, seconds, np.nan)

    def some(self, names: Sequence[str]) -> Assigned:
        """Return what is assigned to these clients."""
        at = np.array([self.rows[name] for name in names], dtype=np.int64)
        columns = {name: getattr(self, name)[at] for name in _ASSIGNED}
        return replace(
            self,
            rows={name: row for row, name in enumerate(names)},
            known=self.known.some(at),
            exceptions={name: self.exceptions[name] for name in names if name in self.exceptions},
            **columns,
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Assignment:
        at = self.rows[name]
        return Assignment(
            known=self.known,
            row=at,
            quota=int(self.quota[at]),
            max_micro_batch_size=int(self.max_micro_batch_size[at]),
            size_bound=SIZE_BOUNDS[self.size_bound[at]],
            exception=self.exceptions.get(name),
            accumulation_steps=self.accumulation_steps,
            speed_cut=float(self.speed_cut[at]),
            ahead=float(self.ahead[at]),
            transfers=float(self.transfers[at]),
        )


_ASSIGNED = (
    *("quota", "max_micro_batch_size", "size_bound"),
    *("speed_cut", "ahead", "transfers", "free_seconds"),
)


NO_COSTS = TransferCosts()


def assign(
    names: Sequence[str],
    known: EstimateColumns,
    exceptions: Mapping[str, str],
    chosen: settings.PlanSettings,
    *,
    target: int,
    deadline_seconds: float | None = None,
    costs: TransferCosts = NO_COSTS,
    demand: Demand | None = None,
) -> Assigned:
    """Assign a quota of at least one example and a micro-batch size to every client, by name.

    ``exceptions`` says why a client is invited for one example although it is too slow.

    With ``accumulation_steps`` set, each gets K micro-batches of the same size, or all examples
    that it owns if these are fewer. Otherwise quotas are by equal finish, and their sum is
    ``target`` examples if the clients' bounds and the deadline allow it; no client gets more than
    it owns, or more than ``demand`` allows.
    """
    rows = {name: row for row, name in enumerate(names)}
    exceptions = {name: why for name, why in exceptions.items() if name in rows}
    steps = chosen.accumulation_steps
    sizes, bounds = micro_batch_sizes(known, chosen, demand)
    if steps is not None or not names:
        nothing = np.zeros(len(names))
        quotas = _set_quotas((steps or 1) * sizes, known, demand)
        speed_cuts, ahead, transfers, free = nothing + 1.0, nothing, nothing, nothing
    else:
        is_exception = np.zeros(len(names), dtype=np.bool_)
        is_exception[[rows[name] for name in exceptions]] = True
        cohort, speed_cuts = _cohort_columns(
            *(known, sizes, is_exception, costs.transfer_seconds(known.vitals)),
            deadline_seconds,
            costs.turn_seconds,
            most=_most(known, sizes, demand),
        )
        quotas, ahead, transfers, free = _equal_quotas(
            *(cohort, target, deadline_seconds),
            least_share=chosen.least_share,
            round_seconds=costs.round_seconds,
        )
    return Assigned(
        rows=rows,
        known=known,
        exceptions=exceptions,
        accumulation_steps=steps,
        quota=quotas,
        max_micro_batch_size=sizes,
        size_bound=bounds,
        speed_cut=speed_cuts,
        ahead=ahead,
        transfers=transfers,
        free_seconds=free,
    )


def _set_quotas(each: Ints, known: EstimateColumns, demand: Demand | None) -> Ints:
    """Return the quotas where K is set, to ``each`` examples."""
    if demand is None:
        return np.minimum(each, known.num_examples)
    return demand.set_quotas(each, known.num_examples)


def _most(known: EstimateColumns, sizes: Ints, demand: Demand | None) -> Ints:
    """Return the most examples of each client; a report lists MAX_STEPS micro-batches at most."""
    if demand is None:
        return np.minimum(known.num_examples, MAX_STEPS * sizes)
    per_step = -(-demand.step_examples // sizes)
    return np.minimum(
        demand.most(known.num_examples), MAX_STEPS * demand.step_examples // per_step
    ).astype(np.int64)


def _equal_quotas(
    cohort: CohortColumns,
    target: int,
    deadline_seconds: float | None,
    *,
    least_share: float,
    round_seconds: float,
) -> tuple[Ints, Floats, Floats, Floats]:
    """Return the quotas by equal finish, and the last three columns of the assignments."""
    given = None if deadline_seconds is None else deadline_seconds * DEADLINE_SHARE
    quotas, finish_seconds = equal_finish(cohort, target=target, finish_seconds=given)
    shared = share_wait(
        cohort,
        quotas,
        least_share=least_share,
        finish_seconds=given,
        round_seconds=round_seconds,
    )
    if shared is not quotas:
        quotas, finish_seconds = shared, max(finish_seconds, round_end(cohort, shared))
    ahead = cohort.ahead(cohort.turns(), finish_seconds)
    free = finish_seconds - ahead - cohort.fixed
    return quotas, ahead / finish_seconds, cohort.fixed / finish_seconds, free


def _cohort_columns(
    known: EstimateColumns,
    sizes: Ints,
    is_exception: NDArray[np.bool_],
    transfer_seconds: Floats,
    deadline_seconds: float | None,
    turn_seconds: float,
    *,
    most: Ints,
) -> tuple[CohortColumns, Floats]:
    """Return the cohort's columns, and the claimed speed over the believed one of each client."""
    share = known.time_share
    base, each = known.base / share, known.each / share
    is_measured = ~np.isnan(base)
    # Clients that are invited as an exception claim to be slow: their claims cannot raise a quota.
    is_regular = is_measured & ~is_exception
    median = _median_line(base[is_regular], each[is_regular], largest=int(sizes.max()))
    base[~is_measured], each[~is_measured] = median.base, median.each
    believed = (median.base + sizes * median.each) / MAX_SPEED_RATIO
    speed_cuts = np.where(is_regular, np.maximum(believed / (base + sizes * each), 1.0), 1.0)
    cohort = CohortColumns(
        size=sizes,
        base=base * speed_cuts,
        each=each * speed_cuts,
        fixed=transfer_seconds,
        most=np.where(is_exception, 1, most),
        longest=(math.inf if deadline_seconds is None else deadline_seconds) * known.deadline_share,
        turn_seconds=turn_seconds,
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
