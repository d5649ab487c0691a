"""What a cohort's devices tell of updates that were computed together.

The figures of each are what a device would report. They are kept as the passes gave them; a report
is a view that is made when it is asked for, as a round of ten thousand devices has no time for ten
thousand reports of all their steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray

from headwater.common.messages import Step, StopReason, Vitals
from headwater.common.stats.gradient_noise import NoiseSums, solved, sums_of
from headwater.server.aggregation.round_sum import ReportColumns
from headwater.server.fleet import Reports
from headwater.server.planning.noise_scale import total
from headwater.simulation.compute.example_rows import Rows
from headwater.simulation.compute.per_example import ExampleSums, Floats
from headwater.simulation.compute.round_columns import Foreseen, ranges


@dataclass(frozen=True, kw_only=True)
class Together(Reports):
    """The cohort's reports: ``sums`` of each example, device behind device, as they were taken.

    ``norms`` [S] are those of each device's vector behind each of its steps; None where they were
    not computed. ``is_ordered`` is false where the examples of those who take all that they have
    lie in the data's order.
    """

    foreseen: Foreseen
    sums: ExampleSums
    norms: Floats | None = None
    is_ordered: bool = True

    @cached_property
    def starts(self) -> Rows:
        """The row of each device's first example."""
        counts = self.foreseen.num_examples
        return np.cumsum(counts) - counts

    @cached_property
    def weight(self) -> Floats:
        """What each device's loss was summed over."""
        return self._of_each(self.sums.weight)

    @cached_property
    def loss(self) -> Floats:
        """Each device's summed loss."""
        return self._of_each(self.sums.loss)

    @cached_property
    def metrics(self) -> Mapping[str, Floats]:
        """Each device's metric sums."""
        return {name: self._of_each(values) for name, values in self.sums.metrics.items()}

    def _of_each(self, values: Floats) -> Floats:
        found: Floats = np.add.reduceat(values, self.starts)
        return found

    @cached_property
    def ratio(self) -> Floats | None:
        """By which each device's vector and sums were scaled; None where they were not."""
        called = self.foreseen.called
        if called[0].plan.weigh_as is None:
            return None
        return np.array([one.plan.weigh_as for one in called], dtype=np.float64) / self.weight

    @cached_property
    def columns(self) -> ReportColumns:
        """See ``headwater.server.fleet.Reports``."""
        one, ratio = self.foreseen, 1.0 if self.ratio is None else self.ratio
        summed = self.weight.astype(np.int64).tolist()
        return ReportColumns(
            round=one.called[0].plan.round,
            names=[called.name for called in one.called],
            num_examples=one.num_examples.tolist(),
            num_steps=one.num_steps.tolist(),
            sent_weight=(
                summed
                if self.ratio is None
                else [called.plan.weigh_as or 0 for called in one.called]
            ),
            summed_weight=summed,
            loss_sum=(self.loss * ratio).tolist(),
            metric_sums={name: (sums * ratio).tolist() for name, sums in self.metrics.items()},
            seconds=one.seconds.tolist(),
        )

    def noise(self, owned: Mapping[str, int]) -> NoiseSums:
        """See ``headwater.server.fleet.Reports``."""
        told, norms = self.columns, self.norms
        if norms is None:
            return NoiseSums(weight=float(sum(told.sent_weight)))
        last = np.cumsum(self.foreseen.num_steps) - 1
        first = last - self.foreseen.num_steps + 1
        weights, _ = self._of_steps
        small, large = weights[first], self.weight
        is_told = (small > 0) & (small < large)
        if not is_told.all():  # K = 1, or steps without weight
            return total(sums_of(report, num_owned=owned[report.name]) for report in self)
        # As ``common.stats.gradient_noise.sums_of`` has it of one device.
        sent = np.array(told.sent_weight, dtype=np.float64)
        num_owned = np.array([owned[name] for name in told.names])
        share = np.minimum(self.foreseen.num_examples / num_owned, 1.0)
        variance, squared = solved(small, norms[first], large, norms[last])
        squared += variance * share / large
        variance *= sent / large
        return NoiseSums(
            weight=math.fsum(sent),
            measured_weight=math.fsum(sent),
            variance=math.fsum(sent * variance),
            sum_variance=math.fsum(sent * variance * (1 - share)),
            squared_gradient=math.fsum(sent * squared),
        )

    @cached_property
    def num_left(self) -> list[int]:
        """What each device's epoch has left."""
        found: list[int] = self.foreseen.num_left.tolist()
        return found

    @property
    def is_not_finite(self) -> NDArray[np.bool_]:
        """Whether a device's loss or a metric is not finite, or no weight is left."""
        is_finite = np.isfinite(self.loss) & (self.weight >= 1)
        for values in self.metrics.values():
            is_finite &= np.isfinite(values)
        found: NDArray[np.bool_] = ~is_finite
        return found

    @cached_property
    def _of_steps(self) -> tuple[Floats, Floats]:
        """Return weight and loss of each step."""
        one, weight, loss = self.foreseen, self.sums.weight, self.sums.loss
        if not self.is_ordered:
            order = np.arange(len(weight))
            whole = np.flatnonzero(one.is_whole)
            counts, starts = one.num_examples[whole], self.starts[whole]
            order[ranges(starts, counts)] = np.repeat(starts, counts) + one.positions(whole)
            weight, loss = weight[order], loss[order]
        cuts = np.cumsum(one.sizes) - one.sizes
        return np.add.reduceat(weight, cuts), np.add.reduceat(loss, cuts)

    def steps(self, at: int) -> tuple[Step, ...]:
        """Return the steps of one device."""
        one, own = self.foreseen, self.foreseen.steps_of(at)
        weights, losses = self._of_steps
        num_steps = own.stop - own.start
        norms = [None] * num_steps if self.norms is None else self.norms[own].tolist()
        columns = (one.sizes, weights, losses, one.step_seconds, one.peak_bytes)
        return tuple(
            Step(
                num_examples=size,
                weight=int(weight),
                loss=loss / weight if weight else 0.0,
                gradient_norm=norm,
                seconds=seconds,
                peak_bytes=peak,
            )
            for size, weight, loss, seconds, peak, norm in zip(
                *(column[own].tolist() for column in columns), norms, strict=True
            )
        )

    def __len__(self) -> int:
        return len(self.foreseen)

    @overload
    def __getitem__(self, at: int) -> Report: ...
    @overload
    def __getitem__(self, at: slice) -> list[Report]: ...
    def __getitem__(self, at: int | slice) -> Report | list[Report]:
        if isinstance(at, slice):
            return [Report(self, one) for one in range(*at.indices(len(self)))]
        return Report(self, range(len(self))[at])

    def __iter__(self) -> Iterator[Report]:
        return (Report(self, at) for at in range(len(self)))


class Report:
    """One device's report: a ``common.messages.ReportFields``."""

    __slots__ = ("_at", "_of")

    def __init__(self, of: Together, at: int) -> None:
        self._of = of
        self._at = at

    @property
    def name(self) -> str:
        return self._of.columns.names[self._at]

    @property
    def round(self) -> int:
        return self._of.columns.round

    @property
    def num_examples(self) -> int:
        return self._of.columns.num_examples[self._at]

    @property
    def weight(self) -> int:
        return self._of.columns.sent_weight[self._at]

    @property
    def loss_sum(self) -> float:
        return self._of.columns.loss_sum[self._at]

    @property
    def metric_sums(self) -> Mapping[str, float]:
        return {name: sums[self._at] for name, sums in self._of.columns.metric_sums.items()}

    @property
    def micro_batch_size(self) -> int:
        return int(self._of.foreseen.micro_batch_size[self._at])

    @property
    def num_refused(self) -> int:
        return 0

    @property
    def seconds(self) -> float:
        return self._of.columns.seconds[self._at]

    @property
    def steps(self) -> Sequence[Step]:
        return self._of.steps(self._at)

    @property
    def num_steps(self) -> int:
        return self._of.columns.num_steps[self._at]

    @property
    def summed_weight(self) -> int:
        return self._of.columns.summed_weight[self._at]

    @property
    def has_norms(self) -> bool:
        return self._of.norms is not None

    @property
    def reason(self) -> StopReason:
        return self._of.foreseen.reasons[self._at]

    @property
    def vitals(self) -> Vitals:
        return self._of.foreseen.vitals[self._at]

    @property
    def num_left(self) -> int | None:
        return self._of.num_left[self._at]

    @property
    def is_checkpointed(self) -> bool:
        return False
