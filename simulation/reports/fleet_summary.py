"""Summarizes a run on a fleet: the devices' idle time and their peak memory.

It reads the rows of rounds.jsonl, so it is right for a resumed run and for every engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.common.errors import OutOfMemory
from headwater.common.wording import bytes_text, counted, natural
from headwater.server.rounds.round_row import figure_of

# In the first rounds the quotas adapt to the measured speeds; their idle time is not counted.
SETTLING_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleTime:
    """How long a round's devices waited for the slowest device.

    ``share`` is 1 - mean(finish) / T over the free devices: those whose quota the planner could
    raise or lower. T, or ``free_seconds``, is the last finish of these; without free devices
    ``share`` is None. The other devices are counted separately. A device at its minimum, which is
    one example, or a few if its link is slow, may finish after T; ``share_of_all`` includes all
    devices and waits for the last of all.
    """

    share: float | None
    share_of_all: float
    free_seconds: float
    num_free: int
    num_limited_by_data: int
    num_at_minimum: int
    minimum_seconds: float


def idle_time(row: Mapping[str, Any]) -> IdleTime:
    """Return the idle time of a row of rounds.jsonl.

    A device is limited by its data if its plan is for all its examples. It is at the minimum if its
    plan is for a single example, or bound by its link. A device that dropped out is not among the
    row's clients and does not count.
    """
    everybody, free, minimum, num_data = [], [], [], 0
    figures = (figure_of(row, name) for name in ("seconds", "plan", "num_examples"))
    for seconds, plan, num_examples in zip(*figures, strict=True):
        everybody.append(seconds)
        if "all its " in plan:
            num_data += 1
        elif plan.startswith("link-bound") or (num_examples == 1 and not plan.startswith("K set")):
            minimum.append(seconds)
        else:
            free.append(seconds)
    return IdleTime(
        share=_idle(free) if free else None,
        share_of_all=_idle(everybody),
        free_seconds=max(free, default=0.0),
        num_free=len(free),
        num_limited_by_data=num_data,
        num_at_minimum=len(minimum),
        minimum_seconds=max(minimum, default=0.0),
    )


def _idle(seconds: Sequence[float]) -> float:
    last = max(seconds, default=0.0)
    # By rounding, the mean may exceed the largest value.
    return max(1 - math.fsum(seconds) / len(seconds) / last, 0.0) if last else 0.0


def idle_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a line on the idle time after SETTLING_ROUNDS; of all rounds if there are fewer."""
    settled = [row for row in rows if row["round"] > SETTLING_ROUNDS] or list(rows)
    idle = [idle_time(row) for row in settled]
    shares = [one.share for one in idle if one.share is not None]
    if not shares:
        return "no device whose quota the planner could raise or lower"
    rounds = f"rounds {settled[0]['round']} to {settled[-1]['round']}"
    last = idle[-1]
    line = f"{_mean(shares):.1%}, mean over {rounds}; in the last "
    line += (
        f"{counted(last.num_free, 'device')} finished by {last.free_seconds:.2f} s; not counted: "
    )
    line += f"{last.num_limited_by_data} limited by their own data"
    if last.num_at_minimum:
        line += (
            f", {last.num_at_minimum} at the minimum (the last of "
            f"them after {last.minimum_seconds:.2f} s)"
        )
    if any(one.num_limited_by_data or one.num_at_minimum for one in idle):
        line += f"; with them {_mean([one.share_of_all for one in idle]):.1%}"
    return line


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakMemory:
    """The device with the highest peak relative to its limit, and the devices over their limit."""

    name: str
    peak_bytes: int
    limit_bytes: int
    over: frozenset[str]
    """Devices with a micro-batch that crossed their limit."""
    too_small: frozenset[str]
    """Devices whose memory does not fit a single example, and which therefore did not train."""


def peak_memory(
    rows: Sequence[Mapping[str, Any]], limit_bytes: Callable[[str], int]
) -> PeakMemory | None:
    """Return the peak memory of a run; None if no device has replied.

    A micro-batch over the limit fails and is repeated in smaller ones, but counts with the memory
    that it would have taken (``VirtualMemory``).
    """
    peaks: dict[str, int] = {}
    too_small: set[str] = set()
    for row in rows:
        for name, peak in zip(figure_of(row, "name"), figure_of(row, "peak_bytes"), strict=True):
            if peak is not None:  # in a masked round only the device knows
                peaks[name] = max(peaks.get(name, 0), peak)
        too_small |= {
            name
            for name, reason in row["refused"].items()
            if reason.startswith(OutOfMemory.__name__)
        }
    if not peaks:
        return None
    name = max(peaks, key=lambda name: peaks[name] / limit_bytes(name))
    return PeakMemory(
        name=name,
        peak_bytes=peaks[name],
        limit_bytes=limit_bytes(name),
        over=frozenset(name for name, peak in peaks.items() if peak > limit_bytes(name)),
        too_small=frozenset(too_small),
    )


def memory_line(peak: PeakMemory) -> str:
    """Return a line about the fullest device and the number of devices over their limit."""
    line = (
        f"device {peak.name} was the fullest, at {peak.peak_bytes / peak.limit_bytes:.0%} of "
        f"{bytes_text(peak.limit_bytes)}; {_counted(peak.over)} ever over the limit"
    )
    if peak.too_small:
        line += f"; {_counted(peak.too_small)} too small for a single example"
    return line


def _counted(names: frozenset[str]) -> str:
    """Return the number of devices, with the first names."""
    if not names:
        return "0"
    first = sorted(names, key=natural)
    return f"{len(names)} ({', '.join(first[:10])}{', ...' if len(first) > 10 else ''})"
