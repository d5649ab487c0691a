"""How much an update counts that was computed at an older model.

An update of staleness s counts d(s) = (1 + s)^-exponent times (Nguyen et al. 2022, "Federated
Learning with Buffered Asynchronous Aggregation", section 4). Here both its sum and its weight are
multiplied by d(s), so that the step is a weighted mean of gradients over the buffer. FedBuff
multiplies the sum alone and divides by the number of updates: then a buffer of stale updates takes
a smaller step, and a device with twice the examples of another has the same part. A mean of
(sum, weight) pairs needs both.

d(s) is rounded to a number of 1/1024, at least one. So sum and weight are multiplied by the same
integer, and the division by 1024 cancels: a buffer of fresh updates gives the bits of a synchronous
round. The rounding changes d(s) by at most 1/2048.

An update of many windows, summed without a link, would be nearly all of a step. If it has more
windows than the step has other updates, each of them counts for less.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass

from headwater.common.errors import StaleUpdate
from headwater.common.messages import Plan
from headwater.common.settings.schema import AsynchronousSettings

TIMES_OF_FRESH = 1024


def times_of(staleness: int, exponent: float) -> int:
    """Return d(s) in 1/1024, 1 to 1024; 1024 at staleness 0."""
    discount: float = (1 + staleness) ** -exponent
    return max(round(TIMES_OF_FRESH * discount), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessRule:
    """The rule of one step, which is taken from the model ``version``."""

    version: int
    chosen: AsynchronousSettings
    num_others: int
    """The updates of a full buffer but one."""

    def staleness(self, plan: Plan) -> int:
        """Return the steps taken since the model that a plan was sent with."""
        return self.version - plan.model_version

    def times(self, plan: Plan, num_windows: int = 1) -> int:
        """Return how many times the sum and the weight of a plan's update count.

        The windows of one update count no more than the others of the step, one each; in a step
        without others they count as they are.
        """
        found, most = times_of(self.staleness(plan), self.chosen.exponent), self.num_others
        return max(found * most // num_windows, 1) if 0 < most < num_windows else found

    def check(self, name: str, model_version: int) -> None:
        """Check that an update of a model may enter the buffer.

        Raises:
            StaleUpdate: the model is too many steps old.
        """
        found = self.version - model_version
        if found > self.chosen.max_staleness:
            raise StaleUpdate(
                f"{name}: its update is of model {model_version}, {found} steps ago; at most "
                f"{self.chosen.max_staleness} are allowed"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessFigures:
    """The staleness of a buffer's updates, for the round's row."""

    mean: float
    most: int
    discounted_weight: float
    """The sum of d(s) times the weights."""


def figures_of(
    rule: StalenessRule, plans: Collection[Plan], *, summed_times: int
) -> StalenessFigures:
    """Return the figures of a buffer with these plans; ``summed_times`` is the sum's own weight."""
    found = [rule.staleness(plan) for plan in plans]
    return StalenessFigures(
        mean=statistics.fmean(found),
        most=max(found),
        discounted_weight=summed_times / TIMES_OF_FRESH,
    )
