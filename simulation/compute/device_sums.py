"""What the devices of a block sum: their losses, weights and metrics, in all and in each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headwater.simulation.fleet.position_columns import ranges, starts_of
from headwater.simulation.vectorised.round_columns import Floats, Ints, RoundColumns

if TYPE_CHECKING:
    from headwater.simulation.vectorised.task_sums import ExampleSums


class DeviceSums(Protocol):
    """The sums of D devices, and of the S steps of all."""

    @property
    def weight(self) -> Floats:
        """The weight that each device's loss was summed over [D]."""
        ...

    @property
    def loss(self) -> Floats:
        """Each device's summed loss [D]."""
        ...

    @property
    def metrics(self) -> Mapping[str, Floats]:
        """Each device's metric sums [D]."""
        ...

    @property
    def of_steps(self) -> tuple[Floats, Floats]:
        """Weight and loss of each step [S]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSums:
    """The sums of devices that were computed one after another, micro-batch by micro-batch."""

    weight: Floats
    loss: Floats
    metrics: Mapping[str, Floats]
    of_steps: tuple[Floats, Floats]

    def some(self, at: Ints, steps: Ints) -> StepSums:
        """Return the sums of these devices, which have these steps."""
        weights, losses = self.of_steps
        return StepSums(
            weight=self.weight[at],
            loss=self.loss[at],
            metrics={name: values[at] for name, values in self.metrics.items()},
            of_steps=(weights[steps], losses[steps]),
        )

    @staticmethod
    def joined(parts: Sequence[StepSums]) -> StepSums:
        """Return the sums of several sets of devices, all with the same metrics, as one."""
        weights, losses = zip(*(part.of_steps for part in parts), strict=True)
        return StepSums(
            weight=np.concatenate([part.weight for part in parts]),
            loss=np.concatenate([part.loss for part in parts]),
            metrics={
                name: np.concatenate([part.metrics[name] for part in parts])
                for name in parts[0].metrics
            },
            of_steps=(np.concatenate(weights), np.concatenate(losses)),
        )


@dataclass(frozen=True, kw_only=True)
class JointSums:
    """The sums of devices whose examples went through the model together.

    ``is_ordered`` is false if the examples of devices that use all their examples are in the data's
    order, not in the devices'.
    """

    planned: RoundColumns
    rows: ExampleSums
    is_ordered: bool = True

    @cached_property
    def weight(self) -> Floats:
        return self._of_each(self.rows.weight)

    @cached_property
    def loss(self) -> Floats:
        return self._of_each(self.rows.loss)

    @cached_property
    def metrics(self) -> Mapping[str, Floats]:
        return {name: self._of_each(values) for name, values in self.rows.metrics.items()}

    @cached_property
    def of_steps(self) -> tuple[Floats, Floats]:
        planned, weight, loss = self.planned, self.rows.weight, self.rows.loss
        if not self.is_ordered:
            order = np.arange(len(weight))
            whole = np.flatnonzero(planned.is_whole)
            counts = planned.num_examples[whole]
            starts = starts_of(planned.num_examples)[whole]
            order[ranges(starts, counts)] = np.repeat(starts, counts) + planned.positions(whole)
            weight, loss = weight[order], loss[order]
        cuts = starts_of(planned.sizes)
        return np.add.reduceat(weight, cuts), np.add.reduceat(loss, cuts)

    def _of_each(self, values: Floats) -> Floats:
        sums: Floats = np.add.reduceat(values, starts_of(self.planned.num_examples))
        return sums
