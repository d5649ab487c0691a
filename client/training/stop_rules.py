"""What ends a window: a request, the deadline, the round's finish, or the device's own restraint.

A quota is chosen so that all devices finish together, at the pace that each had in its last rounds;
the pace itself changes by up to a fifth from one round to the next. So a plan of the planner's says
when the quota is foreseen to be done, and the window ends with the example that ends nearest to
that, its last micro-batch cut to it. Nearest, and not before: at the pace that was foreseen it is
the quota, to the example, and those who are slower and faster make up for one another. Within what
a plan allows: ``Plan.fewest_examples`` to ``most_examples``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headwater.client.training.context import Restraint, Workplace
from headwater.common.messages import Plan, Step, StopReason

RECENT_STEPS = 8  # the slowest of these says how long the next may take
SENSE_SECONDS = 1.0  # between two looks at battery, heat and load, each of which costs time


class Watch:
    """Looks, between micro-batches, for a reason to send what is there."""

    def __init__(self, plan: Plan, place: Workplace, start_seconds: float) -> None:
        self._plan = plan
        self._place = place
        self._start_seconds = start_seconds
        self._restraint = Restraint()
        self._allowed = math.inf
        self._sense_at = -math.inf
        self._feel()

    def reason_to_stop(
        self, steps: Sequence[Step], *, num_done: int, num_next: int
    ) -> StopReason | None:
        """Return why the next micro-batch, of ``num_next`` examples, is not to be begun.

        Asked to stop; the micro-batch would end after the deadline, by the slowest of the last
        ``steps``; or it would pass what the device gives at the moment, by its settings.
        """
        if self._place.stop():
            return "asked to stop"
        if self._plan.deadline_seconds is not None:
            slowest = max((step.seconds for step in steps[-RECENT_STEPS:]), default=0.0)
            now = self._place.clock.seconds()
            if now - self._start_seconds + slowest > self._plan.deadline_seconds:
                return "deadline"
        self._feel()
        return self._restraint.reason if num_done + num_next > self._allowed else None

    def _feel(self) -> None:
        """Let the device say, about once a second, what share of the quota it gives.

        Quota x (share / the share that the plan counts on). Where the plan counts on none, K was
        set by hand, and nothing is taken off.
        """
        counted = self._plan.share
        if counted is None or (now := self._place.clock.seconds()) < self._sense_at:
            return
        self._sense_at = now + SENSE_SECONDS
        self._restraint = self._place.restraint()
        given = self._restraint.share
        self._allowed = self._plan.quota * given / counted if given < counted else math.inf


def num_until_finish(
    plan: Plan, steps: Sequence[Step], *, passed_seconds: float, num_done: int
) -> int | None:
    """Return how many examples more bring a window nearest to its finish.

    ``passed_seconds`` are those since it began, and ``num_done`` its examples so far. By the pace
    of the last ``steps`` together; and as many at least as the plan's fewest. None where the plan
    has no finish, or nothing can be told of the pace.
    """
    if plan.finish_seconds is None:
        return None
    recent = steps[-RECENT_STEPS:]
    seconds = math.fsum(step.seconds for step in recent)
    if seconds == 0:
        return None
    left_seconds = max(plan.finish_seconds - passed_seconds, 0.0)
    nearest = left_seconds / seconds * sum(step.num_examples for step in recent)
    if not math.isfinite(nearest):  # a clock that hardly moved
        return None
    return max(round(nearest), plan.fewest_examples - num_done, 0)
