"""What a round came to: the cohort's sums, whoever added them up, in clear or under masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from headwater.common.stats.gradient_noise import NoiseSums
from headwater.server.planning.target_batch import Gathered


@dataclass(frozen=True, kw_only=True, slots=True)
class Summed:
    """A cohort's sums, divided once by their weight.

    ``mean_P`` is the mean gradient; ``names`` are the devices whose updates are in it.
    ``num_clipped`` counts what a fixed-point range cut off, and is None where there is none.
    """

    names: tuple[str, ...]
    mean_P: Tensor = field(repr=False)
    weight: int
    loss_sum: float
    metric_sums: Mapping[str, float]
    gathered: Gathered
    noise: NoiseSums | None
    num_clipped: int | None = None

    @property
    def num_examples(self) -> int:
        """The examples behind the sum."""
        return round(self.gathered.num_examples)

    @property
    def loss(self) -> float:
        """The mean loss per unit of weight."""
        return self.loss_sum / self.weight
