"""A running client's activity as text: a line that a terminal renews, and lines elsewhere."""

from __future__ import annotations

import time

from rich.filesize import decimal
from rich.text import Text

from headwater.client.operations.activity import COMPUTING, Activity
from headwater.client.training.progress import TrainingProgress
from headwater.common.messages import Plan
from headwater.common.system.live_status import duration, line_of, pack
from headwater.common.system.printable import printable
from headwater.common.wording import counted

# A shorter wait has no duration in a terminal: it would only flicker.
SHOWN_SECONDS = 2.0
# Lines about one wait become rarer up to this, so that an idle night does not fill the journal.
LONGEST_SILENCE_SECONDS = 300.0


class ClientDisplay:
    """The text of an activity."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity

    def block(self, width: int) -> list[Text]:
        """Return what the client does, in one line of ``width`` columns if it fits."""
        seconds = time.monotonic() - self._activity.since
        return pack(self._parts(seconds if seconds >= SHOWN_SECONDS else None), width)

    def wait_line(self) -> str:
        """Return what the client does, and since when, as one line."""
        return line_of(self._parts(time.monotonic() - self._activity.since))

    def sent_line(self) -> str:
        """Return the update that has arrived at the server, as one line."""
        work = self._activity.sent_work
        is_masked = work.plan is not None and work.plan.hides_data
        seconds = "" if is_masked else duration(work.seconds)
        return line_of([*self._done(work, "sent"), seconds, self._bytes()])

    def _parts(self, seconds: float | None) -> list[str]:
        activity, progress = self._activity, self._activity.progress
        plan = progress.plan
        since = "" if seconds is None else f" since {duration(float(round(seconds)))}"
        if activity.stage == COMPUTING and plan is not None:
            if plan.hides_data:
                return [f"{self._planned(plan)}, computes{since}", self._bytes()]
            step = min(progress.num_steps + 1, plan.accumulation_steps)
            micro_batch = f"micro-batch {step} of {plan.accumulation_steps}"
            pace, left_out = _pace(progress), _left_out(progress)
            examples = f"{progress.num_examples:,}/{counted(plan.quota, 'example')}{pace}"
            return [f"round {plan.round}", micro_batch, examples, left_out, self._bytes()]
        stage = f"{printable(activity.stage)}{since}"
        if activity.num_bytes:
            moved = decimal(activity.num_moved)
            stage = f"{printable(activity.stage)}: {moved} of {decimal(activity.num_bytes)}"
        return [*self._done(progress, ""), stage, self._bytes()]

    def _done(self, progress: TrainingProgress, verb: str) -> list[str]:
        """Return a plan's round and the work on it.

        Of a masked update the plan is shown, as in the client's metrics: the operator of the server
        may collect this log, and the masks hide from the server how much of the plan was done.
        """
        plan = progress.plan
        if plan is None:
            return []
        if plan.hides_data:
            return [", ".join(filter(None, (self._planned(plan), verb)))]
        head = f"round {plan.round}: {verb}".rstrip()
        done = counted(progress.num_examples, "example")
        return [f"{head} K {progress.num_steps}, {done}{_pace(progress)}", _left_out(progress)]

    def _planned(self, plan: Plan) -> str:
        k = plan.accumulation_steps
        return f"round {plan.round}: masked update, planned K {k}, {counted(plan.quota, 'example')}"

    def _bytes(self) -> str:
        counters = self._activity.counters
        return f"down {decimal(counters.received_bytes)}, up {decimal(counters.sent_bytes)}"


def _pace(progress: TrainingProgress) -> str:
    pace = progress.examples_per_second
    if pace is None:
        return ""
    return f", {pace:,.0f}/s" if pace >= 100 else f", {pace:.3g}/s"


def _left_out(progress: TrainingProgress) -> str:
    number = progress.num_left_out
    return f"{number:,} left out" if number else ""
