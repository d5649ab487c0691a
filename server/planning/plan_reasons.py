"""The reasons of plans in words: what bound a client's quota and micro-batch, or left it out.

The texts are part of the client's plan, of rounds.jsonl and of ``headwater-server plan --explain``.
"""

from __future__ import annotations

import math

from headwater.common.messages import MAX_STEPS
from headwater.common.wording import bytes_text, counted
from headwater.server.planning.equal_finish import LINK_BOUND
from headwater.server.planning.memory_limit import SizeBound
from headwater.server.planning.planner import Assignment

# A turn or a transfer is mentioned if it takes at least this part of the round.
NOTABLE = 0.05


def of_plan(
    assignment: Assignment,
    *,
    finish_seconds: float | None = None,
    quota_words: str | None = None,
    more_words: str = "",
) -> str:
    """Return what bound the quota and the micro-batch size; ``quota_words`` replace the first.

    As in "speed-bound: 40 examples until 10.2 s; memory-bound: 3 examples fit in 410 MB".
    """
    if assignment.exception is not None:
        return f"{assignment.exception}; {_of_size(assignment)}"
    until = "" if finish_seconds is None else f" until {_seconds(finish_seconds)}"
    quota = _of_quota(assignment) if quota_words is None else quota_words
    return f"{quota}{until}{_of_cuts(assignment)}{more_words}; {_of_size(assignment)}"


def of_too_slow(seconds: float, of_seconds: float) -> str:
    """Return why a client is left out that needs ``seconds`` for one example."""
    return f"one example takes {_seconds(seconds)} of its {_seconds(of_seconds)}"


def of_lateness(times: int) -> str:
    """Return why a client is left out that was late several times in a row."""
    return f"it came too late {times} times in a row"


def _of_quota(assignment: Assignment) -> str:
    quota, steps = assignment.quota, assignment.accumulation_steps
    owned, size = assignment.num_examples, assignment.max_micro_batch_size
    if steps is not None:
        is_short = quota < steps * size and quota == owned
        return f"K set to {steps}" + (f", all its {counted(quota, 'example')}" if is_short else "")
    if quota == owned:
        return f"all its {counted(quota, 'example')}"
    if quota == MAX_STEPS * size:
        return f"{counted(quota, 'example')}: {MAX_STEPS} micro-batches at the most"
    bound = "link" if assignment.transfers >= LINK_BOUND else "speed"
    return f"{bound}-bound: {counted(quota, 'example')}"


def _of_cuts(assignment: Assignment) -> str:
    """Return what made the quota smaller than the client's speed alone would."""
    vitals, row, text = assignment.known.vitals, assignment.row, ""
    if assignment.accumulation_steps is not None:
        return text
    if assignment.speed_cut > 1:
        text += f", said to be {_times(assignment.speed_cut)} times as fast as is believed"
    if (share := float(vitals.share[row])) < 1:
        cause = " on battery" if vitals.is_on_battery[row] == 1 else ""
        text += f", giving {share:.0%} of its time{cause}"
    if NOTABLE <= assignment.transfers < LINK_BOUND:
        text += f", its transfers {assignment.transfers:.0%} of the round"
    if assignment.ahead >= NOTABLE:
        text += f", its turn {assignment.ahead:.0%} before the end"
    return text


def _of_size(assignment: Assignment) -> str:
    size, bound = assignment.max_micro_batch_size, assignment.size_bound
    limit = float(assignment.known.vitals.memory_limit_bytes[assignment.row])
    if assignment.quota <= size and bound is not SizeBound.SET:
        return "in one micro-batch"
    if bound is SizeBound.MEMORY and not math.isnan(limit):
        fit = "fits" if size == 1 else "fit"
        return f"memory-bound: {counted(size, 'example')} {fit} in {bytes_text(limit)}"
    if bound is SizeBound.FASTEST:
        return f"fastest measured: {size}"
    return f"micro-batch {bound.value}"


def _times(factor: float) -> str:
    if factor > 1e6:
        return "over a million"
    return f"{factor:,.0f}" if factor >= 10 else f"{factor:.2g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds:.2g} s"
