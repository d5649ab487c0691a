"""Watches the norms of opened sums: one member's masked vector must not end a model.

The masks hide each member's vector, but not the sum, and each member masks its squared norm too. So
two bounds hold for members that follow their plans, and a sum beyond one is thrown away and its
members are searched (``group_testing``):

* |sum of v_i|^2 <= n x sum of |v_i|^2 (Cauchy and Schwarz), to the ring's rounding. A member that
  changes its vector alone breaks it. Where a squared norm may have been clipped to its own bound
  (2^30 per unit of weight), nothing follows from it.
* The members' norm per unit of weight, sqrt(n x sum of |v_i|^2) / W, is at most ``multiple`` times
  the largest median of five opened sums so far, as for plain updates (``aggregation.norm_watch``).

What remains: a member that masks a fitting norm is bounded from the third opened sum on, and sends
just less than the limit. The sums of private rounds have no squared norms: their own norm is
watched, and the clip norm bounds what the ring holds of a member.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.common.secagg.fixed_point import CHUNK, block_norms
from headwater.common.secagg.hadamard_rotation import Rotation, steps_of
from headwater.common.secagg.masked_numbers import (
    SQUARED_NORM,
    merged_sums,
    out_of_range_error,
)
from headwater.common.secagg.protocol import WEIGHT
from headwater.common.secagg.scalar_encoding import Scalar
from headwater.server.secagg.unmask_phase import UnmaskedSum

NUM_RECENT, LEAST = 5, 3
TOLERANCE = 1.1
"""Of the first bound: the squared norms are masked in steps of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedNorms:
    """The norms of the last opened sums, and the largest median of them so far."""

    recent: tuple[float, ...] = ()
    largest_median: float | None = None

    def after(self, norm: float) -> OpenedNorms:
        """Return the norms after another sum that counts; a norm of 0 says nothing."""
        if not 0 < norm < math.inf:
            return self
        recent = (*self.recent, norm)[-NUM_RECENT:]
        if len(recent) < LEAST:
            return replace(self, recent=recent)
        largest = max(self.largest_median or 0.0, statistics.median_low(recent))
        return OpenedNorms(recent=recent, largest_median=largest)

    @staticmethod
    def of_json(row: Mapping[str, Any]) -> OpenedNorms:
        """Return the norms of a checkpoint; none yet from an empty row."""
        return OpenedNorms(**{**row, "recent": tuple(row.get("recent", ()))})

    def check(
        self,
        unmasked: UnmaskedSum,
        bounds: NDArray[np.float32] | None,
        *,
        multiple: float,
        may_weigh_nothing: bool = False,
    ) -> float:
        """Return a sum's norm per unit of weight, after both checks; 0 of a sum of weight 0.

        ``bounds`` are the block bounds of a rotated ring. ``may_weigh_nothing`` says that a vector
        may have no weight, as one that earlier rounds left.

        Raises:
            SumOutOfRange: the sum is beyond one of the two bounds, or has a vector and no weight: a
                member that takes the others' weights away cannot take their vectors.
        """
        number, weight = len(unmasked.survived), unmasked.numbers[WEIGHT]
        if weight <= 0:
            if not may_weigh_nothing and unmasked.vector_P.any():
                raise out_of_range_error(["a vector without a weight"], number)
            return 0.0
        scalars = unmasked.session.parameters.scalars
        squares = merged_sums(unmasked.numbers, scalars, num_devices=number)[SQUARED_NORM]
        norm, step = (one / weight for one in sum_norm(unmasked, bounds))
        told = math.sqrt(number * squares) / weight if squares else norm  # of a private round
        if 0 < squares < _largest_square(scalars):
            rounding = number * step * math.sqrt(len(unmasked.vector_P))
            if norm > TOLERANCE * told + rounding:
                raise out_of_range_error([f"a norm of {norm:.3g}, not {told:.3g}"], number)
        if self.largest_median is not None and told > multiple * self.largest_median:
            raise out_of_range_error(
                [f"a norm of {told:.3g} where {self.largest_median:.3g} was the most"], number
            )
        return told


def _largest_square(scalars: Iterable[Scalar]) -> float:
    """Return the largest squared norm that a device masks, less a rounding; 0 if it masks none."""
    bounds = (one.bound for one in scalars if one.name.endswith(SQUARED_NORM))
    return 0.999 * max(bounds, default=0.0)


def sum_norm(unmasked: UnmaskedSum, bounds: NDArray[np.float32] | None) -> tuple[float, float]:
    """Return the Euclidean norm of an opened sum, and the largest step of its ring.

    A rotation changes no norm.
    """
    parameters = unmasked.session.parameters
    encoding, block = parameters.encoding, CHUNK
    steps = np.array([math.ldexp(1.0, -encoding.scale_bits)])
    if parameters.rotation_seed is not None and bounds is not None:
        rotation = Rotation(seed=parameters.rotation_seed, num_coordinates=parameters.num_values)
        steps = steps * encoding.max_weight * bounds / steps_of(encoding.ring_bits)
        block = rotation.block
    norms = block_norms(unmasked.vector_P, block)
    return math.hypot(*(steps * norms)), float(steps.max())
