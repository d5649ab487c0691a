"""The gradient noise scale: the batch size beyond which more examples hardly improve a step.

With S = tr(Sigma) the variance of one example's gradient, summed over the coordinates, and G the
mean gradient, a mean over w examples has the expected squared norm |G|^2 + S/w, and the noise scale
is S/|G|^2 (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", eq. 2.9 and
appendix A.1). Two batch sizes separate S and |G|^2. Each device has two batch sizes of its own,
drawn from its own data: its vector after the first accumulation step, and after the last one. Two
devices are never used as two batch sizes: if their data differ, the difference would count as
noise. S is averaged over the devices by the weight that they send, |G|^2 is that of the fleet's
mean gradient, and the rest of the devices' own |G_i|^2 is the heterogeneity:
sum v_i |G_i - G|^2 / V.

A device draws w of its n examples without replacement, so the variance of its mean about the mean
of its data is S (1/w - 1/n), with S of divisor n - 1. The difference of the two equations does not
depend on n, so S needs no correction; |G|^2 would be too small by S/n, which is added. The estimate
is thus of the gradient of the fleet's own data, which the steps descend. One bias is not corrected:
the examples left in an epoch are those that the model was not trained on recently, and their
gradient is larger than that of all examples (on the digits |G|^2 was 1.3 to 1.8 times too large:
docs/batch.md).

Gradients of neighbouring tokens are dependent, those of examples are independent: for tokens, S is
the variance of an example's sum about its tokens' share, divided by the mean tokens of an example.
If examples have different weights, the equations hold up to a relative error of 1/(examples in the
first step), provided that long and short examples have similar mean gradients. Otherwise S is
biased for any number of examples: by 20 % in a constructed case in which the gradient changed by
its own size with the length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headwater.common.estimates.gradient_noise import NoiseSums

# The decay of a round's estimates in the running sums: the last twenty rounds make up two thirds.
# Single rounds' estimates vary widely. On the digits 0.9 fluctuates by a third more and 0.98 reacts
# too late; the distance from the current true value is the same for 0.9 and 0.95.
DECAY = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundNoise:
    """A round's own estimates, per unit of weight; any of the three may be negative.

    They are based on devices that sent ``measured_share`` of the weight.
    """

    variance: float
    squared_gradient: float
    heterogeneity: float
    measured_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseScale:
    """S and |G|^2 over the rounds, as sums in which earlier rounds are multiplied by DECAY."""

    variance: float = 0.0
    squared_gradient: float = 0.0

    @property
    def ratio(self) -> float | None:
        """The noise scale in units of weight; None while not both sums are positive.

        The ratio is taken last: a mean of the rounds' ratios would be dominated by rounds in which
        |G|^2 is close to zero by chance.
        """
        if self.variance <= 0 or self.squared_gradient <= 0:
            return None
        ratio = self.variance / self.squared_gradient
        return ratio if math.isfinite(ratio) else None

    def after(self, noise: RoundNoise) -> NoiseScale:
        """Return the sums after one more round."""
        return NoiseScale(
            variance=DECAY * self.variance + noise.variance,
            squared_gradient=DECAY * self.squared_gradient + noise.squared_gradient,
        )


def total(parts: Iterable[NoiseSums]) -> NoiseSums:
    """Add the devices' parts, rounded once, so that the result does not depend on their order."""
    rows = list(parts)
    return NoiseSums(
        weight=math.fsum(row.weight for row in rows),
        measured_weight=math.fsum(row.measured_weight for row in rows),
        variance=math.fsum(row.variance for row in rows),
        sum_variance=math.fsum(row.sum_variance for row in rows),
        squared_gradient=math.fsum(row.squared_gradient for row in rows),
    )


def round_noise(sums: NoiseSums, *, squared_mean: float) -> RoundNoise | None:
    """Return the round's estimates; ``squared_mean`` is |mean_P|^2 of the round's mean gradient.

    The mean's own variance is that of all vectors over V^2. None if no device has measurements.
    """
    if not sums.measured_weight:
        return None
    mean_variance = sums.sum_variance / sums.measured_weight / sums.weight
    squared_gradient = squared_mean - mean_variance
    return RoundNoise(
        variance=sums.variance / sums.measured_weight,
        squared_gradient=squared_gradient,
        heterogeneity=sums.squared_gradient / sums.measured_weight - squared_gradient,
        measured_share=sums.measured_weight / sums.weight,
    )
