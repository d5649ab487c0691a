"""The log of the examples that devices leave out of their training."""

from __future__ import annotations

import logging

from headwater.client.training.context import TrainingContext
from headwater.client.training.window_sum import WindowSum
from headwater.common.data.example_faults import details, short_summary
from headwater.common.messages import Plan
from headwater.common.wording import counted

log = logging.getLogger(__name__)


class LeftOutLog:
    """Logs what training leaves out: at first, and when it is more, or of a new kind.

    The simulator's devices share one: a line of each of thousands would hide the rest of the log.
    """

    def __init__(self) -> None:
        self._most = 0
        self._kinds: set[str] = set()

    def note(self, plan: Plan, total: WindowSum, context: TrainingContext) -> None:
        """Log how many examples of a window were left out and why, unless that is known.

        An exception's text, with the user's own lines, is logged once for each kind of exception.
        """
        faults = {p: total.faults[p] for p in total.refused if p in total.faults}
        kinds = {fault.kind for fault in faults.values()} - self._kinds
        if len(total.refused) <= self._most and not kinds:
            return
        self._most = max(self._most, len(total.refused))
        self._kinds |= kinds
        log.warning(
            "%s, round %d: %d of %s cannot be trained on and were left out: %s",
            context.name,
            plan.round,
            len(total.refused),
            counted(total.num_examples + len(total.refused), "example"),
            short_summary(faults, context.examples),
        )
        for kind, detail in details(faults).items():
            if kind in kinds:
                log.warning("%s: %s: %s", context.name, kind, detail)
