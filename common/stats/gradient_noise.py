"""What one device's steps say of the gradient noise, as numbers that add up over devices.

A device's vector after its first accumulation step, and after its last, are two batch sizes of one
distribution: they tell the variance of an example's gradient from the mean gradient's own size
(McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1). What the
cohort's sums come to: ``headwater.server.planning.round_plans.noise_scale``. In a masked round they are summed under masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from headwater.common.messages import ReportFields, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoSizes:
    """What the mean gradient at two batch sizes of one distribution says; either may be negative.

    ``variance`` is S, of one unit of weight, and ``squared_gradient`` is |G|^2.
    """

    variance: float
    squared_gradient: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseSums:
    """Sums over a round's devices, each by the weight v that it sends.

    A device that measured nothing adds to ``weight`` alone. The others stand for it.
    """

    weight: float  # V = sum v
    measured_weight: float = 0.0  # sum v of those that measured
    variance: float = 0.0  # sum v S
    sum_variance: float = 0.0  # sum of the variances of the vectors sent: v S (1 - w/n)
    squared_gradient: float = 0.0  # sum v |G_i|^2


def two_sizes(first: tuple[int, float], last: tuple[int, float]) -> TwoSizes | None:
    """Solve the two equations for a (weight, norm of the sum) and a later one that contains it.

    Both results are without bias. None if the weights are the same.
    """
    if first[0] == last[0]:
        return None
    variance, squared_gradient = solved(*first, *last)
    return TwoSizes(variance=variance, squared_gradient=squared_gradient)


def solved(small: Any, small_norm: Any, large: Any, large_norm: Any) -> tuple[Any, Any]:
    """Return the variance and |G|^2 of ``two_sizes``, of numbers or of columns of them."""
    at_small, at_large = (small_norm / small) ** 2, (large_norm / large) ** 2
    # Over 1/small - 1/large, which may round to zero for what a device claims.
    variance = (at_small - at_large) * (small * large / (large - small))
    return variance, (large * at_large - small * at_small) / (large - small)


def after_each(steps: Sequence[Step]) -> Iterator[TwoSizes | None]:
    """Yield, after each accumulation step, what it and the first that had weight say together.

    None after the first, and while no step has added weight to it.
    """
    weight, first = 0, None
    for step in steps:
        weight += step.weight
        if step.gradient_norm is None:  # nor has any other step of the update one
            yield None
            continue
        if weight and first is None:
            first = (weight, step.gradient_norm)
        yield two_sizes(first, (weight, step.gradient_norm)) if first is not None else None


def _first_and_last(steps: Sequence[Step]) -> TwoSizes | None:
    """Return the last that ``after_each`` yields of steps that all have norms."""
    weight, first = 0, None
    for step in steps:
        weight += step.weight
        if weight and first is None:
            first = (weight, cast(float, step.gradient_norm))
    last = (weight, cast(float, steps[-1].gradient_norm))
    return None if first is None else two_sizes(first, last)


def sums_of(report: ReportFields, *, num_owned: int) -> NoiseSums:
    """Return one device's part in the round's sums.

    Its steps tell norms and weights of the sum w as it was made. With ``weigh_as`` the vector was
    scaled to another weight v after that; |A|/w is the same for both, and S per unit of v is that
    per unit of w times v/w. ``num_owned`` is the number n of examples that the device draws from.

    Edge cases: K = 1, no norms, or no weight in any step but one, measures nothing.
    """
    sent = float(report.weight)
    if report.num_steps < 2 or not report.has_norms:
        return NoiseSums(weight=sent)
    found, summed = _first_and_last(report.steps), float(report.summed_weight)
    if found is None:
        return NoiseSums(weight=sent)
    share = min(report.num_examples / num_owned, 1.0)
    variance = found.variance * (sent / summed)
    squared_gradient = found.squared_gradient + found.variance * share / summed
    return NoiseSums(
        weight=sent,
        measured_weight=sent,
        variance=sent * variance,
        sum_variance=sent * variance * (1 - share),
        squared_gradient=sent * squared_gradient,
    )
