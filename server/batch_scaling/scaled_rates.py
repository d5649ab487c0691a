"""The rate of each step, scaled by the round's batch over the batch that is set."""

from __future__ import annotations

import math

from headwater.common.task import weight_unit
from headwater.server.aggregation.round_reports import RoundSum
from headwater.server.rounds.features import RunFeature, RunState


class ScaledRates(RunFeature):
    """Scales the rate as ``schedule.batch_scaling`` says.

    Linear: Goyal et al. 2017, for SGD while the batch is below the noise scale. Square root:
    Malladi et al. 2022, for Adam and its kin, whose steps do not grow with the gradient.
    """

    def __init__(self, run: RunState) -> None:
        self._plan, self._weight_unit = run.settings.plan, weight_unit(run.task)
        self._is_linear = run.settings.schedule.batch_scaling == "linear"

    def rate_factor(self, done: RoundSum) -> float:
        ratio = self._ratio(done)
        return ratio if self._is_linear else math.sqrt(ratio)

    def _ratio(self, done: RoundSum) -> float:
        """Return the round's batch over the one that is set, in tokens if these are set."""
        if self._plan.tokens_per_update is not None:
            return done.summed_weight * self._weight_unit / self._plan.tokens_per_update
        return done.num_examples / self._plan.effective_batch_size
