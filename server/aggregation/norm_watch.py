"""Watches the norms of plain updates: one finite vector of 3e38 must not end a model.

An update's norm per unit of its weight is held against the cohort's. The reference is the largest
median of any round so far: gradients shrink while a model learns, and late in a run most devices
may send nearly nothing while an honest one still has a hard example. A median moves only if half
of a round's updates lie (the bound on norms is that of Sun et al. 2019, "Can You Really Backdoor
Federated Learning?", section 4, with the cohort's own median instead of a constant).

* While no median is known, the limit is ``LARGEST_NORM``: its square does not fit in float32.
* After a round of 3 or more updates their median is known. If an update of the first such round is
  beyond ``multiple`` times the median, the round is repeated, now with a limit.
* From then on the limit is ``multiple`` times the largest median.

An attacker who knows the limit sends just less: the watch bounds what one update can do, and does
not find attackers. With one or two devices no median tells who is wrong. Of masked updates the
sums are watched (``server.secagg.opened_norms``). Updates that a simulator computes together
are not watched, for it made them itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from torch import Tensor

from headwater.common.errors import OutlierInRound
from headwater.common.sums.encoded_vector import Vector, norm_squared

MIN_UPDATES = 3
LARGEST_NORM = 2.0**63


@dataclass(frozen=True, kw_only=True, slots=True)
class NormWatch:
    """The largest median of a round so far, and the multiple of it that an update may have."""

    multiple: float
    largest_median: float | None = None

    @property
    def limit(self) -> float:
        """The largest norm per unit of weight."""
        if self.largest_median is None:
            return LARGEST_NORM
        return min(self.multiple * self.largest_median, LARGEST_NORM)

    def after(self, norms: Sequence[float]) -> NormWatch:
        """Return the watch after a round; ``norms`` are those of all its updates, also refused."""
        known = [norm for norm in norms if 0 < norm < math.inf]
        if len(known) < MIN_UPDATES:
            return self
        median = statistics.median_low(known)
        return replace(self, largest_median=max(self.largest_median or 0.0, median))

    def check_first(self, norms: Mapping[str, float], *, round_number: int) -> None:
        """Check the norms of the first round that has a median, by the clients' names.

        Raises:
            OutlierInRound: the largest is far above the median.
        """
        name, norm = max(norms.items(), key=itemgetter(1), default=("", 0.0))
        if norm > self.limit:
            raise OutlierInRound(
                f"round {round_number}: the norm of {name} per unit of weight is "
                f"{norm:.3g}, more than {self.multiple:g} times the median"
            )


def norm_per_weight(values_P: Vector, weight: int) -> float:
    """Return the Euclidean norm of an update's mean gradient; of its step after local steps.

    An update of weight 0 is held against the norms of single units of weight.
    """
    return math.sqrt(norm_squared(values_P)) / max(weight, 1)


def scaled_to(values_P: Tensor, *, norm: float, limit: float) -> Tensor:
    """Return a vector of this norm with at most the norm ``limit``; unchanged, or a copy."""
    if norm <= limit:
        return values_P
    # In float64: the factor of a vector of 3e38 is below what float32 resolves.
    return (values_P.double() * (limit / norm)).float()
