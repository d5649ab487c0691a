"""A round in progress: each answer is held against its plan, then folded, or counted as refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from common.errors import CountOutOfRange, HeadwaterError, UnexpectedUpdate, UpdateRefused
from common.update import Plan, Update, UpdateReport
from server.aggregate import CohortSum
from server.fleet import Dropout

log = logging.getLogger(__name__)


class OpenRound:
    """A round in progress: which updates were accepted, which refused."""

    def __init__(
        self,
        *,
        plans: Mapping[str, Plan],
        total: CohortSum,
        max_weight_per_example: int,
        num_left_out: int = 0,
    ) -> None:
        self.plans = plans
        self.num_left_out = num_left_out
        self.accepted: dict[str, UpdateReport] = {}
        self.refused: dict[str, HeadwaterError] = {}
        self._total = total
        self._max_weight = max_weight_per_example

    def take(self, answer: Update | Dropout) -> None:
        """Check an answer and fold it, or count why not."""
        if isinstance(answer, Dropout):
            self.refused[answer.name] = answer.error
            return
        report = answer.report
        try:
            self._check(report)
            self._total.check(answer.values_P, name=report.name)
        except UpdateRefused as error:
            log.warning("%s: %s", error.code, error)
            again = " (again)" if report.name in self.accepted else ""
            self.refused[report.name + again] = error
            return
        self._total.fold(answer.values_P, report.weight)
        self.accepted[report.name] = report

    def _check(self, report: UpdateReport) -> None:
        """Hold a report against its plan.

        Raises:
            UnexpectedUpdate: nobody asked for it, or it is here already.
            CountOutOfRange: more examples or weight than the plan can lead to, or none; with
                dataset weighting any other weight than the plan's.
        """
        plan = self.plans.get(report.name)
        if plan is None or report.name in self.accepted:
            raise UnexpectedUpdate(f"{report.name}: no update of it is awaited")
        if report.round != plan.round:
            raise UnexpectedUpdate(
                f"{report.name}: an update for round {report.round} in round {plan.round}"
            )
        if not 0 < report.num_examples <= plan.quota:
            raise CountOutOfRange(
                f"{report.name}: {report.num_examples} examples, its quota was {plan.quota}"
            )
        if plan.weigh_as is not None:
            if report.weight != plan.weigh_as:
                raise CountOutOfRange(
                    f"{report.name}: weight {report.weight}, its plan says {plan.weigh_as}"
                )
        elif not 0 < report.weight <= report.num_examples * self._max_weight:
            raise CountOutOfRange(
                f"{report.name}: weight {report.weight} for {report.num_examples} examples of at "
                f"most {self._max_weight} each"
            )
        if len(report.steps) > plan.quota + 1:
            raise CountOutOfRange(
                f"{report.name}: {len(report.steps)} steps for {plan.quota} examples"
            )
