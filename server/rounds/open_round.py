"""A round in progress: each answer is held against its plan, then folded, or counted as refused.

An update that is to be masked is only said to be ready; the secure session adds it up.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from headwater.common.errors import CountOutOfRange, HeadwaterError, UnexpectedUpdate, UpdateRefused
from headwater.common.messages import Plan, ReadyReport, ReportFields, Update
from headwater.common.stats.gradient_noise import NoiseSums, sums_of
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.aggregation.round_sum import ReportColumns
from headwater.server.fleet import Dropout, UpdateOfMany

log = logging.getLogger(__name__)


class OpenRound:
    """A round in progress: which updates were accepted, which refused."""

    def __init__(
        self,
        *,
        plans: Mapping[str, Plan],
        total: CohortSum,
        max_weight_per_example: int,
        owned: Mapping[str, int],
        num_left_out: int = 0,
    ) -> None:
        """Take the plans, the empty sum, and how many examples each device owns."""
        self.plans = plans
        self.num_left_out = num_left_out
        self.accepted: dict[str, ReportFields] = {}
        self._columns: list[ReportColumns] = []
        self._noise: list[NoiseSums] = []
        self._not_laid: list[ReportFields] = []
        self.ready: dict[str, ReadyReport] = {}
        self.refused: dict[str, HeadwaterError] = {}
        self.refusals: Counter[str] = Counter()  # what the round itself refused
        self._total = total
        self._max_weight = max_weight_per_example
        self._owned = owned

    @property
    def columns(self) -> Sequence[ReportColumns]:
        """What those who were accepted columns."""
        self._lay_in_columns()
        return self._columns

    @property
    def noise(self) -> Sequence[NoiseSums]:
        """Their parts in the sums over the round's devices."""
        self._lay_in_columns()
        return self._noise

    def _lay_in_columns(self) -> None:
        """Lay what single devices told in columns: all at once, not each between two updates."""
        reports, self._not_laid = self._not_laid, []
        if reports:
            self._columns.append(ReportColumns.of(*reports))
            self._noise += [sums_of(one, num_owned=self._owned[one.name]) for one in reports]

    def refuse(self, name: str, error: HeadwaterError) -> None:
        """Count why a device is not in the round."""
        self.refused[name] = error

    def take(self, answer: Update | UpdateOfMany | ReadyReport | Dropout) -> None:
        """Check an answer and fold it, or count why not."""
        if isinstance(answer, Dropout):
            self.refuse(answer.name, answer.error)
            return
        if isinstance(answer, ReadyReport):
            self._take_ready(answer)
            return
        if isinstance(answer, UpdateOfMany):
            self._take_many(answer)
            return
        report = answer.report
        try:
            self._check(report)
            peaks = self._total.check(answer.values_P, name=report.name)
        except UpdateRefused as error:
            log.warning("%s: %s", error.code, error)
            self.refusals[error.code] += 1
            again = " (again)" if report.name in self.accepted else ""
            self.refused[report.name + again] = error
            return
        self._total.fold(answer.values_P, report.weight, peaks)
        self.accepted[report.name] = report
        self._not_laid.append(report)

    def _take_many(self, answer: UpdateOfMany) -> None:
        """Take a sum of many updates, whole or not at all."""
        columns = answer.reports.columns
        try:
            if not self._fits(columns):
                for report in answer.reports:
                    self._check(report)  # which says what is wrong with whom
            name = f"{len(answer.reports)} devices"
            peaks = self._total.check(answer.values_P, name=name)
        except UpdateRefused as error:
            log.warning("%s: %s", error.code, error)
            self.refusals[error.code] += 1
            for report in answer.reports:
                self.refuse(report.name, error)
            return
        self._total.fold(answer.values_P, sum(columns.sent_weight), peaks)
        self.accepted |= zip(columns.names, answer.reports, strict=True)
        self._columns.append(columns)
        self._noise.append(answer.reports.noise(self._owned))

    def _fits(self, columns: ReportColumns) -> bool:
        """Say whether many devices tell what their plans allow, as ``_check`` has it of one."""
        names = set(columns.names)
        if len(names) < len(columns.names) or not names <= self.plans.keys() - self.accepted.keys():
            return False
        plans = [self.plans[name] for name in columns.names]
        distinct = {id(plan): plan for plan in plans}  # many devices share one
        if any(plan.round != columns.round for plan in distinct.values()):
            return False
        columns = (map(id, plans), columns.num_examples, columns.sent_weight, columns.num_steps)
        return all(
            self._fault(distinct[key], *numbers) is None
            for key, *numbers in set(zip(*columns, strict=True))
        )

    def _take_ready(self, ready: ReadyReport) -> None:
        try:
            self._check_expected(ready, self.ready)
        except UpdateRefused as error:
            log.warning("%s: %s", error.code, error)
            self.refusals[error.code] += 1
            self.refuse(ready.name, error)
            return
        self.ready[ready.name] = ready

    def _check_expected(
        self, told: ReadyReport | ReportFields, there: Mapping[str, ReadyReport | ReportFields]
    ) -> Plan:
        """Return the plan that an answer belongs to.

        Raises:
            UnexpectedUpdate: nobody asked for it, or it is here already.
        """
        plan = self.plans.get(columns.name)
        if plan is None or columns.name in there:
            raise UnexpectedUpdate(f"{columns.name}: no update of it is awaited")
        if columns.round != plan.round:
            raise UnexpectedUpdate(
                f"{columns.name}: an update for round {columns.round} in round {plan.round}"
            )
        return plan

    def _check(self, report: ReportFields) -> None:
        """Hold a report against its plan.

        Raises:
            UnexpectedUpdate: see ``_check_expected``.
            CountOutOfRange: more examples or weight than the plan can lead to, or none; with
                dataset weighting any other weight than the plan's.
        """
        plan = self._check_expected(report, self.accepted)
        fault = self._fault(plan, report.num_examples, report.weight, report.num_steps)
        if fault is not None:
            raise CountOutOfRange(f"{report.name}: {fault}")

    def _fault(self, plan: Plan, num_examples: int, weight: int, num_steps: int) -> str | None:
        """Say what is wrong with the numbers of an update, if anything is."""
        if not 0 < num_examples <= plan.most_examples:
            return f"{num_examples} examples, its plan allows {plan.most_examples}"
        if plan.weigh_as is not None:
            if weight != plan.weigh_as:
                return f"weight {weight}, its plan says {plan.weigh_as}"
        elif not 0 < weight <= num_examples * self._max_weight:
            return f"weight {weight} for {num_examples} examples of at most {self._max_weight} each"
        if num_steps > plan.most_examples + 1:
            return f"{num_steps} steps for {plan.most_examples} examples"
        return None
