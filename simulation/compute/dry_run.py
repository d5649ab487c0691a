"""Predicts what devices do with their plans, without computing gradients.

The prediction gives each device's micro-batches and the times at which they end. It runs the
device's own code (``client.training.window``, ``client.local_training.step_sums``) with the
same clock, memory and stop rules; a micro-batch only advances clock and memory. So the virtual
clock shows what it would after real training. Devices of constant speed, whose window ends with its
quota, are predicted all at once, in columns: the same sums in the same order, and a hundred times
as fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headwater.client.training.accumulator import Accumulator
from headwater.client.training.context import TrainingContext
from headwater.client.training.gradient_pass import MicroBatchResult
from headwater.client.training.sampler import Window, window
from headwater.client.training.stop_rules import RECENT_STEPS, StopRules
from headwater.client.training.window import sum_window
from headwater.client.training.window_sum import WindowSum
from headwater.common.data.example_lengths import Positions
from headwater.common.errors import HeadwaterError
from headwater.common.messages import MAX_STEPS, Plan, Step, Vitals
from headwater.common.terms import Terms
from headwater.server.fleet import Dropout
from headwater.server.planning.plan_table import PlanTable
from headwater.server.planning.vitals_columns import VitalsColumns
from headwater.simulation.fleet.devices import ClientPlan, ClientPlans, Devices
from headwater.simulation.fleet.position_columns import NO_ROUND, PlaceColumns, starts_of
from headwater.simulation.vectorised.round_columns import Floats, Ints, RoundColumns

# Tolerance in examples or seconds; closer calls are simulated step by step.
TOLERANCE = 1e-3


class NotPredictable(Exception):
    """What the device does depends on what it computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The predicted devices, those that only computing can tell about, and those that drop out."""

    columns: RoundColumns
    alone: list[ClientPlan]
    dropouts: list[Dropout]


def predict_round(devices: Devices, clients: Sequence[ClientPlan]) -> Prediction:
    """Predict each device's round, and store its position after it as pending."""
    parts, simulated, alone, dropouts = [], [], [], []
    steady = ClientPlans.of(clients)
    plans = steady.table
    is_steady = _is_steady(devices, steady.parts, plans)
    others = list(compress(clients, (~is_steady).tolist())) if not is_steady.all() else []
    if is_steady.any():
        if others:
            steady = steady.some(np.flatnonzero(is_steady))
            plans = plans.some(steady.names)
        columns = _predict_steady(devices, steady, plans)
        is_plain = _ends_as_planned(columns, plans)
        if not is_plain.all():
            others += [steady[at] for at in np.flatnonzero(~is_plain).tolist()]
            columns = columns.some(np.flatnonzero(is_plain))
        parts.append(columns)
    for one in others:
        try:
            simulated.append(_simulate(devices, one))
        except NotPredictable:
            alone.append(one)
        except HeadwaterError as error:
            dropouts.append(Dropout(name=one.name, error=error))
    if simulated:
        parts.append(_columns_of(simulated))
        rounds = _ints(one.client.plan.counted_round or NO_ROUND for one in simulated)
        devices.positions.settle(parts[-1].parts, rounds)
    columns = RoundColumns.joined(parts)
    if len(columns):
        round_number = clients[0].plan.round
        devices.positions.set_pending(columns.parts, columns.places, round_number, columns.after)
    return Prediction(columns=columns, alone=alone, dropouts=dropouts)


def foreseen_alone(
    devices: Devices, clients: Sequence[ClientPlan], *, timeout_seconds: float | None
) -> RoundColumns:
    """Return the devices that do nothing but sum as foreseen, in their order.

    Their positions after the round are stored as pending. A device that checks its vector more
    often, as from half of the time to its deadline on, is not among them.
    """
    nobody = RoundColumns.joined([])
    if devices.changes_windows or not clients:
        return nobody
    called = ClientPlans.of(clients)
    plans, checkpointed = called.table, devices.trainer.checkpointed
    first = called[0].plan
    if first.max_tokens is not None or first.precision == "auto":  # the same in all plans
        return nobody
    is_plain = np.array(plans.of_each(_is_foreseen)) & (plans.model_version == first.model_version)
    is_plain &= [name not in checkpointed for name in called.names]
    if devices.has_liars:
        pairs = zip(called.parts.tolist(), plans.round.tolist(), strict=True)
        is_plain &= [not devices.falsifications(part, round_number=at) for part, at in pairs]
    if not is_plain.all():
        called = called.some(np.flatnonzero(is_plain))
    if not called:
        return nobody
    columns = predict_round(devices, called).columns
    if len(columns) == 0:
        return nobody
    limits = plans.deadline_seconds[plans.at(columns.clients.names)] / 2
    if timeout_seconds is not None:
        limits = np.fmin(limits, timeout_seconds)
    is_early = ~(columns.seconds > limits)  # True without a limit, which is NaN
    row_of = {part: row for row, part in enumerate(columns.parts.tolist())}
    rows = np.array([row_of[part] for part in called.parts.tolist() if part in row_of])
    rows = rows[is_early[rows]]
    if len(rows) == len(columns) and bool((np.diff(rows) == 1).all()):
        return columns
    return columns.some(rows)


def _is_foreseen(terms: Mapping[str, Terms]) -> bool:
    """Whether terms ask for the sum of a window's gradients in float32, and nothing else."""
    return all(one.why_alone is None for one in terms.values())


def next_window(devices: Devices, client: ClientPlan, num_examples: int) -> Window:
    """Return the examples that a device trains on next, out of ``num_examples``."""
    plan = client.plan
    return window(
        devices.positions[client.part].settle(plan.counted_round).place,
        quota=plan.quota_of(num_examples),
        num_more=plan.max_examples - plan.quota,
        run_seed=plan.run_seed,
        name=client.name,
        num_examples=num_examples,
    )


# All at once.


def _is_steady(devices: Devices, parts: Ints, plans: PlanTable) -> NDArray[np.bool_]:
    """Return which devices have a constant speed, memory for the micro-batches, and the quota."""
    nobody = np.zeros(len(parts), dtype=np.bool_)
    if devices.has_slow_links or not len(parts):
        return nobody
    hardware, first = devices.hardware_columns, plans.first
    try:
        hardware.load(parts, held_bytes=_held_bytes(devices, first))
        owned = devices.num_training_examples(parts, first)
    except HeadwaterError:  # found again for the device whose examples cannot be opened
        return nobody
    is_steady: NDArray[np.bool_] = hardware.is_steady[parts]
    is_steady &= hardware.fitting[parts] >= plans.micro_batch_size
    if not first.repeats_examples:  # see ``Plan.quota_of``; the planner plans for no more
        is_steady &= plans.quota <= owned
    return is_steady & (_num_steps(plans) <= MAX_STEPS)


def _predict_steady(devices: Devices, clients: ClientPlans, plans: PlanTable) -> RoundColumns:
    """Predict windows that end with their quota, as ``_simulate`` does for one."""
    hardware, first, parts = devices.hardware_columns, plans.first, clients.parts
    counted = np.where(plans.counted_round > 0, plans.counted_round, NO_ROUND)
    owned = devices.num_training_examples(parts, first)
    places = devices.positions.settle(parts, counted).of_existing(owned)
    num_steps = _num_steps(plans)
    sizes, local_step = _sizes(plans, num_steps)
    step_seconds, seconds = _seconds(devices, parts, sizes, num_steps)
    step_parts = np.repeat(parts, num_steps)
    peaks = hardware.base_bytes[step_parts] + hardware.bytes_per_example[step_parts] * sizes
    return RoundColumns(
        clients=clients,
        parts=parts,
        num_examples=plans.quota,
        num_owned=owned,
        places=places,
        micro_batch_size=plans.micro_batch_size,
        weigh_as=plans.weigh_as,
        seconds=seconds,
        reasons=["quota"] * len(clients),
        vitals=hardware.vitals(parts, round_number=first.round),
        num_steps=num_steps,
        sizes=sizes,
        step_seconds=step_seconds,
        peak_bytes=peaks.astype(np.int64),
        local_step=local_step,
    )


def _held_bytes(devices: Devices, plan: Plan) -> int:
    """Return what the plan's local steps hold beside model and gradient; 0 for an exact sum."""
    if not plan.repeats_examples:
        return 0
    from headwater.common.local_training.local_optimizer import held_bytes
    from headwater.common.local_training.local_terms import LocalTerms
    from headwater.common.local_training.terms import LocalPlan

    local, number = plan.of(LocalPlan), devices.trainer.image.layout.num_parameters
    assert local is not None
    return held_bytes(local.how or LocalTerms(), num_parameters=number)


def _num_steps(plans: PlanTable) -> Ints:
    """Return the number of micro-batches of each plan."""
    if not plans.first.repeats_examples:
        return plans.accumulation_steps
    sizes, counts = _local_step_sizes(plans)
    cuts = -(-sizes // np.repeat(plans.micro_batch_size, counts))
    num_steps: Ints = np.add.reduceat(cuts, starts_of(counts))
    return num_steps


def _local_step_sizes(plans: PlanTable) -> tuple[Ints, Ints]:
    """Return the examples of all local steps that have some, and each plan's number of these.

    See ``LocalPlan.bounds``.
    """
    from headwater.common.local_training.terms import LocalPlan

    steps = np.array([cast(LocalPlan, terms[LocalPlan.NAME]).steps for terms in plans.terms])
    at = np.arange(steps.sum()) - np.repeat(starts_of(steps), steps)
    quotas, each = np.repeat(plans.quota, steps), np.repeat(steps, steps)
    sizes: Ints = quotas * (at + 1) // each - quotas * at // each
    return sizes[sizes > 0], np.add.reduceat(sizes > 0, starts_of(steps), dtype=np.int64)


def _sizes(plans: PlanTable, num_steps: Ints) -> tuple[Ints, Ints]:
    """Return the size of each micro-batch, and the local step that it is part of."""
    if plans.first.repeats_examples:
        examples, counts = _local_step_sizes(plans)
        full = np.repeat(plans.micro_batch_size, counts)
        cuts = -(-examples // full)
        numbers = np.arange(len(examples)) - np.repeat(starts_of(counts), counts)
        return _cut(examples, full, cuts), np.repeat(numbers, cuts)
    sizes = _cut(plans.quota, plans.micro_batch_size, num_steps)
    return sizes, np.zeros_like(sizes)


def _cut(examples: Ints, size: Ints, num_parts: Ints) -> Ints:
    """Cut each number of examples into this many parts: all of its ``size`` but the last."""
    sizes = np.repeat(size, num_parts)
    sizes[np.cumsum(num_parts) - 1] = examples - (num_parts - 1) * size
    return sizes


def _seconds(devices: Devices, parts: Ints, sizes: Ints, num_steps: Ints) -> tuple[Floats, Floats]:
    """Return the seconds of all steps, and each device's seconds by the virtual clock.

    The clocks of all devices with as many steps advance together, step by step, and round as each
    device's own clock does.
    """
    hardware = devices.hardware_columns
    starts = np.concatenate([[0], np.cumsum(num_steps)])
    step_seconds = np.zeros(starts[-1])
    seconds = np.zeros(len(parts))
    for number in np.unique(num_steps).tolist():
        at = np.flatnonzero(num_steps == number)
        index = starts[at, None] + np.arange(number)
        own, sizes_DK = parts[at, None], sizes[index]
        seconds_DK = (
            hardware.seconds_per_micro_batch[own] + hardware.seconds_per_example[own] * sizes_DK
        )
        # The model was received before the first step.
        clock_DK = np.cumsum(np.concatenate([hardware.transfer_seconds[own], seconds_DK], 1), 1)
        step_seconds[index] = np.diff(clock_DK, axis=1)
        seconds[at] = clock_DK[:, -1]
    return step_seconds, seconds


def _ends_as_planned(columns: RoundColumns, plans: PlanTable) -> NDArray[np.bool_]:
    """Return which windows surely end with their quota, by ``client.training.stop_rules``.

    Of an exact sum all micro-batches but the last have one size and take the same time, so if a
    window ends early it ends before the last. Local steps have no finish time, and before a
    deadline none begins later than the last. A window whose end hangs on less than the tolerance is
    not sure.
    """
    limits = (plans.deadline_seconds, plans.finish_seconds, plans.share)
    if all(np.isnan(limit).all() for limit in limits):
        return np.ones(len(columns), dtype=np.bool_)
    last = np.cumsum(columns.num_steps) - 1
    first = last - columns.num_steps + 1
    full, rest = columns.step_seconds[first], columns.step_seconds[last]
    passed = np.add.reduceat(columns.step_seconds, first)
    is_alone = columns.num_steps == 1
    finish = plans.finish_seconds
    with np.errstate(divide="ignore", invalid="ignore"):
        # Examples until the finish: before the last micro-batch, and after it by the recent pace.
        until_finish = (finish - passed + rest) / full * columns.micro_batch_size
        recent = np.minimum(columns.num_steps, RECENT_STEPS) - 1
        recent_examples = recent * columns.micro_batch_size + columns.sizes[last]
        beyond = np.maximum(finish - passed, 0.0) / (recent * full + rest) * recent_examples
    has_more = np.minimum(plans.max_examples, columns.num_owned) > columns.num_examples
    is_sure = is_alone | (until_finish > columns.sizes[last] - 0.5 + TOLERANCE)
    is_sure &= ~has_more | (beyond < 0.5 - TOLERANCE)
    is_sure |= np.isnan(finish)
    deadline = plans.deadline_seconds
    slowest = np.maximum.reduceat(columns.step_seconds, first)
    before_deadline = columns.seconds - rest + slowest < deadline - TOLERANCE
    is_sure &= is_alone | np.isnan(deadline) | before_deadline
    is_planned: NDArray[np.bool_] = is_sure & ~(columns.vitals.share < plans.share)
    return is_planned


def _floats(values: Iterable[float | None]) -> Floats:
    """Return a column; None becomes NaN."""
    return np.array(list(values), dtype=np.float64)


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)


# One device, step by step.


@dataclass(frozen=True, kw_only=True, slots=True)
class _SimulatedClient:
    """A device whose window was run without gradients."""

    client: ClientPlan
    window: Window
    total: WindowSum
    num_owned: int
    seconds: float
    vitals: Vitals
    local_step: Ints
    """The local step that each of the total's micro-batches is part of."""


def _simulate(devices: Devices, client: ClientPlan) -> _SimulatedClient:
    """Run one device's window without gradients.

    Raises:
        NotPredictable: not one example fits in its memory without activation checkpointing.
    """
    plan = client.plan
    examples = devices.training_examples(client.part, plan)
    window = next_window(devices, client, len(examples))
    hardware = devices.hardware(client.part, round_number=plan.round)
    fitting = hardware.memory.fitting(1)
    if fitting is not None and fitting < 1:
        raise NotPredictable
    accumulator = cast(Accumulator, _NO_VECTOR)
    context = devices.trainer.context(examples, client.name, hardware, accumulator)
    begun = context.clock.seconds()
    rules = StopRules(plan, context, begun)
    total = WindowSum(micro_batch_size=plan.micro_batch_size)
    num_steps: list[int] = []
    if plan.repeats_examples:
        from headwater.client.local_training.step_sums import step_sums

        with context.memory.holding(_held_bytes(devices, plan)):
            for step in step_sums(plan, window, context, rules, before=total, add=_advance):
                num_steps.append(len(step.total.steps) - sum(num_steps))
                total = step.total
    else:
        total = sum_window(plan, window, context, rules, add=_advance)
        num_steps.append(len(total.steps))
    return _SimulatedClient(
        client=client,
        window=window,
        total=total,
        local_step=np.repeat(np.arange(len(num_steps)), num_steps),
        num_owned=len(examples),
        seconds=context.clock.seconds() - begun,
        vitals=context.vitals(),
    )


def _columns_of(simulated: Sequence[_SimulatedClient]) -> RoundColumns:
    """Return the columns of devices that were simulated one by one."""
    windows, totals = [one.window for one in simulated], [one.total for one in simulated]
    steps = [step for total in totals for step in total.steps]
    return RoundColumns(
        clients=ClientPlans.of([one.client for one in simulated]),
        parts=_ints(one.client.part for one in simulated),
        num_examples=_ints(total.num_examples for total in totals),
        num_owned=_ints(one.num_owned for one in simulated),
        places=PlaceColumns.of([window.place for window in windows]),
        micro_batch_size=_ints(total.micro_batch_size for total in totals),
        weigh_as=_ints(one.client.plan.weigh_as or 0 for one in simulated),
        seconds=_floats(one.seconds for one in simulated),
        reasons=[total.reason for total in totals],
        vitals=VitalsColumns.of(one.vitals for one in simulated),
        num_steps=_ints(len(total.steps) for total in totals),
        sizes=_ints(step.num_examples for step in steps),
        step_seconds=_floats(step.seconds for step in steps),
        peak_bytes=_ints(step.peak_bytes for step in steps),
        local_step=np.concatenate([one.local_step for one in simulated]),
    )


def _advance(
    plan: Plan, window: Window, positions: Positions, context: TrainingContext, since_seconds: float
) -> MicroBatchResult:
    """Advance clock and memory by a micro-batch, and add nothing.

    Raises:
        MemoryError: it would exceed the simulated limit.
    """
    load, size = context.load(positions), context.size(positions)
    context.memory.begin(load)
    context.clock.worked(size)
    step = SimulatedStep(
        num_examples=len(positions),
        weight=len(positions),
        seconds=context.clock.seconds() - since_seconds,
        peak_bytes=context.memory.end(load),
        work=size,
    )
    return MicroBatchResult(loss_sum=0.0, metric_sums={}, step=cast(Step, step))


@dataclass(kw_only=True, slots=True)
class SimulatedStep:
    """The fields of a ``Step`` that ``sum_window`` reads; pydantic's checks would take longer."""

    num_examples: int
    weight: int
    seconds: float
    peak_bytes: int
    work: float


class _NoVector:
    """Replaces the accumulator if nothing is added."""

    def zero(self) -> None:
        """Do nothing."""

    def check_views(self) -> None:
        """Do nothing."""


_NO_VECTOR: Any = _NoVector()
