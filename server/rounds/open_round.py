"""A round in progress: checks each update against its client's plan, then adds it or refuses it.

Updates that will be masked only announce that they are ready; the secure session adds them up.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from headwater.common.errors import (
    BranchRefused,
    CorruptUpdate,
    CountOutOfRange,
    HeadwaterError,
    NothingWeighed,
    OutlierUpdate,
    UnexpectedUpdate,
    UpdateRefused,
)
from headwater.common.estimates.gradient_noise import NoiseSums, noise_sums
from headwater.common.messages import Plan, ReadyReport, Update, UpdateReport
from headwater.common.sums.encoded_vector import Vector, whole
from headwater.common.terms import Terms
from headwater.common.wording import counted
from headwater.server.aggregation.believed_figures import believed_noise
from headwater.server.aggregation.cohort_sum import LARGEST_VALUE, CohortSum
from headwater.server.aggregation.norm_watch import MIN_UPDATES, norm_per_weight, scaled_to
from headwater.server.aggregation.round_reports import AcceptedReports, ReportColumns, in_all
from headwater.server.fleet import (
    PLAIN_RULES,
    Answer,
    BranchSum,
    Dropout,
    UpdateBlock,
    UpdateRules,
)
from headwater.server.planning.cohort import dataset_weights
from headwater.server.planning.plan_table import PlanTable
from headwater.server.rounds.admission import admitted

if TYPE_CHECKING:
    from headwater.server.aggregation.extra_sums import ExtraSums

log = logging.getLogger(__name__)

NORM_ROUNDING = 1e-5  # relative, of a norm that another machine has summed


class Holder(Protocol):
    """Holds updates one by one, for a rule that needs every single vector."""

    def hold(self, values_P: Tensor, weight: int) -> None:
        """Hold a checked update, in memory of the holder's own."""

    def held_mean(self, total: CohortSum) -> tuple[Tensor, int]:
        """Return the mean gradient [P] of what is held, and its weight.

        ``total`` is the round's sum, open and empty; a holder may add to it and close it.

        Raises:
            TooFewClients: more updates are needed.
        """


class OpenRound:
    """A round in progress: the updates that were accepted and refused so far."""

    def __init__(
        self,
        *,
        plans: Mapping[str, Plan],
        total: CohortSum,
        rules: UpdateRules = PLAIN_RULES,
        owned: Mapping[str, int],
        num_left_out: int = 0,
        metrics: tuple[str, ...] = (),
        held: Holder | None = None,
        releases_reports: bool = True,
        times_of: Callable[[Plan, int], int] | None = None,
        extra: ExtraSums | None = None,
    ) -> None:
        """Take the plans, the empty sum, and the number of examples that each client owns.

        ``metrics`` are the names that a secure session of the round masks. With ``held``, updates
        are held one by one for a robust rule rather than added to the sum. Without
        ``releases_reports`` the updates' reports are the plans' own numbers. ``times_of`` says how
        many times an update of this plan and so many windows counts; None: once. ``extra`` adds up
        the sums beside the model's; None if there are none.
        """
        self.metrics = metrics
        self.extra = extra
        self.plans = plans
        self._table: tuple[Mapping[str, Plan], PlanTable] | None = None
        self._limits = np.zeros((0, 3), dtype=np.int64)
        """Of each plan of the table: the round, the most examples, and a set weight or 0."""
        self.num_left_out = num_left_out
        self.accepted = AcceptedReports()
        self.ready: dict[str, ReadyReport] = {}
        self.refused: dict[str, HeadwaterError] = {}
        self.refusals: Counter[str] = Counter()
        """How many answers the round itself refused, by error code."""
        self.norms: dict[str, float] = {}
        """The norm per unit of weight of each single update that arrived, also if refused."""
        self._told_norms: dict[str, float] = {}
        """Those of them that an aggregator has told."""
        self.outliers: list[str] = []
        """The clients whose updates were beyond the norm's limit."""
        self.clip_bits: list[int] = []
        """The accepted updates' bits on the clip norm; none if it does not follow them."""
        self._batch_norms: list[Sequence[float] | None] = []
        """Of each batch that arrived as one sum."""
        self._unused: list[Sequence[int]] = []
        """The tensors that each update's losses did not use, or those of each batch."""
        self._total = total
        self._rules = rules
        self._max_weight = rules.max_weight_per_example
        self._owned = owned
        self.held = held
        self.releases_reports = releases_reports
        self._times_of = times_of

    def times(self, plan: Plan, num_windows: int = 1) -> int:
        """Return how many times an update of so many windows of this plan counts."""
        return 1 if self._times_of is None else self._times_of(plan, num_windows)

    @property
    def table(self) -> PlanTable:
        """The plans in columns."""
        if self._table is None or self._table[0] is not self.plans:
            self._table = self.plans, PlanTable.of(self.plans)
            plans = self._table[1]
            weights = np.where(
                plans.of_each(_has_planned_weight), plans.quota * self._max_weight, 0
            )
            weights = np.where(plans.weigh_as > 0, plans.weigh_as, weights)
            self._limits = np.stack([plans.round, plans.max_examples, weights], axis=1)
        return self._table[1]

    @property
    def most_weights(self) -> dict[str, int]:
        """The largest weight that each client's examples can have together."""
        owned = dataset_weights(self._owned)
        return {name: number * self._max_weight for name, number in owned.items()}

    @property
    def has_one_model(self) -> bool:
        """Whether all updates were computed at the same model, as in a synchronous round."""
        return self._times_of is None

    @property
    def weight(self) -> int:
        """The weight of all accepted updates, each counted once."""
        return sum(int(part.sent_weight.sum()) for part in self.columns)

    @property
    def unused(self) -> tuple[int, ...]:
        """The places of the trained tensors that no accepted update's loss used."""
        return in_all(self._unused)

    @property
    def columns(self) -> Sequence[ReportColumns]:
        """The accepted reports as columns: of the single updates together, and of each batch."""
        single = self.accepted.single
        first = [ReportColumns.of(*single)] if single else []
        return first + [block.columns for block in self.accepted.blocks]

    @property
    def noise(self) -> Sequence[NoiseSums]:
        """The accepted updates' parts of the round's noise sums."""
        owned = self._owned
        accepted = self.accepted
        single = [noise_sums(report, num_owned=owned[report.name]) for report in accepted.single]
        blocks = (block.noise(owned) for block in accepted.blocks)
        return [*believed_noise(single), *chain.from_iterable(blocks)]

    @property
    def all_norms(self) -> Sequence[float] | None:
        """The norms of all updates that arrived; None if those of a batch are unknown.

        What an aggregator tells counts where too few are measured here: it could have any majority.
        """
        known = [norms for norms in self._batch_norms if norms is not None]
        if len(known) < len(self._batch_norms):
            return None
        measured = [norm for name, norm in self.norms.items() if name not in self._told_norms]
        single = measured if len(measured) >= MIN_UPDATES else self.norms.values()
        return [*single, *chain.from_iterable(known)]

    def refuse(self, name: str, error: HeadwaterError) -> None:
        """Record why a client is not in the round."""
        self.refused[name] = error

    def refuse_answer(self, name: str, error: UpdateRefused) -> None:
        """Record that a client's answer was refused; it is counted and logged."""
        self._refuse_updates([name], error)

    def take(self, answer: Answer) -> None:
        """Check an answer; add it to the sum, or record why not.

        The sum of several updates counts whole or not at all, and so do their reports.
        """
        match answer:
            case Dropout():
                self.refuse(answer.name, answer.error)
            case ReadyReport():
                self._take_ready(answer)
            case Update():
                self._take_update(answer)
            case UpdateBlock():
                self._take_block(answer)
            case BranchSum():
                self._take_branch(answer)

    def _take_update(self, update: Update) -> None:
        """Check and add one update; its report becomes part of columns after the last update."""
        report = update.report
        try:
            plan = self._check_awaited(report.name, report.round, self.accepted)
            self._check_counts(
                *(report.name, plan, report.num_examples, report.weight, report.num_steps),
                report.num_windows,
            )
            values_P = admitted(update, plan)
            if plan.asks_model:
                self._add(report.name, plan, values_P, report.weight, report.num_windows)
            if self.extra is not None:
                times = self.times(plan, report.num_windows)
                self.extra.add(update.sums, weight=report.weight, times=times)
        except UpdateRefused as error:
            self._refuse_updates([report.name], error)
            return
        self.accepted.add(report)
        self._unused.append(report.unused)
        if report.clip_bit is not None:
            self.clip_bits.append(report.clip_bit)

    def _take_block(self, block: UpdateBlock) -> None:
        """Check the reports of a block, then check and add its sum, or each of its vectors."""
        reports, columns = block.reports, block.reports.columns
        try:
            self._check_columns(columns)
            taken = self._add_sum(block) if reports.are_summed else self._add_each(block)
        except UpdateRefused as error:
            self._refuse_updates(columns.names, error)
            return
        self._unused.append(reports.unused)
        if len(taken) == len(columns.names):
            self.accepted.add_block(reports)
        else:
            self.accepted.add(*(reports[at] for at in taken))

    def _add_sum(self, block: UpdateBlock) -> Sequence[int]:
        """Check and add the sum of a block's vectors; return the rows that are in it: all.

        Raises:
            UpdateRefused: it is not of this model, or not finite.
        """
        columns, (values_P,) = block.reports.columns, block.vectors
        peaks = self._total.check(values_P, name=counted(len(columns.names), "device"))
        self._total.fold(values_P, int(columns.sent_weight.sum()), peaks)
        self._batch_norms.append(block.reports.norms_per_weight)
        return range(len(columns.names))

    def _add_each(self, block: UpdateBlock) -> Sequence[int]:
        """Check and add each vector of a block, or refuse it; return the rows that were added."""
        columns, taken = block.reports.columns, list[int]()
        rows = zip(columns.names, columns.sent_weight.tolist(), block.vectors, strict=True)
        for at, (name, weight, values_P) in enumerate(rows):
            try:
                self._add(name, self.plans[name], values_P, weight)
                taken.append(at)
            except UpdateRefused as error:
                self._refuse_updates([name], error)
        return taken

    def _add(
        self, name: str, plan: Plan, values_P: Vector, weight: int, num_windows: int = 1
    ) -> None:
        """Check one update's vector and add it.

        Raises:
            UpdateRefused: it is not of this model, not finite, or beyond the norm's limit.
        """
        peaks = self._total.check(values_P, name=name)
        within_P = self._within_norm(name, values_P, weight)
        if self.held is not None and not weight:
            raise NothingWeighed(f"{name}: a robust rule compares means, and its weight is 0")
        if self.held is not None:
            self.held.hold(whole(within_P), weight)
        else:
            known = peaks if within_P is values_P else None
            self._total.fold(within_P, weight, known, times=self.times(plan, num_windows))

    def _within_norm(self, name: str, values_P: Vector, weight: int) -> Vector:
        """Return an update's vector, or a copy that is scaled down to the norm's limit.

        Raises:
            OutlierUpdate: its norm is beyond the limit, and such updates are refused; or no limit
                is known to which it could be scaled.
        """
        watch, beyond = self._rules.norm_watch, self._rules.beyond_norm
        if watch is None:
            return values_P
        limit = watch.limit
        norm = self.norms[name] = norm_per_weight(values_P, weight)
        if norm <= limit:
            return values_P
        self.outliers.append(name)
        found = f"{name}: its norm per unit of weight is {norm:.3g}, expected up to {limit:.3g}"
        is_known = watch.largest_median is not None
        if beyond == "refuse" or (beyond == "clip" and not is_known):
            raise OutlierUpdate(found)
        log.warning("%s; it is %s", found, "clipped" if beyond == "clip" else "kept")
        if beyond != "clip":
            return values_P
        return scaled_to(whole(values_P), norm=norm, limit=limit)

    def _take_branch(self, branch: BranchSum) -> None:
        """Add an aggregator's sum; what it says of its devices is checked as if they said it.

        That each update is what its device sent, and within the norm's limit, is the aggregator's
        word: a branch is trusted as a server is.
        """
        for name, error in branch.refused.items():
            self.refuse(name, error)
        self.refusals.update(branch.refusals)
        if not branch.reports:
            return
        columns = ReportColumns.of(*branch.reports)
        try:
            self._check_columns(columns)
            for report in branch.reports:  # columns are of one round, and say nothing of windows
                plan = self._check_awaited(report.name, report.round, self.accepted)
                self._check_counts(
                    *(report.name, plan, report.num_examples, report.weight, report.num_steps),
                    report.num_windows,
                )
            limits, is_norm = self._limits_of_branch(branch)
            self._total.check_part(branch.total, name=branch.name, limits=limits)
            if is_norm:
                self._total.check_norm(branch.total, name=branch.name, limits=limits)
            weights = self._weights_of_sums(branch)
            if self.extra is not None:
                self.extra.check_parts(branch.extra, weights, name=branch.name)
        except UpdateRefused as error:
            refused = BranchRefused(f"{error.code}: {error}")
            self._refuse_updates(columns.names, refused)
            return
        if all(self.plans[report.name].asks_model for report in branch.reports):
            self._total.add_part(branch.total, int(columns.sent_weight.sum()))
        if self.extra is not None:
            self.extra.add_parts(branch.extra, weights)
        self.norms |= branch.norms
        self._told_norms |= branch.norms
        self.outliers += branch.outliers
        self.accepted.add(*branch.reports)
        self._unused.append(branch.unused)
        self.clip_bits += branch.clip_bits

    def _limits_of_branch(self, branch: BranchSum) -> tuple[Sequence[float], bool]:
        """Return the largest norm of each of a branch's updates, and whether one is known.

        By the terms of a private plan; else as the aggregator tells it, up to the norm's limit.

        Raises:
            CorruptUpdate: a norm is missing, or beyond the limit.
        """
        watch, beyond = self._rules.norm_watch, self._rules.beyond_norm
        limits, is_norm = list[float](), True
        for report in branch.reports:
            plan = self.plans[report.name]
            bound = plan.vector_bound
            if bound is None and watch is not None and plan.asks_model:
                norm = branch.norms.get(report.name, math.inf)
                if beyond == "clip":
                    norm = min(norm, watch.limit)
                if norm > watch.limit and beyond == "refuse":
                    raise CorruptUpdate(
                        f"{branch.name}: it counts {report.name} with a norm of {norm:.3g} per "
                        f"unit of weight, expected up to {watch.limit:.3g}"
                    )
                bound = norm * max(report.weight, 1) * (1 + NORM_ROUNDING)
            is_norm &= bound is not None
            limits.append(min(LARGEST_VALUE if bound is None else bound, LARGEST_VALUE))
        return limits, is_norm

    def _weights_of_sums(self, branch: BranchSum) -> dict[str, list[int]]:
        """Return the weights of the updates that bring each sum beside the model's."""
        found: dict[str, list[int]] = {}
        for report in branch.reports:
            if (plan := self.plans[report.name]).terms:
                for key in plan.extra_sums(len(branch.total.integers_P)).of:
                    found.setdefault(key, []).append(report.weight)
        return found

    def branch_sum(self, name: str) -> BranchSum:
        """Return this round as the answer of the aggregator that ran it."""
        total = self._total.part()
        return BranchSum(
            name=name,
            total=total,
            extra={} if self.extra is None else self.extra.parts(),
            reports=tuple(chain(self.accepted.single, *self.accepted.blocks)),
            unused=[at for at in self.unused if at < len(total.peaks)],
            norms=self.norms,
            outliers=self.outliers,
            clip_bits=self.clip_bits,
            refused=self.refused,
            refusals=self.refusals,
        )

    def _refuse_updates(self, names: Sequence[str], error: UpdateRefused) -> None:
        self._count(error)
        for name in names:
            # Keep the update that was accepted before, and the refusal of this one.
            self.refused[f"{name} (again)" if name in self.accepted else name] = error

    def _take_ready(self, ready: ReadyReport) -> None:
        try:
            self._check_awaited(ready.name, ready.round, self.ready)
        except UpdateRefused as error:
            self._count(error)
            self.refuse(ready.name, error)
            return
        self.ready[ready.name] = ready

    def _count(self, error: UpdateRefused) -> None:
        log.warning("%s: %s", error.code, error)
        self.refusals[error.code] += 1

    def _check_awaited(
        self, name: str, round_number: int, taken: Mapping[str, UpdateReport | ReadyReport]
    ) -> Plan:
        """Return the plan that an answer belongs to.

        Raises:
            UnexpectedUpdate: the client has no plan, has answered already, or answers another
                round's plan.
        """
        plan = self.plans.get(name)
        if plan is None or name in taken:
            raise UnexpectedUpdate(f"{name}: no update of it is awaited")
        if round_number != plan.round:
            raise UnexpectedUpdate(
                f"{name}: an update for round {round_number} in round {plan.round}"
            )
        return plan

    def _check_columns(self, columns: ReportColumns) -> None:
        """Check a batch's reports against their plans.

        Raises:
            UnexpectedUpdate: see ``_check_awaited``; or a client is in the batch twice.
            CountOutOfRange: see ``_check_counts``.
        """
        names, different, plans = columns.names, set(columns.names), self.table
        if not (plans.rows.keys() >= different and self.accepted.has_none(different)):
            for name in names:
                self._check_awaited(name, columns.round, self.accepted)
        if len(different) < len(names):
            raise UnexpectedUpdate(f"a client is twice in a batch of {len(names)} updates")
        rounds, most, planned = self._limits[plans.at(names)].T
        num_examples, sent = columns.num_examples, columns.sent_weight
        is_right = (rounds == columns.round) & (num_examples > 0) & (num_examples <= most)
        is_right &= np.where(
            planned > 0, sent == planned, (sent >= 0) & (sent <= num_examples * self._max_weight)
        )
        is_right &= columns.num_steps <= most + 1
        for row in np.flatnonzero(~is_right).tolist():  # this one says what is wrong with it
            plan = self._check_awaited(names[row], columns.round, self.accepted)
            counts = (num_examples[row], sent[row], columns.num_steps[row])
            self._check_counts(names[row], plan, *map(int, counts))

    def _check_counts(
        self,
        name: str,
        plan: Plan,
        num_examples: int,
        weight: int,
        num_steps: int,
        num_windows: int = 1,
    ) -> None:
        """Check the counts of an update against its plan.

        Raises:
            CountOutOfRange: more examples or weight than a plan can lead to, or none; with dataset
                weighting any weight other than the plan's.
        """
        fault = self._fault(plan, num_examples, weight, num_steps, num_windows)
        if fault is not None:
            raise CountOutOfRange(f"{name}: {fault}")

    def _fault(
        self, plan: Plan, num_examples: int, weight: int, num_steps: int, num_windows: int
    ) -> str | None:
        """Return what is wrong with the counts of an update; None if nothing is."""
        if num_windows > plan.max_windows:
            return f"{num_windows} windows, its plan allows {plan.max_windows}"
        most = num_windows * plan.max_examples
        if not 0 < num_examples <= most:
            return f"{counted(num_examples, 'example')}, its plan allows {most:,}"
        if plan.weigh_as is not None:
            if weight != plan.weigh_as:
                return f"weight {weight}, its plan says {plan.weigh_as}"
        elif plan.has_planned_weight and weight != plan.quota * self._max_weight:
            return f"weight {weight}, its plan says {plan.quota * self._max_weight}"
        elif not 0 <= weight <= num_examples * self._max_weight:
            examples = counted(num_examples, "example")
            return f"weight {weight} for {examples} of at most {self._max_weight} each"
        if num_steps > num_windows * (plan.max_examples + 1):
            return f"{num_steps} steps for {counted(most, 'example')}"
        return None


def _has_planned_weight(terms: Mapping[str, Terms]) -> bool:
    return any(one.has_planned_weight for one in terms.values())
