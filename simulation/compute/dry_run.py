"""What devices will do with their plans, without doing it: their micro-batches, and when each ends.

It is the device's own walk through its window (``client.training.accumulation``), with the same clock, memory
and restraint; only that a micro-batch is taken note of instead of computed. So the virtual clock's
answers are those of a device that computes. Devices whose clocks are steady, and which nothing cuts
short of their quota or leads beyond it, are foreseen all at once, by the same sums in the same
order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headwater.client.training.accumulation import WindowSum, sum_window
from headwater.client.training.accumulator import Accumulator
from headwater.client.training.context import Workplace
from headwater.client.training.gradient_pass import Added, Positions
from headwater.client.training.micro_batches import Window
from headwater.client.training.stop_rules import RECENT_STEPS, Watch
from headwater.common.errors import HeadwaterError
from headwater.common.messages import MOST_STEPS, Plan, Step, StopReason, Vitals
from headwater.common.task import Examples
from headwater.server.fleet import Dropout
from headwater.simulation.compute.round_columns import Floats, Foreseen, Ints
from headwater.simulation.compute.window_columns import windows_of
from headwater.simulation.fleet.devices import Called, Devices
from headwater.simulation.fleet.position_columns import NO_ROUND

# Examples, or seconds: what lies as near to where a decision turns is left to the walk.
DIGITS = 1e-3


class CannotForesee(Exception):
    """Only computing tells what the device will do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """What is foreseen, who must be computed to be known, and who cannot even begin."""

    foreseen: Foreseen | None
    alone: list[Called]
    dropouts: list[Dropout]


def rehearse(devices: Devices, called: Sequence[Called]) -> Rehearsed:
    """Foresee what each device will do, and remember its place."""
    steady, others = _parted(devices, called)
    parts, walked, alone, dropouts = [], [], [], []
    if steady:
        plain = _foresee_plain(devices, steady)
        is_through = _runs_through(plain)
        if not is_through.all():
            others += [steady[at] for at in np.flatnonzero(~is_through).tolist()]
            plain = plain.some(np.flatnonzero(is_through))
        parts.append(plain)
    opened: list[tuple[Called, Examples]] = []
    for one in others:
        try:
            opened.append((one, devices.training_examples(one.part, one.plan)))
        except HeadwaterError as error:
            dropouts.append(Dropout(name=one.name, error=error))
    owned = np.array([len(examples) for _, examples in opened], dtype=np.int64)
    windows = windows_of([one for one, _ in opened], devices.walks, owned)
    for (one, examples), window in zip(opened, windows, strict=True):
        try:
            walked.append(_walk(devices, one, examples, window))
        except CannotForesee:
            alone.append(one)
        except HeadwaterError as error:
            dropouts.append(Dropout(name=one.name, error=error))
    if walked:
        parts.append(_in_columns(walked))
    foreseen = Foreseen.joined(parts) if parts else None
    if foreseen is not None:
        numbers = np.array([one.part for one in foreseen.called])
        places = foreseen.epoch, foreseen.offset
        devices.walks.pend(numbers, places, called[0].plan.round, foreseen.after)
    return Rehearsed(foreseen=foreseen, alone=alone, dropouts=dropouts)


def _parted(devices: Devices, called: Sequence[Called]) -> tuple[Sequence[Called], list[Called]]:
    """Part those with a steady clock, whose micro-batches are as planned, from the others."""
    if devices.has_slow_links:
        return [], list(called)
    machines = devices.machines
    try:
        parts = np.array([one.part for one in called], dtype=np.int64)
        machines.meet(parts)
    except HeadwaterError:  # one by one it is told whose examples cannot be opened
        return [], list(called)
    sizes = np.array([one.plan.micro_batch_size for one in called], dtype=np.int64)
    quotas = np.array([one.plan.quota for one in called], dtype=np.int64)
    is_steady = machines.is_steady[parts] & (machines.fitting[parts] >= sizes)
    is_steady &= quotas <= MOST_STEPS * sizes
    if is_steady.all():
        return called, []
    marked = list(zip(called, is_steady.tolist(), strict=True))
    return [one for one, is_so in marked if is_so], [one for one, is_so in marked if not is_so]


def _foresee_plain(devices: Devices, called: Sequence[Called]) -> Foreseen:
    """Foresee walks to the windows' ends: what ``_walk`` comes to, a hundred times as fast."""
    machines, plans = devices.machines, [one.plan for one in called]
    parts = np.array([one.part for one in called], dtype=np.int64)
    quota = np.array([plan.quota for plan in plans], dtype=np.int64)
    size = np.array([plan.micro_batch_size for plan in plans], dtype=np.int64)
    counted = np.array([plan.counted_round or NO_ROUND for plan in plans], dtype=np.int64)
    owned = devices.owned(parts, plans[0])
    epoch, offset = devices.walks.settle(parts, counted)
    is_over = offset >= owned  # as ``client.training.micro_batches.window`` has it
    epoch, offset = epoch + is_over, np.where(is_over, 0, offset)
    taken = np.minimum(quota, owned - offset)
    num_steps = -(-taken // size)
    sizes, step_seconds, seconds = _steps(devices, parts, taken, size, num_steps)
    steps_parts = np.repeat(parts, num_steps)
    peaks = machines.base_bytes[steps_parts] + machines.bytes_per_example[steps_parts] * sizes
    return Foreseen(
        called=called,
        num_examples=taken,
        num_owned=owned,
        epoch=epoch,
        offset=offset,
        micro_batch_size=size,
        seconds=seconds,
        reasons=[_ENDS[short] for short in (taken < quota).tolist()],
        vitals=machines.vitals(parts, round_number=plans[0].round),
        num_steps=num_steps,
        sizes=sizes,
        step_seconds=step_seconds,
        peak_bytes=peaks.astype(np.int64),
    )


_ENDS: tuple[StopReason, StopReason] = ("quota", "epoch end")


def _runs_through(one: Foreseen) -> NDArray[np.bool_]:
    """Say which devices do what they are foreseen to, though their plans may end or lengthen it.

    As all micro-batches but the last are of one size, and take as long, it is by the last that
    ``client.training.stop_rules`` ends a window early, if it does. What hangs on the last digits is not said.
    """
    plans = [called.plan for called in one.called]
    if not any(_may_end_elsewhere(plan) for plan in {id(plan): plan for plan in plans}.values()):
        return np.ones(len(plans), dtype=np.bool_)
    last = np.cumsum(one.num_steps) - 1
    full, rest = one.step_seconds[last - one.num_steps + 1], one.step_seconds[last]
    spent = np.add.reduceat(one.step_seconds, last - one.num_steps + 1)
    is_alone = one.num_steps == 1
    with np.errstate(divide="ignore", invalid="ignore"):
        finish = _column(plan.finish_seconds for plan in plans)
        # Before the last micro-batch, and behind it; both by the pace of the last few.
        ahead = (finish - spent + rest) / full * one.micro_batch_size
        recent = np.minimum(one.num_steps, RECENT_STEPS) - 1
        pace = (recent * full + rest) / (recent * one.micro_batch_size + one.sizes[last])
        behind = np.maximum(finish - spent, 0.0) / pace
    most = _ints(plan.most_examples for plan in plans)
    has_more = np.minimum(most, one.num_owned - one.offset) > one.num_examples
    is_in_time = is_alone | (ahead > one.sizes[last] - 0.5 + DIGITS)
    is_in_time &= ~has_more | (behind < 0.5 - DIGITS)
    deadline = _column(plan.deadline_seconds for plan in plans)
    is_in_time |= np.isnan(finish)
    is_in_time &= is_alone | np.isnan(deadline) | (one.seconds - rest + full < deadline - DIGITS)
    given = np.array([vitals.share for vitals in one.vitals])
    found: NDArray[np.bool_] = is_in_time & ~(given < _column(plan.share for plan in plans))
    return found


def _may_end_elsewhere(plan: Plan) -> bool:
    limits = (plan.deadline_seconds, plan.finish_seconds, plan.share)
    return any(limit is not None for limit in limits)


def _column(values: Iterable[float | None]) -> Floats:
    """Return numbers, of which those that are not set are NaN."""
    return np.array(list(values), dtype=np.float64)


def _steps(
    devices: Devices, parts: Ints, taken: Ints, size: Ints, num_steps: Ints
) -> tuple[Ints, Floats, Floats]:
    """Return the sizes and seconds of all steps, and each device's seconds by the virtual clock.

    Of the devices with as many steps the clocks go side by side, each adding step to step as a
    clock does, so that the last bit is its own.
    """
    machines = devices.machines
    starts = np.concatenate([[0], np.cumsum(num_steps)])
    sizes = np.zeros(starts[-1], dtype=np.int64)
    step_seconds = np.zeros(starts[-1])
    seconds = np.zeros(len(parts))
    for number in np.unique(num_steps).tolist():
        at = np.flatnonzero(num_steps == number)
        steps_DK = np.minimum(size[at, None], taken[at, None] - size[at, None] * np.arange(number))
        own = parts[at, None]
        lines_DK = (
            machines.seconds_per_micro_batch[own] + machines.seconds_per_example[own] * steps_DK
        )
        # The model has come before the first step.
        clock_DK = np.cumsum(np.concatenate([machines.transfer_seconds[own], lines_DK], 1), axis=1)
        index = starts[at, None] + np.arange(number)
        sizes[index] = steps_DK
        step_seconds[index] = np.diff(clock_DK, axis=1)
        seconds[at] = clock_DK[:, -1]
    return sizes, step_seconds, seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class _Walked:
    """A device's walk through its window."""

    called: Called
    window: Window
    total: WindowSum
    num_owned: int
    seconds: float
    vitals: Vitals


def _walk(devices: Devices, called: Called, examples: Examples, window: Window) -> _Walked:
    """Walk through one device's window.

    Raises:
        CannotForesee: not one example fits in its memory without activation checkpointing.
    """
    plan = called.plan
    machine = devices.machine(called.part, round_number=plan.round)
    if machine.memory.fitting(1) == 0:
        raise CannotForesee
    accumulator = cast(Accumulator, _NO_VECTOR)
    place = devices.resident.workplace(examples, called.name, machine, accumulator)
    begun = place.clock.seconds()
    total = sum_window(plan, window, place, Watch(plan, place, begun), add=_take_note)
    return _Walked(
        called=called,
        window=window,
        total=total,
        num_owned=len(examples),
        seconds=place.clock.seconds() - begun,
        vitals=place.vitals(),
    )


def _in_columns(walked: Sequence[_Walked]) -> Foreseen:
    """Return what devices did on their walks."""
    totals = [one.total for one in walked]
    steps = [cast(Noted, step) for total in totals for step in total.steps]
    ended = [one.total.reason == "quota" and one.window.ends_epoch for one in walked]
    return Foreseen(
        called=[one.called for one in walked],
        num_examples=_ints(total.num_examples for total in totals),
        num_owned=_ints(one.num_owned for one in walked),
        epoch=_ints(one.window.epoch for one in walked),
        offset=_ints(one.window.offset for one in walked),
        micro_batch_size=_ints(total.micro_batch_size for total in totals),
        seconds=np.array([one.seconds for one in walked]),
        reasons=[
            "epoch end" if is_ended else one.total.reason
            for one, is_ended in zip(walked, ended, strict=True)
        ],
        vitals=[one.vitals for one in walked],
        num_steps=_ints(len(total.steps) for total in totals),
        sizes=_ints(step.num_examples for step in steps),
        step_seconds=np.array([step.seconds for step in steps]),
        peak_bytes=_ints(step.peak_bytes for step in steps),
    )


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def _take_note(
    plan: Plan,
    window: Window,
    positions: Positions,
    place: Workplace,
    since_seconds: float,
) -> Added:
    """Let a micro-batch take its seconds and bytes, and add nothing.

    Raises:
        MemoryError: it would cross the simulated limit.
    """
    place.memory.begin(len(positions))
    place.clock.worked(len(positions))
    step = Noted(
        num_examples=len(positions),
        weight=len(positions),
        seconds=place.clock.seconds() - since_seconds,
        peak_bytes=place.memory.end(len(positions)),
    )
    return Added(loss_sum=0.0, metric_sums={}, step=cast(Step, step))


@dataclass(kw_only=True, slots=True)
class Noted:
    """What the walk through a window reads of a step."""

    num_examples: int
    weight: int
    seconds: float
    peak_bytes: int


class _NoVector:
    """What stands for the vector where nothing is added."""

    def zero(self) -> None:
        """Do nothing."""

    def check_views(self) -> None:
        """Do nothing."""


_NO_VECTOR: Any = _NoVector()
