"""When masked plans are answered: a time for each, from public figures alone.

A server sees when a device is ready. If a device answered once its window is done, examples on
which the model is slow would show in that time. So a masked plan says when it is answered: its
predicted time, from the speed that the device measured before it had a model of the server's, times
``secure.answer_factor``. The device is idle for the rest, or leaves out what is not done by then.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwater.server.planning.planner import MAX_FINISH_SECONDS, Assigned
from headwater.server.planning.vitals_columns import Ints

# In less time a small window is mostly the scheduler's noise, and would be cut by it.
MIN_ANSWER_SECONDS = 0.5
# Of a cohort in which no client told its speed.
UNMEASURED_ANSWER_SECONDS = 60.0


def answer_times(
    assigned: Assigned, micro_batch_sizes: Ints, *, factor: float | None
) -> Sequence[float | None]:
    """Return when each plan is answered, in seconds from its arrival; None without a factor.

    A plan with a finish time is predicted to take that. A client that told no speed is given the
    pace of the cohort's slowest, as the client that is as slow as that must not be late.
    """
    if factor is None:
        return [None] * len(assigned)
    finish = assigned.finish_seconds(micro_batch_sizes)
    predicted = np.where(np.isnan(finish), assigned.predicted_seconds(micro_batch_sizes), finish)
    is_known = ~np.isnan(predicted)
    paces = (predicted / assigned.quota)[is_known]
    others = paces.max() * assigned.quota if len(paces) else UNMEASURED_ANSWER_SECONDS
    seconds = factor * np.where(is_known, predicted, others)
    times: list[float] = np.clip(seconds, MIN_ANSWER_SECONDS, MAX_FINISH_SECONDS).tolist()
    return times
