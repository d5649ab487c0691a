"""What a cohort's devices tell of updates that were computed together.

The figures of each are what a device would report. They are kept as the passes gave them; a report
is a view that is made when it is asked for, as a round of ten thousand devices has no time for ten
thousand reports of all their steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from common.update import Step, StopReason, Vitals
from simulation.many import ExampleSums
from simulation.packed import Rows
from simulation.rehearsal import Foreseen


@dataclass(frozen=True, kw_only=True)
class Together:
    """The cohort's figures: ``sums`` of each example, device behind device, as they were taken."""

    foreseen: Sequence[Foreseen]
    sums: ExampleSums
    norms: Sequence[Sequence[float]] | None = None
    is_ordered: bool = True
    """Of each device's vector behind each of its steps; None where they were not computed.

    ``is_ordered`` is false where those who take all their examples have them in the data's order.
    """

    @cached_property
    def starts(self) -> Rows:
        """The row of each device's first example."""
        counts = [one.num_examples for one in self.foreseen]
        return np.cumsum([0, *counts[:-1]])

    @cached_property
    def weight(self) -> list[int]:
        """What each device's loss was summed over."""
        return [int(weight) for weight in np.add.reduceat(self.sums.weight, self.starts)]

    @cached_property
    def loss(self) -> list[float]:
        """Each device's summed loss."""
        losses: list[float] = np.add.reduceat(self.sums.loss, self.starts).tolist()
        return losses

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """Each device's metric sums."""
        names = list(self.sums.metrics)
        if not names:
            return [{} for _ in self.foreseen]
        sums = [np.add.reduceat(self.sums.metrics[name], self.starts).tolist() for name in names]
        return [dict(zip(names, row, strict=True)) for row in zip(*sums, strict=True)]

    @cached_property
    def _of_steps(self) -> tuple[list[int], list[float], list[float]]:
        """Return where each device's steps begin among all, and weight and loss of each step."""
        counts = [len(one.sizes) for one in self.foreseen]
        sizes = [size for one in self.foreseen for size in one.sizes]
        cuts = np.cumsum([0, *sizes[:-1]])
        weight, loss = self.sums.weight, self.sums.loss
        if not self.is_ordered:
            order = np.arange(len(weight))
            for one, start in zip(self.foreseen, self.starts, strict=True):
                if one.is_whole:
                    order[start : start + one.num_examples] = start + np.array(one.positions())
            weight, loss = weight[order], loss[order]
        summed = (np.add.reduceat(column, cuts).tolist() for column in (weight, loss))
        return [0, *np.cumsum(counts).tolist()], *summed

    def steps(self, at: int) -> tuple[Step, ...]:
        """Return the steps of one device."""
        one = self.foreseen[at]
        starts, all_weights, all_losses = self._of_steps
        own = slice(starts[at], starts[at + 1])
        weights, losses = all_weights[own], all_losses[own]
        norms = self.norms[at] if self.norms is not None else [None] * len(one.sizes)
        return tuple(
            Step.model_construct(
                num_examples=size,
                weight=int(weight),
                loss=loss / weight if weight else 0.0,
                gradient_norm=norm,
                seconds=seconds,
                peak_bytes=peak,
            )
            for size, weight, loss, norm, seconds, peak in zip(
                one.sizes, weights, losses, norms, one.step_seconds, one.peak_bytes, strict=True
            )
        )

    def reports(self) -> list[Report]:
        """Return each device's report."""
        return [Report(self, at) for at in range(len(self.foreseen))]


class Report:
    """One device's report: a ``common.update.Reported``."""

    __slots__ = ("_at", "_of", "_one", "_ratio")

    def __init__(self, of: Together, at: int) -> None:
        self._of = of
        self._at = at
        self._one = of.foreseen[at]
        weigh_as = self._one.called.plan.weigh_as
        self._ratio = 1.0 if weigh_as is None else weigh_as / of.weight[at]

    @property
    def name(self) -> str:
        return self._one.called.name

    @property
    def round(self) -> int:
        return self._one.called.plan.round

    @property
    def num_examples(self) -> int:
        return self._one.num_examples

    @property
    def weight(self) -> int:
        return self._one.called.plan.weigh_as or self._of.weight[self._at]

    @property
    def loss_sum(self) -> float:
        return self._of.loss[self._at] * self._ratio

    @property
    def metric_sums(self) -> Mapping[str, float]:
        sums = self._of.metrics[self._at]
        if self._ratio == 1.0:
            return sums
        return {name: value * self._ratio for name, value in sums.items()}

    @property
    def micro_batch_size(self) -> int:
        return self._one.micro_batch_size

    @property
    def num_refused(self) -> int:
        return 0

    @property
    def seconds(self) -> float:
        return self._one.seconds

    @property
    def steps(self) -> Sequence[Step]:
        return self._of.steps(self._at)

    @property
    def num_steps(self) -> int:
        return len(self._one.sizes)

    @property
    def summed_weight(self) -> int:
        return self._of.weight[self._at]

    @property
    def has_norms(self) -> bool:
        return self._of.norms is not None

    @property
    def reason(self) -> StopReason:
        return self._one.reason

    @property
    def vitals(self) -> Vitals:
        return self._one.vitals

    @property
    def num_left(self) -> int | None:
        return self._one.num_left

    @property
    def is_checkpointed(self) -> bool:
        return False
