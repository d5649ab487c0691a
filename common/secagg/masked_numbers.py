"""The masked numbers of an update: their names, bounds, values and checks of their sums.

An unmasked round reads these numbers in each device's report; a masked round learns only their
sums: weight, examples, loss, metrics, the parts of the gradient noise scale, and the vector's
squared norm. The bounds are public, and 63 bits resolve the usual range finely. A loss of 10^12, as
of a regression on unscaled targets, is beyond it: each such number is masked twice, once finely and
once with a bound so wide that only what has no meaning is beyond it. The fine sum counts if both
agree; the wide one if some device was beyond the fine bound. What is beyond the wide bound is
clipped, and the clip is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from headwater.common.errors import ModelMismatch, SumOutOfRange
from headwater.common.estimates.gradient_noise import NoiseSums
from headwater.common.messages import UpdateReport
from headwater.common.secagg.protocol import MAX_SCALARS, NUM_CLIPPED, WEIGHT
from headwater.common.secagg.scalar_encoding import Scalar, largest_sum
from headwater.common.task import MAX_METRICS

LOSS, NUM_EXAMPLES, NUM_REFUSED = "loss_sum", "num_examples", "num_refused"
SUMMED_WEIGHT, SQUARED_NORM = "summed_weight", "squared_norm"
NUM_ZERO = "num_zero_tensors"
"""The trained tensors whose gradient is zero throughout, though a loss used them.

If no device has one, a tensor that is zero in the opened sum was used by no loss.
"""
CLIP_BIT = "clip_bit"
"""A private device's bit on the clip norm (``common.privacy.clip_bit``)."""
METRIC, NOISE, WIDE = "metric.", "noise.", "wide."
NOISE_PARTS = ("measured_weight", "variance", "sum_variance", "squared_gradient")

POSITIVE = {WEIGHT, NUM_EXAMPLES, SUMMED_WEIGHT}
NON_NEGATIVE = {
    *(NUM_CLIPPED, NUM_REFUSED, NUM_ZERO, SQUARED_NORM, WIDE + SQUARED_NORM),
    *(NOISE + "measured_weight", WIDE + NOISE + "measured_weight"),
}
"""Sums that are used as divisors, or whose square root is taken."""

# The rest of MAX_SCALARS is for the numbers of every session, including weight and clips.
assert 2 * MAX_METRICS == MAX_SCALARS - 32

# Per unit of weight.
MAX_LOSS = 2.0**20
MAX_SQUARE = 2.0**20
WIDE_FACTOR = 2.0**40
"""Of the wide bounds: a mean loss up to 2^60, in steps of at most 1/4 at the planned weight."""
MAX_TENSORS = 1 << 24


def bounds_of(
    metrics: Iterable[str], *, largest_weight: int, max_examples: int
) -> dict[str, float]:
    """Return the bound of each number except weight and clips, for plans of at most this weight."""
    weight = float(largest_weight)
    fine = {
        LOSS: MAX_LOSS * weight,
        SQUARED_NORM: MAX_SQUARE * weight * weight,
        **{NOISE + part: MAX_SQUARE * weight for part in NOISE_PARTS},
        **{METRIC + name: MAX_LOSS * weight for name in metrics},
    }
    return {
        **fine,
        **{WIDE + name: WIDE_FACTOR * bound for name, bound in fine.items()},
        NUM_EXAMPLES: float(max_examples),
        NUM_REFUSED: float(max_examples),
        # The weight that an update was summed over, before dataset weighting scaled it.
        SUMMED_WEIGHT: max(weight, float(max_examples)),
        NUM_ZERO: float(MAX_TENSORS),
    }


def numbers_of(
    report: UpdateReport, *, noise: NoiseSums, squared_norm: float, num_zero: int
) -> dict[str, float | int]:
    """Return the numbers that a device masks; a bit on the clip norm is masked as +1 or -1."""
    bit = report.clip_bit
    return {
        **({} if bit is None else {CLIP_BIT: 1 if bit else -1}),
        WEIGHT: report.weight,
        LOSS: report.loss_sum,
        NUM_EXAMPLES: report.num_examples,
        NUM_REFUSED: report.num_refused,
        SUMMED_WEIGHT: sum(step.weight for step in report.steps),
        SQUARED_NORM: squared_norm,
        NUM_ZERO: num_zero,
        **{NOISE + part: getattr(noise, part) for part in NOISE_PARTS},
        **{METRIC + name: value for name, value in report.metric_sums.items()},
    }


def numbers_of_nothing(*, num_refused: int) -> dict[str, float | int]:
    """Return the numbers of an update of weight 0; ``num_refused`` examples were left out."""
    names = (LOSS, SUMMED_WEIGHT, SQUARED_NORM, NUM_ZERO, *(NOISE + part for part in NOISE_PARTS))
    counts = {WEIGHT: 0, NUM_EXAMPLES: 0, NUM_REFUSED: num_refused}
    return {**counts, **dict.fromkeys(names, 0.0)}


def in_names_of(
    scalars: Iterable[Scalar], numbers: Mapping[str, float | int]
) -> dict[str, float | int]:
    """Return the numbers under a session's names; a metric that the device does not have is 0.

    Which metrics a device has may depend on its examples, so a session's names never do.

    Raises:
        ModelMismatch: the names other than those of metrics are not the session's.
    """
    names = [scalar.name for scalar in scalars if scalar.name != NUM_CLIPPED]
    wide = {name for name in names if name.startswith(WIDE)}
    own = [name for name in names if name not in wide]
    asked, known = ({name for name in some if not is_metric(name)} for some in (own, numbers))
    if asked != known or not {name.removeprefix(WIDE) for name in wide} <= {*own}:
        raise ModelMismatch(
            f"the session masks the numbers {sorted(asked)}, the update has {sorted(known)}"
        )
    return {name: numbers.get(name.removeprefix(WIDE), 0.0) for name in names}


def widest(scalars: Sequence[Scalar]) -> list[Scalar]:
    """Return the scalars without the fine ones of numbers that are masked twice.

    A number that one of these clips is out of range.
    """
    twice = {scalar.name.removeprefix(WIDE) for scalar in scalars if scalar.name.startswith(WIDE)}
    return [scalar for scalar in scalars if scalar.name not in twice]


def merged_sums(
    sums: Mapping[str, float], scalars: Iterable[Scalar], *, num_devices: int
) -> dict[str, float]:
    """Return each number's sum: the fine one, or the wide one if a device was beyond the fine.

    Within the fine bound the two differ by their rounding, of half a step each on each device.
    """
    by_name = {scalar.name: scalar for scalar in scalars}
    found = {name: value for name, value in sums.items() if not name.startswith(WIDE)}
    for name in found:
        if (wide := by_name.get(WIDE + name)) is None:
            continue
        rounding = sum(
            math.ldexp(num_devices, -scalar.scale_bits - 1) for scalar in (wide, by_name[name])
        )
        if abs(sums[WIDE + name] - found[name]) > 1.01 * rounding:
            found[name] = sums[WIDE + name]
    return found


def is_metric(name: str) -> bool:
    """Whether a masked number is a metric of the task."""
    return name.startswith(METRIC)


def check_sums(
    sums: Mapping[str, float], scalars: Iterable[Scalar], *, num_devices: int, planned_weight: int
) -> None:
    """Check that the sums of ``num_devices`` devices are within their bounds.

    A malicious device can mask any number unseen. But a sum out of range could lead to a division
    by zero or the root of a negative number; it must cost no more than its round. Sums of devices
    whose examples weigh nothing are in range.

    Raises:
        SumOutOfRange: with the names of the numbers.
    """
    wrong = []
    is_empty = not any(sums.get(name, 0) for name in (WEIGHT, SUMMED_WEIGHT))
    for scalar in scalars:
        value = sums[scalar.name]
        bound = planned_weight if scalar.name == WEIGHT else largest_sum(scalar, num_devices)
        is_within = abs(value) <= bound
        is_within &= value > 0 or is_empty or scalar.name not in POSITIVE
        is_within &= value >= 0 or scalar.name not in NON_NEGATIVE
        if not is_within:
            wrong.append(scalar.name)
    if wrong:
        raise out_of_range_error(wrong, num_devices)


def out_of_range_error(names: Sequence[str], num_devices: int) -> SumOutOfRange:
    """Return the error of sums that devices which follow their plans cannot have."""
    return SumOutOfRange(
        f"{', '.join(names)}: the sums of {num_devices} devices are out of range; one of them "
        "masked a false number, and the masks hide which"
    )


def metric_sums_in(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the summed metrics by name."""
    return {
        name.removeprefix(METRIC): value
        for name, value in numbers.items()
        if name.startswith(METRIC)
    }


def noise_sums_in(numbers: Mapping[str, float]) -> NoiseSums:
    """Return the cohort's sums for the gradient noise scale."""
    return NoiseSums(
        weight=numbers[WEIGHT], **{part: numbers[NOISE + part] for part in NOISE_PARTS}
    )
