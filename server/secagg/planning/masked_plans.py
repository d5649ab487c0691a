"""Plans whose updates are masked: how large each may be, and when it is answered."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from headwater.common.compression.planned_bytes import upload_bytes
from headwater.common.messages import DescribeRequest, DeviceReport
from headwater.common.secagg.terms import MaskingTerms
from headwater.common.task import task_code
from headwater.common.wording import counted
from headwater.server.planning.features import DraftPlans, PlanningFeature, Weights
from headwater.server.planning.planner import Assigned
from headwater.server.secagg.planning.answer_times import answer_times
from headwater.server.secagg.planning.share_limit import limited_quotas, limited_weights

log = logging.getLogger(__name__)


class MaskedPlans(PlanningFeature):
    """Limits the quotas to what devices mask, and says when the plans are answered."""

    _has_logged = False
    """Whether the log says that masked quotas are cut."""

    def describe(self, request: DescribeRequest) -> DescribeRequest:
        """Ask for the speed, also where K is set: when a plan is answered follows from it.

        A device with another task than the run's refuses.
        """
        return request.model_copy(update={"wants_speed": True, "task": self._task})

    @cached_property
    def _task(self) -> str | None:
        spec = self.settings.task
        return None if spec is None else task_code(spec)

    def metrics(self, reports: Sequence[DeviceReport]) -> tuple[str, ...]:
        return _common_metrics(reports)

    def limit(
        self, assigned: Assigned, weights: Weights, *, round_number: int
    ) -> tuple[Assigned, Weights]:
        secure = self.settings.secure
        limited = limited_quotas(
            assigned.quota,
            max_share=secure.max_share,
            min_quota=max(secure.min_quota, self.settings.local.num_steps),  # one for each
            min_survivors=secure.min_survivors,
        )
        self._log_share(round_number, int(assigned.quota.sum()), int(limited.sum()))
        weights = limited_weights(
            weights, max_share=secure.max_share, min_survivors=secure.min_survivors
        )
        return replace(assigned, quota=limited), weights

    def write(self, drafts: DraftPlans) -> None:
        assigned, factor = drafts.assigned, self.settings.secure.answer_factor
        times = answer_times(assigned, drafts.micro_batch_size, factor=factor)
        drafts.ask_each(
            [MaskingTerms(num_invited=len(assigned), answer_seconds=seconds) for seconds in times]
        )

    def transfer_bytes(self, down: int, up: int, *, num_values: int) -> tuple[int, int]:
        return down, upload_bytes(self.settings, self.layout)

    def to_measure(self, quotas: Mapping[str, int]) -> Collection[str]:
        """Return the clients with less than half of an even share of the examples."""
        even = sum(quotas.values()) / len(quotas)
        return [name for name, quota in quotas.items() if quota < even / 2]

    def _log_share(self, round_number: int, planned: int, left: int) -> None:
        """Log, once in a run, that masked quotas are cut to what the clients accept."""
        secure = self.settings.secure
        if self._has_logged or left >= planned:
            return
        self._has_logged = True
        log.warning(
            "round %d: %s are planned instead of %s: under masks a client accepts no more than %g "
            "of the sum as its own (secure.max_share), and these clients differ too much in speed; "
            "more clients, or a larger secure.max_share on server and clients, allow more",
            round_number,
            counted(left, "example"),
            f"{planned:,}",
            secure.max_share,
        )


def _common_metrics(reports: Sequence[DeviceReport]) -> tuple[str, ...]:
    """Return the names of metrics that most devices told; all members mask the same numbers."""
    kinds = [report.metrics for report in reports]
    return max(sorted(set(kinds)), key=kinds.count, default=())
