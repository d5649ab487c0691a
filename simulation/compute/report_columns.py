"""The reports of updates that were computed together, kept as columns.

Each device's figures are what the device itself would report. They are kept as the passes computed
them; one device's report is a view, because making ten thousand reports with all their steps would
take longer than the round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from headwater.common.estimates.gradient_noise import NoiseSums, noise_sums, solve_noise
from headwater.common.messages import Step, UpdateReport
from headwater.server.aggregation.round_reports import (
    ReportBatch,
    ReportColumns,
    in_all,
    mean_losses,
)
from headwater.server.planning.noise_scale import total
from headwater.simulation.compute.device_sums import DeviceSums, JointSums, StepSums
from headwater.simulation.fleet.devices import ClientPlan, ClientPlans
from headwater.simulation.vectorised.round_columns import Floats, Ints, RoundColumns

if TYPE_CHECKING:
    from headwater.simulation.vectorised.task_sums import ExampleSums


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSums:
    """What the passes over a block of devices give.

    ``values_P`` is the sum of the devices' vectors in float64, ``rows`` what each example adds. The
    examples of devices that use all of theirs are in the data's order unless it ``is_ordered``. For
    the rest see ``CohortReports``.
    """

    values_P: NDArray[np.float64]
    rows: ExampleSums
    is_ordered: bool = True
    norms: Floats | None = None
    update_norms: Floats | None = None
    unused: tuple[int, ...] = ()

    def reports(self, planned: RoundColumns) -> CohortReports:
        """Return the reports of the block's devices."""
        joint = JointSums(planned=planned, rows=self.rows, is_ordered=self.is_ordered)
        return CohortReports(
            planned=planned,
            sums=joint,
            norms=self.norms,
            update_norms=self.update_norms,
            unused=self.unused,
        )


@dataclass(frozen=True, kw_only=True)
class CohortReports(ReportBatch):
    """The reports of a block of devices.

    ``norms`` [S] is the norm of a device's vector after each of its steps, or of each local step's
    own sum, at least where a real device measures it; None if none was computed.
    ``update_norms`` [D] are those of the updates after local steps; None for exact sums, whose last
    norm it is. ``unused`` are the tensors that none of the devices' losses used. ``are_summed``
    says whether the vectors come as one sum.
    """

    planned: RoundColumns
    sums: DeviceSums
    norms: Floats | None = None
    update_norms: Floats | None = None
    unused: tuple[int, ...] = ()
    are_summed: bool = True

    @property
    def weight(self) -> Floats:
        """The weight that each device's loss was summed over."""
        return self.sums.weight

    @cached_property
    def ratio(self) -> Floats | None:
        """The factors that scale each device's vector and sums; None if they are not scaled."""
        weigh_as = self.planned.weigh_as
        return weigh_as / self.weight if weigh_as[0] else None

    @cached_property
    def columns(self) -> ReportColumns:
        """See ``headwater.server.aggregation.round_reports.ReportBatch``."""
        planned, ratio = self.planned, 1.0 if self.ratio is None else self.ratio
        summed = self.weight.astype(np.int64)
        is_scaled = self.ratio is not None
        return ReportColumns(
            round=planned.clients[0].plan.round,
            names=planned.clients.names,
            num_examples=planned.num_examples,
            num_refused=[0] * len(planned.clients),  # devices with bad examples are computed alone
            num_steps=planned.num_steps,
            sent_weight=planned.weigh_as if is_scaled else summed,
            summed_weight=summed,
            loss_sum=self.sums.loss * ratio,
            metric_sums={name: sums * ratio for name, sums in self.sums.metrics.items()},
            seconds=planned.seconds,
            vitals=planned.vitals,
        )

    @cached_property
    def peak_bytes(self) -> Ints:
        """The largest memory of each device's steps."""
        planned = self.planned
        firsts = np.cumsum(planned.num_steps) - planned.num_steps
        peaks: Ints = np.maximum.reduceat(planned.peak_bytes, firsts)
        return peaks

    def figures(self) -> dict[str, Sequence[Any] | NDArray[Any]]:
        """See ``headwater.server.aggregation.round_reports.ReportBatch``."""
        columns, none = self.columns, np.zeros(len(self), dtype=np.int64)
        return {
            "name": columns.names,
            "accumulation_steps": columns.num_steps,
            "micro_batch_size": self.planned.micro_batch_size,
            "num_examples": columns.num_examples,
            "num_refused": none,  # devices with bad examples are computed alone
            "weight": columns.sent_weight,
            "seconds": columns.seconds,
            "loss": mean_losses(columns.loss_sum, columns.sent_weight),
            "peak_bytes": self.peak_bytes,
            "reason": self.planned.reasons,
            "num_joined": none,
            "num_left": none,
        }

    def noise(self, owned: Mapping[str, int]) -> Sequence[NoiseSums]:
        """See ``headwater.server.aggregation.round_reports.ReportBatch``."""
        columns, planned, norms = self.columns, self.planned, self.norms
        if norms is None or self.update_norms is not None:  # local steps move the model
            return [NoiseSums(weight=float(columns.sent_weight.sum()))]
        last = np.cumsum(planned.num_steps) - 1
        first = last - planned.num_steps + 1
        weights, _ = self.sums.of_steps
        small, large = weights[first], self.weight
        num_owned = np.array([owned[name] for name in columns.names])
        is_measured = (small > 0) & (small < large) & (planned.num_examples <= num_owned)
        if not is_measured.all():  # K = 1, steps without weight, or an example used twice
            each = [noise_sums(report, num_owned=owned[report.name]) for report in self]
            return [total(each)] if self.are_summed else each
        # The same as ``estimates.gradient_noise.noise_sums``, for all devices at once.
        sent = columns.sent_weight.astype(np.float64)
        share = planned.num_examples / num_owned
        variance, squared = solve_noise(small, norms[first], large, norms[last])
        squared += variance * share / large
        variance *= sent / large
        parts = (sent, sent * variance, sent * variance * (1 - share), sent * squared)
        if self.are_summed:
            return [_noise_of(*map(math.fsum, parts))]
        # One part each: the sum of all does not depend on which devices are in a batch.
        return list(map(_noise_of, *(part.tolist() for part in parts)))

    @property
    def norms_per_weight(self) -> Sequence[float] | None:
        """See ``headwater.server.aggregation.round_reports.ReportBatch``."""
        if self.norms is None:
            return None
        if self.update_norms is None:
            last = np.cumsum(self.planned.num_steps) - 1
            norms: list[float] = (self.norms[last] / self.weight).tolist()
            return norms
        of_each: list[float] = (self.update_norms / self.columns.sent_weight).tolist()
        return of_each

    @property
    def timing(self) -> tuple[Ints, Ints, Floats]:
        """See ``headwater.server.aggregation.round_reports.ReportBatch``."""
        planned = self.planned
        return planned.num_steps, planned.sizes, planned.step_seconds

    @property
    def plain_steps(self) -> tuple[Ints, Floats, Floats] | None:
        """See ``headwater.server.aggregation.round_reports.ReportBatch``."""
        if self.norms is not None:
            return None
        weights, losses = self.sums.of_steps
        means = np.divide(losses, weights, out=np.zeros(len(losses)), where=weights != 0)
        planned = self.planned
        return planned.num_steps, planned.step_seconds, means

    @property
    def is_not_finite(self) -> NDArray[np.bool_]:
        """Whether each device's loss or a metric is not finite, or its weight is below 1."""
        is_finite: NDArray[np.bool_] = np.isfinite(self.sums.loss) & (self.weight >= 1)
        if self.update_norms is not None:
            is_finite &= np.isfinite(self.update_norms)
        for values in self.sums.metrics.values():
            is_finite &= np.isfinite(values)
        return ~is_finite

    def steps(self, at: int) -> tuple[Step, ...]:
        """Return the steps of one device."""
        planned, own = self.planned, self.planned.steps_of(at)
        weights, losses = (column[own] for column in self.sums.of_steps)
        norms: list[float | None] = [None] * len(weights)
        if self.norms is not None:  # as a real device measures them
            for start, end in pairwise(planned.local_step_bounds(at)):
                first = start + int(np.argmax(weights[start:end] > 0))
                for step in (*range(start, first + 1), end - 1):
                    norm = float(self.norms[own][step])
                    norms[step] = None if math.isnan(norm) else norm
        columns = (planned.sizes, planned.step_seconds, planned.peak_bytes)
        return tuple(
            Step(
                num_examples=size,
                weight=int(weight),
                loss=loss / weight if weight else 0.0,
                gradient_norm=norm,
                seconds=seconds,
                peak_bytes=peak,
            )
            for size, seconds, peak, weight, loss, norm in zip(
                *(column[own].tolist() for column in columns),
                *(weights.tolist(), losses.tolist(), norms),
                strict=True,
            )
        )

    def some(self, at: Ints) -> CohortReports:
        """Return the reports of these devices, which were computed one after another."""
        assert isinstance(self.sums, StepSums)
        steps = self.planned.rows_of_steps(at)
        norms = None if self.norms is None else self.norms[steps]
        return replace(
            self, planned=self.planned.some(at), sums=self.sums.some(at, steps), norms=norms
        )

    def without_clients(self) -> CohortReports:
        """Return the reports without their devices, to be sent to another process."""
        return replace(self, planned=replace(self.planned, clients=ClientPlans.of([])))

    def of_clients(self, clients: Sequence[ClientPlan]) -> CohortReports:
        """Return the reports with their devices again."""
        return replace(self, planned=replace(self.planned, clients=ClientPlans.of(clients)))

    @staticmethod
    def joined(parts: Sequence[CohortReports]) -> CohortReports:
        """Return the reports of several blocks, computed one after another, as one.

        All have the same metrics.
        """
        sums = [part.sums for part in parts]
        norms = [part.norms for part in parts]
        return replace(
            parts[0],
            planned=RoundColumns.joined([part.planned for part in parts]),
            sums=StepSums.joined([one for one in sums if isinstance(one, StepSums)]),
            norms=np.concatenate([one for one in norms if one is not None]),
            unused=in_all([part.unused for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.planned)

    @overload
    def __getitem__(self, at: int) -> UpdateReport: ...
    @overload
    def __getitem__(self, at: slice) -> list[UpdateReport]: ...
    def __getitem__(self, at: int | slice) -> UpdateReport | list[UpdateReport]:
        """Make a device's report, as it would send it."""
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        at, planned, columns = range(len(self))[at], self.planned, self.columns
        return UpdateReport.model_construct(
            name=columns.names[at],
            round=columns.round,
            num_examples=int(columns.num_examples[at]),
            weight=int(columns.sent_weight[at]),
            loss_sum=float(columns.loss_sum[at]),
            metric_sums={name: float(sums[at]) for name, sums in columns.metric_sums.items()},
            micro_batch_size=int(planned.micro_batch_size[at]),
            seconds=float(columns.seconds[at]),
            steps=self.steps(at),
            reason=planned.reasons[at],
            local_steps=int(planned.num_local_steps[at]),
            unused=self.unused,
            vitals=planned.vitals[at],
        )


def _noise_of(
    sent: float, variance: float, sum_variance: float, squared_gradient: float
) -> NoiseSums:
    return NoiseSums(
        weight=sent,
        measured_weight=sent,
        variance=variance,
        sum_variance=sum_variance,
        squared_gradient=squared_gradient,
    )
