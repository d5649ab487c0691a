"""Trains a task's model for the clients of this process, round after round.

One process holds one model and one gradient vector, however many clients it plays: one on a laptop,
a thousand in the simulator.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.data import Subset

from headwater.client.device.hardware import ThisMachine
from headwater.client.device.interfaces import Hardware, Speed
from headwater.client.memory import activation_checkpointing as checkpointing
from headwater.client.memory.activation_checkpointing import Footprint
from headwater.client.training.accumulation import LeftOutLog
from headwater.client.training.accumulator import Accumulator
from headwater.client.training.batch_fetch import Batches
from headwater.client.training.context import NO_BATCHES, Identity, TrainingContext
from headwater.client.training.local_update import (
    ClientAlgorithm,
    LocalSum,
    make_update,
    sum_gradients,
)
from headwater.client.training.probe import ExampleProbe
from headwater.client.training.progress import TrainingProgress
from headwater.client.training.sampler import SamplerState, Window, held_out_positions, window
from headwater.client.training.spool import Spool
from headwater.client.training.task_trial import CheckReport, check_task, predicted_footprint
from headwater.common.data.client_datasets import ClientDatasets
from headwater.common.data.evaluation import EvaluationSums, evaluate_sums
from headwater.common.data.example_faults import details, short_summary
from headwater.common.errors import (
    BuffersChanged,
    CountOutOfRange,
    NonFiniteUpdate,
    OutOfMemory,
)
from headwater.common.messages import DescribeRequest, DeviceReport, EvaluateReport, Plan, Update
from headwater.common.model.local_state import LocalState, LocalStore
from headwater.common.model.mismatch import mismatch_error
from headwater.common.model.parameters import ModelImage, build_model
from headwater.common.system.heap import release_freed_memory
from headwater.common.task import Examples, load_task
from headwater.common.user_code import running
from headwater.common.wording import counted

log = logging.getLogger(__name__)

Trial = Callable[[TrainingContext], None]
"""A trial on a client's first examples, beside the task's check; it raises what it finds."""

MAX_OPEN_DATASETS = 20_000  # of clients; a simulated population may have any size
# The most examples of a window that uses some of them more than once: it is a list in memory.
MAX_REPEATED = 1 << 24


class Trainer:
    """A task's model and gradient vector, shared by the clients of this process."""

    def __init__(
        self,
        task_spec: str,
        *,
        replace_batch_norm: bool,
        check_task: bool,
        local_parameters: str | None = None,
        trial: Trial | None = None,
    ) -> None:
        self._replace_batch_norm = replace_batch_norm
        self.task = load_task(task_spec)
        self.datasets = ClientDatasets(self.task)
        self.local_parameters = local_parameters
        """The patterns of the parameters that stay on the device."""
        self.image = self._built(seed=0)
        self.accumulator = Accumulator(self.image)
        self.progress = TrainingProgress()
        self.stop_requested = threading.Event()
        """Set when the device is to stop: training ends early, and the sum so far is sent."""
        self.checkpointed: set[str] = set()
        """Names of the clients with activation checkpointing on; it is never switched off again."""
        self._loaded: tuple[int, int] | None = None
        self._initial: tuple[int, Tensor] | None = None
        self._must_check = check_task
        self.first_check: CheckReport | None = None
        """The report of the task's check; None before it, or if it is off."""
        self.logs_left_out = True
        """Whether the check logs the first client's examples that cannot be trained on."""
        self._trial = trial
        self._opened = functools.lru_cache(maxsize=MAX_OPEN_DATASETS)(self._open)
        self.machine: Hardware | None = None
        """The machine whose memory the check keeps to; None for the process's own limits alone."""
        self._footprint: Footprint | None = None
        self._left_out_log = LeftOutLog()
        self._num_not_evaluated: dict[str, tuple[int | None, int]] = {}
        """The run, and how many held-out examples each client left out in its last evaluation."""
        self._is_checkpointing_measured = False

    def keep_open(self, num_clients: int) -> None:
        """Keep the examples of the last ``num_clients`` clients open."""
        if self._opened.cache_parameters()["maxsize"] != num_clients:
            self._opened = functools.lru_cache(maxsize=num_clients)(self._open)

    # Examples.

    def examples(self, identity: Identity) -> Examples:
        """Open a client's examples, once; check the task on the first client's.

        Raises:
            EmptyDataset, MissingData, TaskNotAdditive, TaskFailed: see ``headwater.common.errors``.
            MissingColumn, NoSuchPartition: see ``headwater.common.data.client_datasets``.
        """
        return self._opened(identity)

    def _open(self, identity: Identity) -> Examples:
        examples = self.datasets.of(
            identity.rule, data=identity.data, part=identity.part, num_parts=identity.num_parts
        )
        if self._must_check:
            report = self.check(examples, identity.name)
            self._must_check, self.first_check = False, report
            if report.left_out is not None and self.logs_left_out:
                log.warning("%s: %s", identity.name, report.left_out)
            for note in report.notes:
                log.info("%s: %s", identity.name, note)
        return examples

    def split(
        self, identity: Identity, *, run_seed: int, fraction: float
    ) -> tuple[Examples, Examples]:
        """Return the examples to train on and the held-out ones, a ``fraction`` of all."""
        examples = self.examples(identity)
        if fraction == 0:
            return examples, Subset(examples, [])  # type: ignore[arg-type]
        held_out = held_out_positions(
            len(examples), fraction=fraction, run_seed=run_seed, name=identity.name
        )
        rest = sorted(set(range(len(examples))) - set(held_out))
        return Subset(examples, rest), Subset(examples, held_out)  # type: ignore[arg-type]

    def _window(
        self, identity: Identity, plan: Plan, sampler: SamplerState, order_seed: int | None = None
    ) -> tuple[Examples, Window]:
        """Return the client's training examples and the plan's window of them.

        ``order_seed`` replaces the run's seed in the order of the examples.

        Raises:
            CountOutOfRange: the plan asks for more examples than a device can list.
        """
        examples, _ = self.split(identity, run_seed=plan.run_seed, fraction=plan.held_out_fraction)
        if plan.quota > max(len(examples), MAX_REPEATED):
            raise CountOutOfRange(
                f"{identity.name}, round {plan.round}: the plan asks for {plan.quota:,} examples, "
                f"and the device has {len(examples):,}; with repetitions it gives at most "
                f"{MAX_REPEATED:,}"
            )
        return examples, window(
            sampler.place,
            quota=plan.quota,
            num_more=plan.max_examples - plan.quota,
            run_seed=plan.run_seed if order_seed is None else order_seed,
            name=identity.name,
            num_examples=len(examples),
        )

    def numbers(
        self, identity: Identity, plan: Plan, sampler: SamplerState, order_seed: int
    ) -> tuple[int, ...]:
        """Return the numbers, in the client's whole data, of the examples of a plan's window.

        ``sampler`` is settled (``SamplerState.settle``).

        Raises:
            CountOutOfRange: the plan asks for more examples than a device can list.
        """
        examples, chosen = self._window(identity, plan, sampler, order_seed)
        if plan.held_out_fraction == 0 or not isinstance(examples, Subset):
            return chosen.positions
        return tuple(examples.indices[position] for position in chosen.positions)

    # The model and the device.

    def _built(self, *, seed: int) -> ModelImage:
        return build_model(
            self.task,
            seed=seed,
            replace_batch_norm=self._replace_batch_norm,
            local_parameters=self.local_parameters,
        )

    def load_local(self, identity: Identity, plan: Plan, store: LocalStore | None) -> LocalState:
        """Load a client's own parameters, as of its last counted round; empty if it has none.

        Until an update of the client has counted, they are the initial ones of the run's seed, on
        the device as on the server.
        """
        if store is None:
            assert not self.image.layout.local
            return LocalState(values_L=self.image.local_L)
        last = plan.counted_round
        state = None if last is None else store.read(self.image.layout)
        if state is None:
            state = LocalState(values_L=self._initial_local(plan.run_seed))
        state = state.settle(last)
        if state.round != last:
            log.warning(
                "%s: the parameters that stay on this device %s, and its last counted round is %d: "
                "the steps between are lost",
                identity.name,
                "are not stored" if state.round is None else f"are of round {state.round}",
                last,
            )
        self.image.local_L.copy_(state.values_L)
        return state

    def _initial_local(self, seed: int) -> Tensor:
        if self._initial is None or self._initial[0] != seed:
            with torch.random.fork_rng(devices=[]):
                self._initial = seed, self._built(seed=seed).local_L
        return self._initial[1]

    def load_model(self, run_id: int, version: int, image: memoryview | bytes) -> None:
        """Load the server's model unless this version of it is loaded already."""
        if self._loaded != (run_id, version):
            self._loaded = None
            self.image.load(image)
            self._loaded = (run_id, version)

    def check(self, examples: Examples, name: str) -> CheckReport:
        """Check the task on real examples: it must run, and what it returns must be sums.

        Then comes the trial, if there is one.

        Raises:
            TaskError, OutOfMemory: see ``check_task``.
            HeadwaterError: the trial failed.
        """
        context = self.context(examples, name, self.machine or ThisMachine())
        try:
            self._measure_checkpointing(context)
            self.accumulator.zero()
            report = check_task(context, predicted=self._footprint)
            self.accumulator.check_views()
            if self._trial is not None:
                self._trial(context)
        finally:
            self._remember_checkpointing(name)
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
        if name in self.checkpointed:
            checkpointing.switch_on(self.image.model)
        elif self.checkpointed:
            checkpointing.switch_off(self.image.model)
        return TrainingContext(
            task=self.task,
            image=self.image,
            accumulator=accumulator or self.accumulator,
            examples=examples,
            name=name,
            clock=hardware.clock,
            memory=hardware.memory,
            checkpointed_bytes=self._checkpointed_bytes,
            time_share=hardware.time_share,
            vitals=hardware.vitals,
            should_stop=self.stop_requested.is_set,
            batches=batches,
            progress=self.progress,
        )

    def _measure_checkpointing(self, context: TrainingContext) -> None:
        """Measure, once, how many bytes an example takes with activation checkpointing.

        This comes before any measurement without checkpointing, which takes more memory, and long
        before memory is short.
        """
        if self._is_checkpointing_measured:
            return
        self.image.model.train()
        self._footprint = found = predicted_footprint(context)
        self._is_checkpointing_measured = True
        if found is None:
            log.info("the model has no blocks for activation checkpointing, or no example works")
        else:
            log.info(
                "an example keeps %.1f MiB, and takes %.1f with activation checkpointing",
                found.plain / 2**20,
                found.checkpointed / 2**20,
            )

    @property
    def _checkpointed_bytes(self) -> float | None:
        return None if self._footprint is None else self._footprint.checkpointed

    def _remember_checkpointing(self, name: str) -> None:
        if checkpointing.is_on_in(self.image.modules):
            self.checkpointed.add(name)

    # Requests of the server.

    def check_layout(self, identity: Identity, request: DescribeRequest) -> None:
        """Check that the server's model has this device's layout.

        Raises:
            ModelMismatch: with the first tensor that differs.
        """
        if request.layout_digest == self.image.layout.digest:
            return
        layout, there = self.image.layout, "the server's model"
        raise mismatch_error(
            f"{identity.name}: this device's model has {layout.num_parameters:,} parameters, "
            f"{there} has {request.num_parameters:,}",
            layout.rows,
            request.layout,
            here="this device's",
            there=there,
        )

    def has_own_model(self) -> bool:
        """Whether the model is the one that the task builds here, not one of the server's."""
        own = self._built(seed=0)
        return bool(torch.equal(own.bytes_U8, self.image.bytes_U8))

    def describe(
        self, identity: Identity, hardware: Hardware, request: DescribeRequest
    ) -> DeviceReport:
        """Describe the device and, if the request wants it, measure how fast it trains.

        Raises:
            ModelMismatch: the server's model has another layout.
        """
        self.check_layout(identity, request)
        examples, _ = self.split(
            identity, run_seed=request.run_seed, fraction=request.held_out_fraction
        )
        speed = self.measure(identity, hardware) if request.wants_speed else None
        return DeviceReport(
            name=identity.name,
            num_examples=len(examples),
            layout_digest=self.image.layout.digest,
            cores=hardware.cores(),
            vitals=hardware.vitals(),
            seconds_per_micro_batch=speed.seconds_per_micro_batch if speed else None,
            seconds_per_example=speed.seconds_per_example if speed else None,
            fastest_micro_batch_size=speed.fastest_micro_batch_size if speed else None,
        )

    def measure(self, identity: Identity, hardware: Hardware) -> Speed:
        """Measure how fast the device trains, with activation checkpointing if it needs that.

        Raises:
            OutOfMemory: one example alone does not fit, even with activation checkpointing.
        """
        context = self.context(self.examples(identity), identity.name, hardware)
        self._measure_checkpointing(context)
        self.accumulator.zero()
        probe = ExampleProbe(context)
        try:
            speed = hardware.speed(probe)
        except OutOfMemory:
            model = self.image.model
            if checkpointing.is_on(model) or not checkpointing.switch_on(model):
                raise
            context.memory.use_checkpointing(self._checkpointed_bytes)
            log.warning("%s: one example fits only with activation checkpointing", identity.name)
            self.accumulator.zero()
            speed = hardware.speed(probe)
        finally:
            self._remember_checkpointing(identity.name)
            self.accumulator.zero()
        return speed

    def train(
        self,
        identity: Identity,
        hardware: Hardware,
        plan: Plan,
        sampler: SamplerState,
        *,
        spool: Spool | None = None,
        algorithm: ClientAlgorithm | None = None,
        order_seed: int | None = None,
        left_out: frozenset[int] = frozenset(),
        store: LocalStore | None = None,
    ) -> tuple[Update, SamplerState]:
        """Carry out a plan; return the update and the sampler's state with the round pending.

        ``order_seed`` replaces the run's seed in the order of the examples. The places ``left_out``
        of the window are passed over.

        The spool's file stays until the update was handed over; it is removed if there is none. The
        parameters that stay on the device are stored when this returns or raises, pending too.

        Raises:
            HeadwaterError: see ``sum_gradients`` and ``make_update`` in
                ``headwater.client.training.local_update``.
        """
        self.progress.begin(plan)
        sampler = sampler.settle(plan.counted_round)
        local = self.load_local(identity, plan, store)
        try:
            examples, whole = self._window(identity, plan, sampler, order_seed)
            positions = whole.without(left_out)
            context = self.context(examples, identity.name, hardware)
            local_sum = self.sum(plan, positions, context, spool, algorithm)
            self._left_out_log.note(plan, local_sum.total, context)
            update = make_update(plan, positions, context, local_sum)
        except Exception:
            if spool is not None:
                spool.remove()
            if store is not None:  # masked, the round may count all the same, with weight 0
                store.write(local.pend(plan.round, local.values_L), self.image.layout)
            raise
        if store is not None:
            store.write(local.pend(plan.round, local_sum.local_L), self.image.layout)
        num_passed = len(whole.positions) if left_out else local_sum.num_used
        return update, sampler.pend(plan.round, whole.after(num_passed))

    def sum(
        self,
        plan: Plan,
        positions: Window,
        context: TrainingContext,
        spool: Spool | None = None,
        algorithm: ClientAlgorithm | None = None,
    ) -> LocalSum:
        """Sum a window's gradients into the context's accumulator.

        Raises:
            HeadwaterError: see ``headwater.client.training.local_update.sum_gradients``.
        """
        try:
            return sum_gradients(plan, positions, context, spool, algorithm)
        except BuffersChanged:
            self._loaded = None  # load the server's buffers again with the next plan
            raise
        finally:
            self._remember_checkpointing(context.name)

    def skip(
        self, identity: Identity, plan: Plan, sampler: SamplerState, order_seed: int | None = None
    ) -> SamplerState:
        """Return the sampler's state with a window pending of which no example can be used."""
        sampler = sampler.settle(plan.counted_round)
        _, unusable = self._window(identity, plan, sampler, order_seed)
        return sampler.pend(plan.round, unusable.after(len(unusable.positions)))

    def evaluate(
        self, identity: Identity, plan: Plan, store: LocalStore | None = None
    ) -> EvaluateReport:
        """Sum loss and metrics over the client's held-out examples that can be evaluated.

        Raises:
            NonFiniteUpdate: one of the sums is not finite, though each example's loss is.
            TaskFailed: every example raised an exception.
        """
        _, held_out = self.split(identity, run_seed=plan.run_seed, fraction=plan.held_out_fraction)
        local = self.load_local(identity, plan, store)
        if store is not None and local.round is not None:
            store.write(local, self.image.layout)  # the last round's step is no longer pending
        with running("the evaluation on held-out examples"):
            total = evaluate_sums(self.task, self.image.model, held_out, plan.micro_batch_size)
        self._log_not_evaluated(identity.name, total, held_out)
        if not all(math.isfinite(value) for value in (total.loss_sum, *total.metric_sums.values())):
            raise NonFiniteUpdate(f"{identity.name}: the held-out loss or a metric is not finite")
        return EvaluateReport(
            name=identity.name,
            weight=total.weight,
            loss_sum=total.loss_sum,
            metric_sums=total.metric_sums,
            num_refused=len(total.faults),
        )

    def _log_not_evaluated(self, name: str, total: EvaluationSums, held_out: Examples) -> None:
        """Log how many held-out examples are left out, and why, whenever their number changes."""
        number = len(total.faults)
        found = (None if self._loaded is None else self._loaded[0], number)
        if not number or self._num_not_evaluated.get(name) == found:
            return
        self._num_not_evaluated[name] = found
        log.warning(
            "%s: %d of %s cannot be evaluated and are left out: %s",
            name,
            number,
            counted(len(held_out), "held-out example"),
            short_summary(total.faults, held_out),
        )
        for kind, detail in details(total.faults).items():
            log.warning("%s: %s: %s", name, kind, detail)
