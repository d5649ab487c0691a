"""Why a device is asked for so much, or for nothing: what bound each figure, in words.

The words go into the device's plan, rounds.jsonl and ``headwater-server plan --explain``.
"""

from __future__ import annotations

from headwater.common.messages import MOST_STEPS
from headwater.server.planning.planner import Assignment, SizeBound, TooSlow

# A turn is told if the device must be done so much of the round before its end, and a link if its
# transfers take so much of it.
NOTABLE = 0.05


def of_plan(assignment: Assignment, *, finish_seconds: float | None = None) -> str:
    """Say what bound the quota and the micro-batch size.

    As in "speed-bound: 40 examples until 10.2 s; memory-bound: 3 examples fit in 410 MiB".
    """
    if assignment.device.asked_anyway is not None:
        return f"{assignment.device.asked_anyway}; {_of_size(assignment)}"
    until = "" if finish_seconds is None else f" until {_seconds(finish_seconds)}"
    return f"{_of_quota(assignment)}{until}{_besides(assignment)}; {_of_size(assignment)}"


def of_leaving_out(found: TooSlow) -> str:
    """Say why a device has no part in a round."""
    return f"one example takes {_seconds(found.seconds)} of its {_seconds(found.of_seconds)}"


def of_coming_late(times: int) -> str:
    """Say why a device that stalls has no part in a round."""
    return f"it came too late {times} times in a row"


def _of_quota(assignment: Assignment) -> str:
    quota, device, steps = assignment.quota, assignment.device, assignment.accumulation_steps
    if steps is not None and quota == steps * assignment.fitting:
        return f"K set to {steps}"
    if quota == device.num_examples:
        text = f"all its {_examples(quota)}"
    elif quota == device.num_left:
        text = f"all its epoch has left: {_examples(quota)}"
    elif quota == MOST_STEPS * assignment.fitting:
        text = f"{_examples(quota)}: {MOST_STEPS} micro-batches at the most"
    elif assignment.transfers >= 1:
        text = f"link-bound: {_examples(quota)}"
    else:
        text = f"speed-bound: {_examples(quota)}"
    return text if steps is None else f"K set to {steps}; {text}"


def _besides(assignment: Assignment) -> str:
    """Say what made the quota smaller than the device's speed alone would."""
    vitals, text = assignment.device.learned.vitals, ""
    if assignment.accumulation_steps is not None:
        return text
    if assignment.is_bounded:
        text += f", said to be {_times(assignment.slowed)} times as fast as is believed"
    if vitals.share < 1:
        cause = " on battery" if vitals.is_on_battery else ""
        text += f", giving {vitals.share:.0%} of its time{cause}"
    if NOTABLE <= assignment.transfers < 1:
        text += f", its transfers {assignment.transfers:.0%} of the round"
    if assignment.ahead >= NOTABLE:
        text += f", its turn {assignment.ahead:.0%} before the end"
    return text


def _of_size(assignment: Assignment) -> str:
    fitting, bound = assignment.fitting, assignment.size_bound
    limit = assignment.device.learned.vitals.memory_limit_bytes
    if assignment.quota <= fitting and bound is not SizeBound.SET:
        return "in one micro-batch"
    if bound is SizeBound.MEMORY and limit is not None:
        fit = "fits" if fitting == 1 else "fit"
        return f"memory-bound: {_examples(fitting)} {fit} in {limit / 2**20:.0f} MiB"
    if bound is SizeBound.FASTEST:
        return f"fastest measured: {fitting}"
    return f"micro-batch {bound.value}"


def _examples(number: int) -> str:
    return f"{number} example{'' if number == 1 else 's'}"


def _times(factor: float) -> str:
    if factor > 1e6:
        return "over a million"
    return f"{factor:,.0f}" if factor >= 10 else f"{factor:.2g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds:.2g} s"
