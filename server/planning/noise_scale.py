"""The gradient noise scale: the batch beyond which more examples hardly better a step.

With S = tr(Sigma) the variance of one example's gradient, summed over the coordinates, and G the
mean gradient, a mean over w examples has the expected squared norm |G|^2 + S/w, and the noise scale
is S/|G|^2 (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", eq. 2.9 and
appendix A.1). Two batch sizes tell S and |G|^2 apart. Each device has two of its own, drawn from
its own data: its vector after the first accumulation step, and after the last. Two devices are
never taken for two batch sizes: on data that differ from device to device that counts the
difference as noise. S is pooled over the devices by the weight they send, |G|^2 is that of the
fleet's mean gradient, and what is left of the devices' own |G_i|^2 is the heterogeneity:
sum v_i |G_i - G|^2 / V.

A device draws w of its n examples without replacement, so its mean varies by S (1/w - 1/n) about
that of its data, with S of divisor n - 1. The two equations' difference is free of n, so S needs no
correction; their |G|^2 would be too small by S/n, which is added. What is estimated is thus the
gradient of the data that the fleet has, which its steps descend. Not corrected: the examples that
an epoch has left are those that the model was not trained on lately, and their gradient is larger
than that of all (on the digits |G|^2 came out 1.3 to 1.8 times too large: docs/batch.md).

A token's gradient is not independent of its neighbour's, an example's is: S is then the variance of
an example's sum about its tokens' share, over the mean tokens of an example. Where examples weigh
differently the equations hold up to a relative error of 1/(examples in the first step), if a long
example's mean gradient is like a short one's. If it is not, S is biased whatever the number of
examples: by 20 % in a made-up case in which the gradient swung by its own size with the length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headwater.common.stats.gradient_noise import NoiseSums

# Of a round's estimates in the running means: the last twenty rounds make up two thirds. Those of a
# single round are far apart. On the digits 0.9 wobbles by a third more and 0.98 comes too
# late; the distance from the truth of the moment is the same for 0.9 and 0.95.
DECAY = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundNoise:
    """A round's own estimates, per unit of weight; any of the three may be negative.

    They rest on devices that sent ``measured_share`` of the weight.
    """

    variance: float
    squared_gradient: float
    heterogeneity: float
    measured_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseScale:
    """S and |G|^2 over the rounds, as sums in which each round fades by DECAY."""

    variance: float = 0.0
    squared_gradient: float = 0.0

    @property
    def ratio(self) -> float | None:
        """The noise scale in units of weight; None while not both sums are positive.

        The ratio comes last: a mean of the rounds' ratios would be drawn to wherever |G|^2
        happened to be close to zero.
        """
        if self.variance <= 0 or self.squared_gradient <= 0:
            return None
        ratio = self.variance / self.squared_gradient
        return ratio if math.isfinite(ratio) else None

    def after(self, noise: RoundNoise) -> NoiseScale:
        """Return the sums behind one more round."""
        return NoiseScale(
            variance=DECAY * self.variance + noise.variance,
            squared_gradient=DECAY * self.squared_gradient + noise.squared_gradient,
        )


def total(parts: Iterable[NoiseSums]) -> NoiseSums:
    """Add the devices' parts, rounded once, so that their order cannot matter."""
    rows = list(parts)
    return NoiseSums(
        weight=math.fsum(row.weight for row in rows),
        measured_weight=math.fsum(row.measured_weight for row in rows),
        variance=math.fsum(row.variance for row in rows),
        sum_variance=math.fsum(row.sum_variance for row in rows),
        squared_gradient=math.fsum(row.squared_gradient for row in rows),
    )


def round_noise(sums: NoiseSums, *, squared_mean: float) -> RoundNoise | None:
    """Return the round's estimates; ``squared_mean`` is |mean_P|^2 of what the server divided.

    The mean's own variance is that of all vectors over V^2. None if no device measured anything.
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
