"""The numbers that ride masked beside an update: what they are called, and how large they may be.

What a plain round reads in each device's report, a masked one learns as sums: weight, examples,
loss, metrics, the parts of the gradient noise scale, and the vector's squared norm. The bounds are
public and wide, as 63 bits resolve them finely still; what lies beyond is clipped and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headwater.common.errors import SumOutOfRange
from headwater.common.messages import UpdateReport
from headwater.common.secagg.protocol import MAX_SCALARS, NUM_CLIPPED, WEIGHT
from headwater.common.secagg.scalars import Scalar
from headwater.common.stats.gradient_noise import NoiseSums

LOSS, NUM_EXAMPLES, NUM_REFUSED = "loss_sum", "num_examples", "num_refused"
SUMMED_WEIGHT, SQUARED_NORM = "summed_weight", "squared_norm"
METRIC, NOISE = "metric.", "noise."
NOISE_PARTS = ("measured_weight", "variance", "sum_variance", "squared_gradient")

ABOVE_ZERO = {WEIGHT, NUM_EXAMPLES, SUMMED_WEIGHT}
NOT_BELOW_ZERO = {NUM_CLIPPED, NUM_REFUSED, SQUARED_NORM, NOISE + "measured_weight"}
"""Sums that are divided by, or whose root is taken."""

# Beside those that every session has, with room for weight and the number of clips.
MOST_METRICS = MAX_SCALARS - 16

# Per unit of weight. A loss beyond e^13, or a squared norm beyond 2^20, has diverged already.
LARGEST_LOSS = 2.0**20
LARGEST_SQUARE = 2.0**20


def bounds_of(
    metrics: Iterable[str], *, largest_weight: int, most_examples: int
) -> dict[str, float]:
    """Return the bound of each number but weight and clips, for plans of at most this weight."""
    weight = float(largest_weight)
    return {
        LOSS: LARGEST_LOSS * weight,
        NUM_EXAMPLES: float(most_examples),
        NUM_REFUSED: float(most_examples),
        # Scaled to another weight by dataset weighting, an update was summed over this.
        SUMMED_WEIGHT: max(weight, float(most_examples)),
        SQUARED_NORM: LARGEST_SQUARE * weight * weight,
        **{NOISE + part: LARGEST_SQUARE * weight for part in NOISE_PARTS},
        **{METRIC + name: LARGEST_LOSS * weight for name in metrics},
    }


def numbers_of(
    report: UpdateReport, *, metrics: Iterable[str], noise: NoiseSums, squared_norm: float
) -> dict[str, float | int]:
    """Return what a device masks beside its vector; a metric that it does not have counts 0."""
    return {
        WEIGHT: report.weight,
        LOSS: report.loss_sum,
        NUM_EXAMPLES: report.num_examples,
        NUM_REFUSED: report.num_refused,
        SUMMED_WEIGHT: sum(step.weight for step in report.steps),
        SQUARED_NORM: squared_norm,
        **{NOISE + part: getattr(noise, part) for part in NOISE_PARTS},
        **{METRIC + name: report.metric_sums.get(name, 0.0) for name in metrics},
    }


def check_sums(
    sums: Mapping[str, float], scalars: Iterable[Scalar], *, num_devices: int, planned_weight: int
) -> None:
    """Check that sums of ``num_devices`` devices are within what each of them may tell.

    A device that masks any number it likes is not seen doing so; but a sum that is out of range
    would end in a division by zero, or a root of less, and must cost no more than its round.

    Raises:
        SumOutOfRange: naming the numbers.
    """
    wrong = []
    for scalar in scalars:
        found = sums[scalar.name]
        most = planned_weight if scalar.name == WEIGHT else num_devices * scalar.bound
        is_within = abs(found) <= most * (1 + 1e-9)  # decoding rounds to float64
        is_within &= found > 0 or scalar.name not in ABOVE_ZERO
        is_within &= found >= 0 or scalar.name not in NOT_BELOW_ZERO
        if not is_within:
            wrong.append(scalar.name)
    if wrong:
        raise SumOutOfRange(
            f"{', '.join(wrong)}: sums of {num_devices} devices that no plan allows; one of them "
            "lied, and the masks hide which"
        )


def metrics_in(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the summed metrics by their names."""
    return {
        name.removeprefix(METRIC): value
        for name, value in numbers.items()
        if name.startswith(METRIC)
    }


def noise_in(numbers: Mapping[str, float]) -> NoiseSums:
    """Return the cohort's sums for the noise scale."""
    return NoiseSums(
        weight=numbers[WEIGHT], **{part: numbers[NOISE + part] for part in NOISE_PARTS}
    )
