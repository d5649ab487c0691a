"""The planner: memory sets each device's micro-batch, compute its quota, and K follows.

The micro-batch is the largest that the device's memory holds with a margin, up to the size beyond
which it measured no gain. Quotas are by equal finish (``headwater.server.planning.round_plans.equal_finish``): nobody waits for
the slow one. Pure functions of what the devices told and the server learned; each plan says what
bound it (``headwater.server.planning.round_plans.plan_reasons``).

What is told may be false. Speed is believed up to FARTHEST times that of the cohort's median device
with the same micro-batch; what is cut off is counted and said. So a lying device can still:

* be asked for as much as FARTHEST median devices of the memory that it claims, and send nothing, or
  a false sum. The others' quotas are smaller for it, and never zero.
* be asked for a single example, by claiming a century for each, little memory or a slow link. That
  costs the others nothing but its turn at the server.
* keep a round without a deadline waiting, as any device can that does not answer.
* move the median, if half of the cohort lies together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from headwater.common.messages import MOST_STEPS, Vitals
from headwater.common.settings import schema as settings
from headwater.common.stats.linear_fit import Line
from headwater.common.stats.training_speed import LEAST_SECONDS
from headwater.server.planning.device_estimates import DEADLINE_SHARE, NOTHING, Learned
from headwater.server.planning.equal_finish import Cohort, Floats, Ints, equal_finish

# A fleet of Pi Zeros and laptops is sixteen times apart; what is farther than this from the median
# is more likely a clock that jumped, or a lie.
FARTHEST = 32.0
UNMEASURED_SECONDS = 1e-3
LEAST_BYTES = 1e-3  # per example
LEAST_SHARE = 1e-6  # of its time that a device gives
LONGEST_TRANSFER_SECONDS = 1e9
# What a pace changes by within less is the scheduler's noise, and not worth a window cut short.
SHORTEST_FINISH_SECONDS = 1.0
LONGEST_FINISH_SECONDS = 30 * 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device as the planner sees it."""

    name: str
    num_examples: int
    learned: Learned = NOTHING
    asked_anyway: str | None = None
    """Why it is asked for one example though it is too slow; None if it is not."""

    @property
    def num_left(self) -> int:
        """The examples that its epoch has left, all if that is not known: none twice in a round."""
        left = self.learned.num_left
        return self.num_examples if left is None else max(min(left, self.num_examples), 1)

    @property
    def share(self) -> float:
        """The share of its time that it gives."""
        return max(self.learned.vitals.share, LEAST_SHARE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What a round moves, and how the server takes it."""

    image_bytes: int = 0
    update_bytes: int = 0
    turn_seconds: float = 0.0
    """The server's seconds for one update, check and fold; updates are taken one by one."""

    def transfer_seconds(self, vitals: Vitals) -> float:
        """Return the seconds of a device's download and upload, as far as its link is known."""
        down, up = vitals.download_bytes_per_second, vitals.upload_bytes_per_second
        seconds = self.image_bytes / down if down else 0.0
        seconds += self.update_bytes / up if up else 0.0
        return min(seconds, LONGEST_TRANSFER_SECONDS)


class SizeBound(Enum):
    """What a micro-batch cannot be larger than."""

    SET = "as set"
    MAXIMUM = "at its maximum"
    FASTEST = "fastest measured"
    DATA = "what its epoch has left"
    MEMORY = "what fits in memory"


# What a plan depends on, as values that can be compared.
Kind = tuple[object, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What the planner asks of one device, and what bound it."""

    device: Device
    quota: int
    fitting: int
    """The largest micro-batch that may be; the quota may be smaller."""
    size_bound: SizeBound
    accumulation_steps: int | None = None
    """K, where the operator has set it."""
    slowed: float = 1.0
    """How many times as fast as is believed the device says it is, 1 at least."""
    ahead: float = 0.0
    """The part of the round by which its turn is before the end."""
    transfers: float = 0.0
    """The part of the round that its download and upload take; 1 and above: all of it."""
    free_seconds: float = 0.0
    """Until T, less its transfers and its turn."""

    @property
    def kind(self) -> Kind:
        """All that a plan and its reason depend on: of two devices of a kind both are the same."""
        device, learned = self.device, self.device.learned
        vitals = learned.vitals
        is_k_set = self.accumulation_steps is not None
        limit = vitals.memory_limit_bytes if self.size_bound is SizeBound.MEMORY else None
        return (
            *(self.quota, self.fitting, self.size_bound, self.accumulation_steps, limit),
            *(device.num_examples, learned.num_left, learned.deadline_share, device.asked_anyway),
            None if is_k_set else (self.slowed, self.ahead, self.transfers, self.free_seconds),
            None if is_k_set else (learned.line, vitals.share, vitals.is_on_battery),
        )

    @property
    def micro_batch_size(self) -> int:
        """K = 1 where the quota fits in one micro-batch."""
        return min(self.fitting, self.quota)

    @property
    def share(self) -> float | None:
        """The share of the device's time that the quota counts on; None where K is set."""
        return None if self.accumulation_steps is not None else self.device.share

    def finish_seconds(self, micro_batch_size: int) -> float | None:
        """Return when the device is foreseen to have trained on its quota, and may stop.

        By what its quota was planned from, in the share of its time that it gives. So at that pace
        it is done to the example, and the cohort's sum is the target. One that has no more examples
        than its quota may take until T. None where K is set, its pace is not known, or was not
        believed to lead to an example in time, and where it is too soon to tell a pace by.
        """
        device, line = self.device, self.device.learned.line
        if self.accumulation_steps is not None or line is None or device.asked_anyway is not None:
            return None
        num_micro_batches = -(-self.quota // micro_batch_size)
        seconds = (num_micro_batches * line.base + self.quota * line.each) * self.slowed
        if self.quota == min(device.num_left, MOST_STEPS * self.fitting):
            seconds = max(seconds, device.share * self.free_seconds)
        is_told = SHORTEST_FINISH_SECONDS <= seconds <= LONGEST_FINISH_SECONDS
        return seconds if is_told else None

    @property
    def is_bounded(self) -> bool:
        """Whether the device claims more than is believed."""
        return self.slowed > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TooSlow:
    """One example takes ``seconds``, and may take ``of_seconds``."""

    seconds: float
    of_seconds: float


NO_LINK = Link()


def assign(
    devices: Sequence[Device],
    chosen: settings.PlanSettings,
    *,
    target: int,
    deadline_seconds: float | None = None,
    link: Link = NO_LINK,
) -> dict[str, Assignment]:
    """Assign a quota, one example at least, and a micro-batch size to every device.

    With ``accumulation_steps`` set, each gets K micro-batches of the same size, and no more than
    its epoch has left. Otherwise quotas are by equal finish, and their sum is ``target`` examples
    if the devices' bounds and the deadline allow it.
    """
    sizes, bounds = micro_batch_sizes(devices, chosen)
    steps = chosen.accumulation_steps
    if steps is not None:
        return {
            device.name: Assignment(
                device=device,
                quota=min(steps * size, device.num_left),
                fitting=size,
                size_bound=bound,
                accumulation_steps=steps,
            )
            for device, size, bound in zip(devices, sizes.tolist(), bounds, strict=True)
        }
    if not devices:
        return {}
    cohort, slowed = _columns(devices, sizes, deadline_seconds, link)
    quotas, finish_seconds = equal_finish(
        cohort,
        target=target,
        finish_seconds=None if deadline_seconds is None else deadline_seconds * DEADLINE_SHARE,
    )
    ahead = cohort.ahead(cohort.turns(), finish_seconds)
    free = finish_seconds - ahead - cohort.fixed
    parts = (ahead / finish_seconds, cohort.fixed / finish_seconds)
    numbers = (sizes, quotas, slowed, *parts, free)
    columns = [column.tolist() for column in numbers]
    return {
        device.name: Assignment(
            device=device,
            quota=quota,
            fitting=size,
            size_bound=bound,
            slowed=slow,
            ahead=before,
            transfers=moved,
            free_seconds=seconds,
        )
        for device, bound, size, quota, slow, before, moved, seconds in zip(
            devices, bounds, *columns, strict=True
        )
    }


def micro_batch_sizes(
    devices: Sequence[Device], chosen: settings.PlanSettings
) -> tuple[Ints, list[SizeBound]]:
    """Return the largest micro-batches that the devices' memories hold, and what bound each.

    base + size x bytes per example must stay within ``memory_fraction`` of the limit; one example
    is asked for in any case, as the device itself has the last word. Where no size is set, it is
    not above what the device measured to be the fastest, nor above what its epoch has left.
    """
    room, slope, fastest, left = _memory_columns(devices, chosen.memory_fraction)
    fitting = np.maximum(np.floor(np.minimum(room / slope, 2.0**40)), 1.0)
    if chosen.micro_batch_size is not None or chosen.accumulation_steps is not None:
        largest = chosen.micro_batch_size or chosen.set_micro_batch_size
        kinds = [SizeBound.SET, SizeBound.MEMORY]
        limits = [np.full_like(fitting, largest), fitting]
    else:
        kinds = [SizeBound.MAXIMUM, SizeBound.FASTEST, SizeBound.DATA, SizeBound.MEMORY]
        limits = [np.full_like(fitting, chosen.max_micro_batch_size), fastest, left, fitting]
    rows = np.stack(limits)
    first = rows.argmin(axis=0)  # of equals the first
    return rows.min(axis=0).astype(np.int64), [kinds[at] for at in first.tolist()]


def _memory_columns(
    devices: Sequence[Device], fraction: float
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return bytes for examples, bytes per example, the fastest size and the examples left."""
    told = [
        (
            vitals.memory_limit_bytes if _has_memory_line(vitals) else math.inf,
            vitals.base_bytes or 0,
            vitals.bytes_per_example or 0,
            device.learned.fastest_micro_batch_size or math.inf,
            device.num_left,
        )
        for device in devices
        for vitals in (device.learned.vitals,)
    ]
    limit, base, slope, fastest, left = np.array(told, dtype=np.float64).reshape(-1, 5).T
    return np.maximum(limit * fraction - base, 0.0), np.maximum(slope, LEAST_BYTES), fastest, left


def _has_memory_line(vitals: Vitals) -> bool:
    return vitals.memory_limit_bytes is not None and bool(vitals.bytes_per_example)


def too_slow(device: Device, *, deadline_seconds: float | None, link: Link) -> TooSlow | None:
    """Say why a device cannot finish one example in time; None if it can, for all that is known.

    It has DEADLINE_SHARE of the deadline for its transfers, its training and its turn; and for the
    training alone as much as was learned to leave time for its transfers.
    """
    line, vitals = device.learned.line, device.learned.vitals
    if deadline_seconds is None or line is None:
        return None
    seconds = line.at(1) / device.share
    longest = deadline_seconds * device.learned.deadline_share
    if seconds > longest:
        return TooSlow(seconds=seconds, of_seconds=longest)
    seconds += link.transfer_seconds(vitals) + link.turn_seconds
    in_all = deadline_seconds * DEADLINE_SHARE
    return TooSlow(seconds=seconds, of_seconds=in_all) if seconds > in_all else None


def _columns(
    devices: Sequence[Device], sizes: Ints, deadline_seconds: float | None, link: Link
) -> tuple[Cohort, Floats]:
    """Return the devices as columns, and how many times slower each is taken to be than it says."""
    share = np.array([device.share for device in devices])
    lines = [device.learned.line for device in devices]
    base = np.array([math.nan if line is None else line.base for line in lines]) / share
    each = np.array([math.nan if line is None else line.each for line in lines]) / share
    # Those who are asked anyway said that they are too slow: their word is not asked for again.
    is_measured = np.array([line is not None for line in lines])
    is_heard = is_measured & np.array([device.asked_anyway is None for device in devices])
    median = _median_line(base[is_heard], each[is_heard], largest=int(sizes.max()))
    base[~is_measured], each[~is_measured] = median.base, median.each
    least = (median.base + sizes * median.each) / FARTHEST
    slowed = np.where(is_heard, np.maximum(least / (base + sizes * each), 1.0), 1.0)
    deadline = math.inf if deadline_seconds is None else deadline_seconds
    most = [
        1 if device.asked_anyway else min(device.num_left, MOST_STEPS * m)
        for device, m in zip(devices, sizes.tolist(), strict=True)
    ]
    cohort = Cohort(
        size=sizes,
        base=base * slowed,
        each=each * slowed,
        fixed=np.array([link.transfer_seconds(device.learned.vitals) for device in devices]),
        most=np.array(most, dtype=np.int64),
        longest=deadline * np.array([device.learned.deadline_share for device in devices]),
        turn_seconds=link.turn_seconds,
    )
    return cohort, slowed


def _median_line(base: Floats, each: Floats, *, largest: int) -> Line:
    """Return the line of a median device, through the medians at size 1 and at the largest.

    So a device is compared with one of the same micro-batch size: more memory is no claim of speed.
    The medians are of logarithms: of two devices neither is far from the middle, unless they are
    far apart.
    """
    if not len(base):
        return Line(base=0.0, each=UNMEASURED_SECONDS)
    one, many = (
        float(np.exp(np.median(np.log(base + size * each)))) for size in (1, max(largest, 2))
    )
    per_example = max((many - one) / (max(largest, 2) - 1), LEAST_SECONDS)
    return Line(base=max(one - per_example, 0.0), each=per_example)
