"""What a run on a fleet came to: how long the devices stood idle, and how full they were.

Read from the rows of rounds.jsonl, so that it holds for a run that was taken up again, and for any
engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.common.errors import OutOfMemory

# Rounds in which quotas settle to what was measured; the idle time is that of the rounds behind.
SETTLING_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle:
    """How long a round's devices waited for the last of them.

    ``share`` is 1 - mean(finish) / T over the devices that the planner was free to give more or
    less to, T or ``free_seconds`` the last finish among them; None where there was no such device.
    The others are counted apart, with the last finish of those bound by one micro-batch, which may
    lie behind T: ``share_of_all`` counts everybody, and waits for them too.
    """

    share: float | None
    share_of_all: float
    free_seconds: float
    num_free: int
    num_bound_by_data: int
    num_bound_by_micro_batch: int
    micro_batch_seconds: float


def idle_time(row: Mapping[str, Any]) -> Idle:
    """Return the idle time of a row of rounds.jsonl.

    Bound by its own data is a device that was asked for all its examples, or all that its epoch has
    left; by one micro-batch one that was asked for a single example, as no plan asks for less. A
    device that dropped out is not in the row's clients and does not count.
    """
    everybody, free, least, num_data = [], [], [], 0
    for client in _clients(row):
        seconds, plan = client["seconds"], client["plan"]
        everybody.append(seconds)
        if "all its " in plan or client["reason"] == "epoch end":
            num_data += 1
        elif client["num_examples"] == 1 and not plan.startswith("K set"):
            least.append(seconds)
        else:
            free.append(seconds)
    return Idle(
        share=_idle(free) if free else None,
        share_of_all=_idle(everybody),
        free_seconds=max(free, default=0.0),
        num_free=len(free),
        num_bound_by_data=num_data,
        num_bound_by_micro_batch=len(least),
        micro_batch_seconds=max(least, default=0.0),
    )


def _clients(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the clients of a row; of those of a masked round, what was asked is what is known."""
    masked = [
        {**client, "num_examples": client["planned_examples"], "reason": "quota"}
        for client in row.get("masked_clients", [])
    ]
    return [*row["clients"], *masked]


def _idle(seconds: Sequence[float]) -> float:
    last = max(seconds, default=0.0)
    # The mean may round to above the largest.
    return max(1 - math.fsum(seconds) / len(seconds) / last, 0.0) if last else 0.0


def idle_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say in a line what the rounds behind the third come to, or all if there are not so many."""
    settled = [row for row in rows if row["round"] > SETTLING_ROUNDS] or list(rows)
    idle = [idle_time(row) for row in settled]
    shares = [one.share for one in idle if one.share is not None]
    if not shares:
        return "no device that was free to be given more or less"
    rounds = f"rounds {settled[0]['round']} to {settled[-1]['round']}"
    last = idle[-1]
    line = f"{_mean(shares):.1%}, mean over {rounds}; in the last "
    line += f"{last.num_free} devices were done by {last.free_seconds:.2f} s; apart: "
    line += f"{last.num_bound_by_data} bound by their own data"
    if last.num_bound_by_micro_batch:
        line += (
            f", {last.num_bound_by_micro_batch} by one micro-batch of one example (the last of "
            f"them after {last.micro_batch_seconds:.2f} s)"
        )
    if any(one.num_bound_by_data or one.num_bound_by_micro_batch for one in idle):
        line += f"; with them {_mean([one.share_of_all for one in idle]):.1%}"
    return line


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fullest:
    """The device that came nearest to its memory limit, and those for which it was too low."""

    name: str
    peak_bytes: int
    limit_bytes: int
    over: frozenset[str]
    """Devices with a micro-batch that crossed their limit."""
    too_small: frozenset[str]
    """Devices that had no room for a single example, and did not begin."""


def fullest(rows: Sequence[Mapping[str, Any]], limit_bytes: Callable[[str], int]) -> Fullest | None:
    """Return the fullest device of a run; None if no device has answered.

    A micro-batch that crossed the limit failed, was done again in smaller ones, and counts with
    what it would have taken (``VirtualMemory``).
    """
    peaks: dict[str, int] = {}
    too_small: set[str] = set()
    for row in rows:
        for client in _clients(row):
            peaks[client["name"]] = max(peaks.get(client["name"], 0), client["peak_bytes"])
        too_small |= {
            name for name, why in row["refused"].items() if why.startswith(OutOfMemory.__name__)
        }
    if not peaks:
        return None
    name = max(peaks, key=lambda name: peaks[name] / limit_bytes(name))
    return Fullest(
        name=name,
        peak_bytes=peaks[name],
        limit_bytes=limit_bytes(name),
        over=frozenset(name for name, peak in peaks.items() if peak > limit_bytes(name)),
        too_small=frozenset(too_small),
    )


def memory_line(found: Fullest) -> str:
    """Say in a line how full the fullest device was, and how many were ever over their limit."""
    line = (
        f"device {found.name} was the fullest, at {found.peak_bytes / found.limit_bytes:.0%} of "
        f"{found.limit_bytes / 2**20:,.0f} MiB; {_counted(found.over)} ever over the limit"
    )
    if found.too_small:
        line += f"; {_counted(found.too_small)} too small for a single example"
    return line


def _counted(names: frozenset[str]) -> str:
    """Return a number of devices, with the first names."""
    if not names:
        return "0"
    first = sorted(names, key=lambda name: (len(name), name))
    return f"{len(names)} ({', '.join(first[:10])}{', ...' if len(first) > 10 else ''})"
