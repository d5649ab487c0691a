"""The device's own policy for masked plans: what it refuses before it trains on any example.

A check here depends on the plan, on the device's settings and on what it told the server before,
never on an example: a refusal is a message that the server reads.
"""

from __future__ import annotations

from headwater.common.errors import CountOutOfRange
from headwater.common.messages import Plan


def check_plan(plan: Plan, *, name: str, told_examples: int | None) -> None:
    """Check a masked plan. ``told_examples`` is the number of examples that the server was told.

    Raises:
        CountOutOfRange: the update would be weighed by more examples than the server was told.
    """
    if plan.weigh_as is not None and plan.weigh_as > (told_examples or 0):
        raise CountOutOfRange(
            f"{name}, round {plan.round}: the plan weighs the update as {plan.weigh_as:,} "
            f"examples, the device told of {told_examples or 0:,}"
        )
