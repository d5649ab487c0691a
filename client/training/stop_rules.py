"""Rules that end a window: the deadline, the finish time, the answer, the device's time share.

The planner chooses quotas so that all clients finish together, at the pace of their last rounds.
The pace changes by up to a fifth from one round to the next. A plan therefore says at what time the
quota should be done (``finish_seconds``), and the window ends at the example that is done nearest
to that time; the last micro-batch is shortened for it. At the predicted pace this is exactly the
quota, and slower and faster clients offset each other. The number of examples stays between the
plan's ``min_examples`` and ``max_examples``.

A plan with an answer time is answered then, whatever the data (``Plan.answer_by``), and its window
ends before that. Not one that had to be taken apart, nor one with noise for single examples: by
their time some examples would decide about others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from headwater.client.device.interfaces import TimeShare
from headwater.client.training.context import TrainingContext
from headwater.client.training.window_sum import WindowSum
from headwater.common.data.example_lengths import Positions
from headwater.common.messages import Plan, Step, StopReason

RECENT_STEPS = 8  # the pace, and the slowest step, are taken from so many of the last steps
# The part of an answer time in which its window is summed; the rest is for what comes after.
SUMMED_PART = 0.9
SENSE_SECONDS = 1.0  # between two readings of battery, heat and load, each of which takes time


class StopRules:
    """Decides between micro-batches whether the window ends."""

    def __init__(self, plan: Plan, context: TrainingContext, start_seconds: float) -> None:
        self._plan = plan
        self._context = context
        self._start_seconds = start_seconds
        self._answer_by = plan.answer_by
        limits = (self._answer_by, plan.deadline_seconds, plan.finish_seconds, plan.share)
        self.has_limit = any(limit is not None for limit in limits)
        """Whether the plan has a time, or assumes a share of the device's time.

        Without one, nothing but a request to stop or memory ends a window before its quota.
        """
        deadline = plan.deadline_seconds
        self.half_seconds = math.inf if deadline is None else start_seconds + deadline / 2
        """The time by the clock when half of that to the deadline has passed."""
        self._time_share = TimeShare()
        self._max_examples = math.inf
        self._sense_at = -math.inf
        self._begun_seconds: float | None = None
        self._attempts: deque[float] = deque(maxlen=RECENT_STEPS)
        """Seconds of the last micro-batches by their size."""
        self._read_time_share()

    def note_attempt(self, positions: Positions, seconds: float) -> None:
        """Note how long a micro-batch took, also one that failed."""
        self._attempts.append(seconds / self._context.size(positions))

    def reason_to_end(
        self, total: WindowSum, before: WindowSum, passed_seconds: float
    ) -> StopReason | None:
        """Return why the next micro-batch of a window may not begin by these limits, or None.

        It is shortened if only a part of it is in time. ``before`` has the totals of the plan's
        earlier windows; ``passed_seconds`` is the time since this one began.
        """
        if self._plan.uses_whole_window or total.are_apart or before.are_apart:
            return self._reason_of_share(total, before)
        more = self._num_until_answer(total.remaining[0])
        if more == 0:
            return "deadline"
        if more is not None:
            total.limit_next(more)
        if not (total.done or before.done):
            return None
        steps = total.steps or before.steps
        num_done = total.num_examples + before.num_examples
        if self._plan.finish_seconds is not None:
            more = num_until_finish(
                *(self._plan, steps),
                passed_seconds=passed_seconds,
                num_done=num_done,
                each=self._context.size_of_each(total.remaining[0]),
            )
            if more == 0:
                return "finish"
            if more is not None:
                total.limit_next(more)
        return self._reason_to_stop(steps, num_done=num_done, num_next=len(total.remaining[0]))

    def _num_until_answer(self, positions: Positions) -> int | None:
        """Return how many more examples can be summed in time for the plan's answer.

        By the slowest pace of the last micro-batches, from the first call on, which is when the
        window begins, and the size of an example of the next micro-batch, at ``positions``. None:
        as many as are left; the first micro-batch is always tried.
        """
        end = self._answer_by
        if end is None:
            return None
        now = self._context.clock.seconds()
        self._begun_seconds = now if self._begun_seconds is None else self._begun_seconds
        slowest = max(self._attempts, default=0.0)
        if slowest == 0.0:
            return None
        left_seconds = SUMMED_PART * end - (now - self._begun_seconds)
        each = self._context.size_of_each(positions)
        return max(math.floor(left_seconds / (slowest * each)), 0)

    def _reason_to_stop(
        self, steps: Sequence[Step], *, num_done: int, num_next: int
    ) -> StopReason | None:
        """Return why the next micro-batch, of ``num_next`` examples, may not begin, or None.

        Reasons: it would end after the deadline if it took as long as the slowest of the last
        ``steps``; it would exceed the examples of the device's current time share.
        """
        if self._plan.deadline_seconds is not None:
            slowest = max((step.seconds for step in steps[-RECENT_STEPS:]), default=0.0)
            now = self._context.clock.seconds()
            if now - self._start_seconds + slowest > self._plan.deadline_seconds:
                return "deadline"
        return self._beyond_share(num_done + num_next)

    def _reason_of_share(self, total: WindowSum, before: WindowSum) -> StopReason | None:
        """Return why a window ends that no clock ends, as what an example takes is its own.

        With noise for single examples, each is in the sum whatever the others take; a masked window
        that was taken apart is summed to its end. Who is late with it is not in the round.
        """
        if not (total.done or before.done):
            return None
        num_done = total.num_examples + before.num_examples
        return self._beyond_share(num_done + len(total.remaining[0]))

    def _beyond_share(self, num_examples: int) -> StopReason | None:
        """Return why so many examples are more than the device's current time share allows."""
        self._read_time_share()
        return self._time_share.reason if num_examples > self._max_examples else None

    def _read_time_share(self) -> None:
        """Read the device's time share, about once a second, and limit the examples by it.

        The limit is quota x (share / the share that the plan assumes). A plan that assumes none has
        its K set by hand, and is not limited.
        """
        assumed = self._plan.share
        if assumed is None or (now := self._context.clock.seconds()) < self._sense_at:
            return
        self._sense_at = now + SENSE_SECONDS
        self._time_share = self._context.time_share()
        share = self._time_share.share
        self._max_examples = self._plan.quota * share / assumed if share < assumed else math.inf


def num_until_finish(
    plan: Plan,
    steps: Sequence[Step],
    *,
    passed_seconds: float,
    num_done: int,
    each: float = 1.0,
) -> int | None:
    """Return how many more examples, of size ``each``, end the window nearest to its finish time.

    By the pace of the last ``steps`` together, and at least up to the plan's fewest examples.
    ``passed_seconds`` is the time since the window began, and ``num_done`` its examples so far.
    None if the plan has no finish time, or the pace is unknown.
    """
    if plan.finish_seconds is None:
        return None
    recent = steps[-RECENT_STEPS:]
    seconds = math.fsum(step.seconds for step in recent)
    if seconds == 0:
        return None
    left_seconds = max(plan.finish_seconds - passed_seconds, 0.0)
    nearest = left_seconds / seconds * sum(step.work for step in recent) / each
    if not math.isfinite(nearest):  # the clock hardly moved
        return None
    return max(round(nearest), plan.min_examples - num_done, 0)
