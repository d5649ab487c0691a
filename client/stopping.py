"""What ends a window before its quota: a request, the deadline, or the device's own restraint."""

from __future__ import annotations

import math
from collections.abc import Sequence

from client.workplace import Restraint, Workplace
from common.update import Plan, Step, StopReason

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
