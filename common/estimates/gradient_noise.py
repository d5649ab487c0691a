"""Estimates the gradient noise from one device's steps, as sums that add up over devices.

A device's vectors after its first and after its last accumulation step are two batch sizes of one
distribution. From their norms follow the variance of an example's gradient and the squared norm of
the mean gradient (McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix
A.1). ``server.planning.noise_scale`` turns the cohort's sums into the noise scale; in a masked
round these sums are masked too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from headwater.common.messages import Step, UpdateReport


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseEstimate:
    """Unbiased estimates from the mean gradient at two batch sizes; either may be negative.

    ``variance`` is S, per unit of weight; ``squared_gradient`` is |G|^2.
    """

    variance: float
    squared_gradient: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseSums:
    """Sums over a round's devices, each weighted by the weight v that it sends.

    A device without measurements adds to ``weight`` only; the other devices represent it.
    """

    weight: float  # V = sum of v
    measured_weight: float = 0.0  # sum of v over devices that measured
    variance: float = 0.0  # sum of v S
    sum_variance: float = 0.0  # sum of the sent vectors' variances: v S (1 - w/n)
    squared_gradient: float = 0.0  # sum of v |G_i|^2


def estimate_noise(first: tuple[int, float], last: tuple[int, float]) -> NoiseEstimate | None:
    """Return the estimate from a (weight, norm of the sum) and a later one that includes it.

    None if the weights are equal.
    """
    if first[0] == last[0]:
        return None
    variance, squared_gradient = solve_noise(*first, *last)
    return NoiseEstimate(variance=variance, squared_gradient=squared_gradient)


def solve_noise(small: Any, small_norm: Any, large: Any, large_norm: Any) -> tuple[Any, Any]:
    """Solve the two equations of ``estimate_noise`` for S and |G|^2; numbers or numpy columns."""
    at_small, at_large = small_norm / small, large_norm / large
    # Not ** 2: Python's power and numpy's square may round differently.
    at_small, at_large = at_small * at_small, at_large * at_large
    # This divides by 1/small - 1/large without forming it: a device's claims could round it to 0.
    variance = (at_small - at_large) * (small * large / (large - small))
    return variance, (large * at_large - small * at_small) / (large - small)


def estimates_after_steps(steps: Sequence[Step]) -> Iterator[NoiseEstimate | None]:
    """Yield, after each step, the estimate from it and the first step with weight.

    None after the first step with weight, and until a later step adds weight.
    """
    weight, first = 0, None
    for step in steps:
        weight += step.weight
        if step.gradient_norm is None:
            yield None
            continue
        if weight and first is None:
            first = (weight, step.gradient_norm)
        yield estimate_noise(first, (weight, step.gradient_norm)) if first is not None else None


def _first_and_last(steps: Sequence[Step]) -> NoiseEstimate | None:
    """Return the last estimate of ``estimates_after_steps``, for steps that have these norms."""
    weight, first = 0, None
    for step in steps:
        weight += step.weight
        if weight and first is None:
            first = (weight, cast(float, step.gradient_norm))
    last = (weight, cast(float, steps[-1].gradient_norm))
    return None if first is None else estimate_noise(first, last)


def noise_sums(report: UpdateReport, *, num_owned: int) -> NoiseSums:
    """Return one device's contribution to the round's sums.

    Its steps give the norms and weights of the sum of weight w as it was computed. With
    ``weigh_as`` the vector was scaled to another weight v after that; |A|/w is the same for both,
    and S per unit of v is S per unit of w times v/w. ``num_owned`` is the number n of examples that
    the device draws from.

    Edge cases: with K = 1, without norms, with weight in one step only, or with an example used
    more than once, nothing is measured.
    """
    sent = float(report.weight)
    if report.num_steps < 2 or not report.has_norms or report.num_examples > num_owned:
        return NoiseSums(weight=sent)
    estimate, summed = _first_and_last(report.steps), float(report.summed_weight)
    if estimate is None:
        return NoiseSums(weight=sent)
    fraction = report.num_examples / num_owned
    variance = estimate.variance * (sent / summed)
    squared_gradient = estimate.squared_gradient + estimate.variance * fraction / summed
    return NoiseSums(
        weight=sent,
        measured_weight=sent,
        variance=sent * variance,
        sum_variance=sent * variance * (1 - fraction),
        squared_gradient=sent * squared_gradient,
    )
