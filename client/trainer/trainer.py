"""Trains a task's model for the clients of this process, round after round.

One process holds one model and one gradient vector, however many clients it plays: one on a laptop,
a thousand in the simulator.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import Subset

from headwater.client.device.hardware import ThisMachine
from headwater.client.device.interfaces import Hardware, Speed
from headwater.client.features import own_parameters, take_model, takes_model, work_of
from headwater.client.memory.in_place_gradients import add_in_place
from headwater.client.memory.model_room import built_within
from headwater.client.memory.process_limits import MemoryLimit, MemoryLimits
from headwater.client.same_data.data_share import data_share
from headwater.client.trainer.checkpointed_clients import CheckpointedClients
from headwater.client.trainer.client_examples import ClientExamples
from headwater.client.trainer.held_out import HeldOutEvaluation
from headwater.client.trainer.left_out_examples import LeftOutLog
from headwater.client.trainer.loaded_model import LoadedModel
from headwater.client.trainer.precision import DevicePrecision
from headwater.client.trainer.speed import measure_speed
from headwater.client.trainer.task_trial import CheckReport, check_task, compare_more
from headwater.client.training.accumulator import Accumulator
from headwater.client.training.batch_fetch import Batches
from headwater.client.training.context import NO_BATCHES, Identity, TrainingContext
from headwater.client.training.progress import TrainingProgress
from headwater.client.training.round import Feature, Work, sum_round, update_of
from headwater.client.training.sampler import SamplerState
from headwater.common.data.example_lengths import ExampleLengths
from headwater.common.errors import BuffersChanged, OutOfMemory
from headwater.common.messages import (
    DataShare,
    DescribeRequest,
    DeviceReport,
    EvaluateReport,
    HoldOut,
    Plan,
    Update,
)
from headwater.common.model.local_state import LocalState, LocalStore
from headwater.common.model.parameters import Build, ModelImage, build_model, built
from headwater.common.system.heap import release_freed_memory, restore_mmap_threshold
from headwater.common.task import Examples, load_task, task_code, tell_round

if TYPE_CHECKING:
    from headwater.client.training.spool import Spool

log = logging.getLogger(__name__)

# Of how many clients of a process the data is compared; a task that ignores part shows in two.
NUM_SHARES = 16

Trial = Callable[[TrainingContext], None]
"""A trial on a client's first examples, beside the task's check; it raises what it finds."""


class Trainer:
    """A task's model and gradient vector, shared by the clients of this process."""

    def __init__(
        self,
        task_spec: str,
        *,
        batch_norm: str | None,
        check_task: bool,
        local_parameters: str | None = None,
        frozen_dtype: str | None = None,
        trial: Trial | None = None,
        seed: int = 0,
        limits: MemoryLimits | None = None,
    ) -> None:
        """Build the model, and the vector beside it; ``limits`` are the process's by default.

        Raises:
            OutOfMemory: the limits have no room for model and vector.
            HeadwaterError: the task cannot be loaded, see ``headwater.common.task.load_task``.
        """
        self._batch_norm, self._frozen_dtype = batch_norm, frozen_dtype
        self.task = load_task(task_spec)
        self.task_code = task_code(task_spec)
        self._examples = ClientExamples(self.task, self._check_opened)
        self.datasets = self._examples.datasets
        self.local_parameters = local_parameters
        """The patterns of the parameters that stay on the device."""
        lowest = (limits or MemoryLimits()).lowest
        self.image = self._built(seed=seed, within=functools.partial(built_or_sent, lowest))
        restore_mmap_threshold()
        self.loaded_model = LoadedModel(self.image)
        self.accumulator = Accumulator(self.image)
        add_in_place(self.image.model)
        self.progress = TrainingProgress()
        self.stop_requested = threading.Event()
        """Set when the device is to stop: training ends early, and the sum so far is sent."""
        self.checkpointed = CheckpointedClients(self.image)
        self._own = own_parameters(self.image, lambda seed: self._built(seed=seed))
        self._checks_task = check_task
        self._num_opened = 0
        self._num_shares = NUM_SHARES
        self._is_undecided = False
        self.first_check: CheckReport | None = None
        """The report of the task's check; None before it, or if it is off."""
        self.logs_left_out = True
        """Whether the check logs the first client's examples that cannot be trained on."""
        self._trial = trial
        self.machine: Hardware | None = None
        """The machine whose memory the check keeps to; None for the process's own limits alone."""
        self.precision = DevicePrecision(self._trial_context)
        """What this process computes its passes in."""
        self._left_out_log = LeftOutLog()
        self._evaluation = HeldOutEvaluation(self.task, self.image.model)

    # Examples.

    def keep_open(self, num_clients: int) -> None:
        """Keep the examples of the last ``num_clients`` clients open."""
        self._examples.keep_open(num_clients)

    def examples(self, identity: Identity) -> Examples:
        """Open a client's examples, once; check the task on the first client's.

        Raises:
            HeadwaterError: see ``ClientExamples.of`` and ``check``.
        """
        return self._examples.of(identity)

    def reopen(self, identity: Identity) -> Examples:
        """Open a device's examples again, see ``ClientExamples.reopen``."""
        return self._examples.reopen(identity)

    def lengths(self, identity: Identity) -> ExampleLengths | None:
        """Return the lengths of a client's examples; None if these cannot differ in length."""
        return self._examples.lengths(self.examples(identity))

    def split(self, identity: Identity, terms: HoldOut) -> tuple[Examples, Examples]:
        """Return the examples to train on and the held-out ones, by a plan or a request."""
        return self._examples.split(identity, terms)

    def numbers(
        self, identity: Identity, plan: Plan, sampler: SamplerState, order_seed: int
    ) -> tuple[int, ...]:
        """Return the numbers of a plan's examples, see ``ClientExamples.numbers``."""
        return self._examples.numbers(identity, plan, sampler, order_seed)

    def _check_opened(self, examples: Examples, name: str) -> None:
        """Check the task on the first examples that are opened, and log what was found.

        In a process of many clients its sums are compared on those of the second, the fourth, the
        eighth and so on as well: the first ones may have none of a kind, as of a label.
        """
        if not self._checks_task:
            return
        self._num_opened += 1
        if self.first_check is not None:
            if self._num_opened.bit_count() == 1:
                self._compare_more(examples, name)
            return
        report = self.first_check = self.check(examples, name)
        self._is_undecided = report.is_undecided
        if report.left_out is not None and self.logs_left_out:
            log.warning("%s: %s", name, report.left_out)
        for note in report.notes:
            log.info("%s: %s", name, note)

    def _compare_more(self, examples: Examples, name: str) -> None:
        """Compare the task's sums on more examples, with the client's own state left alone."""
        machine = self.machine or ThisMachine()
        context = self.context(examples, name, machine)
        try:
            with machine.bounded():
                self.accumulator.zero()
                if compare_more(context):
                    self._is_undecided = False
        finally:
            self.accumulator.zero()

    # The model and the device.

    def _built(self, *, seed: int, within: Build = built) -> ModelImage:
        return build_model(
            self.task,
            seed=seed,
            within=within,
            batch_norm=self._batch_norm,
            local_parameters=self.local_parameters,
            frozen_dtype=self._frozen_dtype,
        )

    def load_local(self, identity: Identity, plan: Plan, store: LocalStore | None) -> LocalState:
        """Load a client's own parameters, see ``OwnParameters.load``; a model may have none."""
        if self._own is None:
            return LocalState(values_L=self.image.local_L)
        state: LocalState = self._own.load(identity.name, plan, store)
        return state

    def check(self, examples: Examples, name: str) -> CheckReport:
        """Check the task on real examples: it must run, and what it returns must be sums.

        Then comes the trial, if there is one.

        Raises:
            TaskError, OutOfMemory: see ``check_task``.
            HeadwaterError: the trial failed.
        """
        machine = self.machine or ThisMachine()
        context = self.context(examples, name, machine)
        try:
            with machine.bounded():
                self.checkpointed.fit(context)
                self.accumulator.zero()
                report = check_task(context, passed=self.checkpointed.passed)
                self.accumulator.check_views()
                if self._trial is not None:
                    self._trial(context)
        finally:
            self.checkpointed.remember(name)
            self.accumulator.zero()
        release_freed_memory()
        return report

    def context(
        self,
        examples: Examples,
        name: str,
        hardware: Hardware,
        accumulator: Accumulator | None = None,
        batches: Batches = NO_BATCHES,
    ) -> TrainingContext:
        """Return a client's training context; the model is set up for this client.

        An update that still uses the accumulator's memory is moved out of it.
        """
        self.accumulator.reclaim()
        self.checkpointed.set_up(name)
        return TrainingContext(
            task=self.task,
            image=self.image,
            accumulator=accumulator or self.accumulator,
            examples=examples,
            name=name,
            clock=hardware.clock,
            memory=hardware.memory,
            checkpointed_bytes=self.checkpointed.bytes_per_example,
            pass_memory=self.checkpointed.pass_memory,
            time_share=hardware.time_share,
            vitals=hardware.vitals,
            should_stop=self.stop_requested.is_set,
            batches=batches,
            progress=self.progress,
            lengths=self._examples.lengths(examples),
        )

    # Requests of the server.

    def describe(
        self, identity: Identity, hardware: Hardware, request: DescribeRequest
    ) -> DeviceReport:
        """Describe the device and, if the request wants it, measure how fast it trains.

        Raises:
            ModelMismatch: the server's model has another layout.
        """
        self.loaded_model.check_layout(identity.name, request)
        examples, _ = self.split(identity, request)
        chosen = self.precision.choose(request.precision, identity)
        # Where lengths differ, what a long example takes must be known before it comes.
        measures = request.wants_speed or self._examples.lengths(examples) is not None
        measured = self.measure(identity, hardware) if measures else None
        speed = measured if request.wants_speed else None
        return DeviceReport(
            name=identity.name,
            num_examples=len(examples),
            data=self._share(identity, request),
            layout_digest=self.image.layout.digest,
            cores=hardware.cores(),
            vitals=hardware.vitals(),
            seconds_per_micro_batch=speed.seconds_per_micro_batch if speed else None,
            seconds_per_example=speed.seconds_per_example if speed else None,
            fastest_micro_batch_size=speed.fastest_micro_batch_size if speed else None,
            precision=chosen,
            task=self.task_code,
            labels=identity.labels,
        )

    def _share(self, identity: Identity, request: DescribeRequest) -> DataShare | None:
        """Return which data a client has; None beyond the first clients of a process."""
        if not self._num_shares:
            return None
        self._num_shares -= 1
        return data_share(identity, self.examples(identity), run_seed=request.run_seed)

    def _trial_context(self, identity: Identity) -> TrainingContext:
        machine = self.machine or ThisMachine()
        return self.context(self.examples(identity), identity.name, machine)

    def measure(
        self, identity: Identity, hardware: Hardware, examples: Examples | None = None
    ) -> Speed:
        """Measure how fast the device trains, with activation checkpointing if it needs that.

        On ``examples``, or on the client's own.

        Raises:
            OutOfMemory: one example alone does not fit, even with activation checkpointing.
        """
        context = self.context(examples or self.examples(identity), identity.name, hardware)
        context = replace(context, precision=self.precision.chosen)
        return measure_speed(context, hardware, self.checkpointed)

    def train(
        self,
        identity: Identity,
        hardware: Hardware,
        plan: Plan,
        sampler: SamplerState,
        *,
        spool: Spool | None = None,
        algorithm: Any = None,
        order_seed: int | None = None,
        left_out: frozenset[int] = frozenset(),
        store: LocalStore | None = None,
        more: Sequence[Feature] = (),
        least_tested: int = 0,
    ) -> tuple[Update, SamplerState]:
        """Carry out a plan; return the update and the sampler's state with the round pending.

        ``order_seed`` replaces the run's seed in the order of the examples. The places ``left_out``
        of the window are passed over. ``more`` are features of the user's. A test on fewer
        examples than ``least_tested`` is on none.

        The spool's file stays until the update was handed over; it is removed if there is none. The
        parameters that stay on the device are stored when this returns or raises, pending too.

        Raises:
            HeadwaterError: see ``headwater.client.training.round.carry_out``.
        """
        self.progress.begin(plan)
        if not plan.hides_data and not sampler.knows(plan.counted_round):
            log.warning(
                "%s: round %s counted, and this device's state does not know of it (it is new, or "
                "from a backup): examples may be summed again in the same epoch",
                *(identity.name, plan.counted_round),
            )
        sampler = sampler.settle(plan.counted_round, after_round=plan.after_round)
        local = self.load_local(identity, plan, store)
        try:
            examples, whole = self._examples.window(identity, plan, sampler, order_seed)
            positions = whole.without(left_out)
            if self._is_undecided and not plan.hides_data:  # a refusal would tell of the data
                self._is_undecided = False
                own: Examples = Subset(examples, positions.positions)  # type: ignore[arg-type]
                self._compare_more(own, identity.name)
            plan = self.precision.resolved(plan, identity)
            context = self.context(examples, identity.name, hardware)
            work = work_of(plan, positions, context, spool, algorithm, more, least_tested)
            try:
                with hardware.bounded():
                    self._sum(work)
            finally:
                self._left_out_log.note(plan, work.total, context)
            update = update_of(work)
        except Exception:
            if spool is not None:
                spool.remove()
            if store is not None:  # masked, the round may count all the same, with weight 0
                store.write(local.pend(plan.round, local.values_L), self.image.layout)
            raise
        if store is not None:
            store.write(local.pend(plan.round, work.after_L), self.image.layout)
        # The server counts on it that a window's examples come again only in the next epoch.
        is_whole = bool(left_out) or plan.uses_whole_window
        used = whole.positions if is_whole else work.used
        return update, sampler.pend(plan.round, whole.after_use_of(used), whole.order.digest)

    def _sum(self, work: Work) -> None:
        """Sum a window's gradients into the accumulator.

        Raises:
            HeadwaterError: see ``headwater.client.training.round.sum_round``.
        """
        try:
            with room_beside(work):
                sum_round(work)
        except BuffersChanged:
            self.loaded_model.forget()
            raise
        finally:
            self.checkpointed.remember(work.context.name)

    def skip(
        self, identity: Identity, plan: Plan, sampler: SamplerState, order_seed: int | None = None
    ) -> SamplerState:
        """Return the sampler's state with a window pending of which no example can be used."""
        sampler = sampler.settle(plan.counted_round, after_round=plan.after_round)
        _, unusable = self._examples.window(identity, plan, sampler, order_seed)
        after = unusable.after(len(unusable.positions))
        return sampler.pend(plan.round, after, unusable.order.digest)

    def evaluate(
        self, identity: Identity, plan: Plan, store: LocalStore | None = None
    ) -> EvaluateReport:
        """Sum loss and metrics over the client's held-out examples that can be evaluated.

        Raises:
            NonFiniteUpdate: one of the sums is not finite, though each example's loss is.
            TaskFailed: every example raised an exception.
        """
        if takes_model(plan):
            return take_model(self.image, plan, name=identity.name)
        _, held_out = self.split(identity, plan)
        local = self.load_local(identity, plan, store)
        # A step stays pending until the server has stored its round, which it does after this test.
        if store is not None and local.round is not None and local.round < plan.round:
            store.write(local, self.image.layout)
        version = self.loaded_model.version
        tell_round(self.task, plan.round)
        report = self._evaluation.report(
            identity.name,
            held_out,
            batch_size=plan.micro_batch_size,
            run_id=None if version is None else version[0],
            lengths=self._examples.lengths(held_out),
        )
        return report.model_copy(update={"labels": identity.labels})


def room_beside(work: Work) -> AbstractContextManager[None]:
    """Leave room for the update before and for the next model, if both may be on their way."""
    plan, image = work.plan, work.context.image
    if not plan.overlaps:
        return nullcontext()
    num_values = image.layout.num_parameters
    return work.context.memory.holding(plan.update_bytes(num_values) + 4 * num_values)


def built_or_sent(
    limit: Callable[[], MemoryLimit],
    new_model: Callable[[], nn.Module],
    store: Callable[[nn.Module], None],
) -> nn.Module:
    """Return a new model within the limit, its frozen weights stored.

    If there is room for it stored and not as the task builds it, the server is to send them.

    Raises:
        OutOfMemory: the limit has no room for it in either way.
    """
    try:
        model = built_within(limit, new_model)
    except OutOfMemory as error:
        why = error.with_traceback(None)  # its frames would keep what was built
    else:
        store(model)
        return model
    from headwater.client.memory.stand_ins import built_without_values  # few devices need them

    return built_without_values(limit, new_model, store, why)
