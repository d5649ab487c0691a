"""What stays in memory between rounds: the model, the vector, and each device's examples.

One process holds one model and one vector, however many devices it plays: on a laptop one, in the
simulator a thousand.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.utils.data import Subset

from headwater.client.device.hardware import Hardware, ThisMachine
from headwater.client.memory import activation_checkpointing as checkpointing
from headwater.client.secagg.pending import PendingUpdates
from headwater.client.training.accumulator import Accumulator
from headwater.client.training.batches import Batches
from headwater.client.training.context import NO_BATCHES, TrainingContext
from headwater.client.training.gradient_pass import check_runs, checkpointed_bytes
from headwater.client.training.local_update import LocalSum, make_update, sum_gradients
from headwater.client.training.micro_batches import SamplerPosition, SamplerState, Window, held_out_positions, window
from headwater.client.training.probe_fit import Speed
from headwater.client.training.spool import Spool
from headwater.common.data.additivity import check_additive
from headwater.common.data.batches import evaluate_sums
from headwater.common.data.partition_spec import Rule
from headwater.common.data.shares import Shares
from headwater.common.errors import BuffersChanged, ModelMismatch, NonFiniteUpdate, OutOfMemory
from headwater.common.messages import DescribeRequest, DeviceReport, EvaluateReport, Plan, Update
from headwater.common.model.parameters import ModelLayout, build_model
from headwater.common.settings.schema import ClientSettings, Settings
from headwater.common.system.heap import give_back
from headwater.common.task import Examples, load_task

log = logging.getLogger(__name__)

MAX_OPEN_DATASETS = (
    20_000  # devices whose examples stay open: a population may be any number of them
)
TRIED = 8  # examples that must all raise before the task is to blame and not the example
TRIAL = Plan(round=0, run_seed=0, model_version=0, quota=1, micro_batch_size=1)

stop_requested = threading.Event()
"""Set when the process is asked to stop: what was summed so far is sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Which device this is and where its data lies."""

    name: str
    data: Path | None
    part: int
    num_parts: int
    rule: Rule | None = None
    """By which the part is dealt out; None where the task itself splits its data."""


HardwareOf = Callable[[Identity, Settings, ModelLayout], Hardware]


def this_machine(identity: Identity, settings: Settings, layout: ModelLayout) -> Hardware:
    """Return the machine that the process runs on."""
    return _this_machine(settings.client)


@functools.cache
def _this_machine(chosen: ClientSettings) -> ThisMachine:
    """Make the machine once: what it learned of its memory stays with the process."""
    return ThisMachine(chosen)


class Trainer:
    """A task's model and vector in this process, and the devices that share them."""

    def __init__(self, task_spec: str, *, replace_batch_norm: bool, check_task: bool) -> None:
        self.task = load_task(task_spec)
        self.shares = Shares(self.task)
        self.image = build_model(self.task, seed=0, replace_batch_norm=replace_batch_norm)
        self.accumulator = Accumulator(self.image)
        self.held = PendingUpdates()
        self._loaded: tuple[int, int] | None = None
        self._must_check = check_task
        self._opened = functools.lru_cache(maxsize=MAX_OPEN_DATASETS)(self._open)
        self.checkpointed: set[str] = set()
        """The devices with activation checkpointing on; it stays on."""
        self._checkpointed_bytes: float | None = None
        self._is_foreseen = False

    def hold(self, number: int) -> None:
        """Keep open the examples of the last so many devices."""
        if self._opened.cache_parameters()["maxsize"] != number:
            self._opened = functools.lru_cache(maxsize=number)(self._open)

    def examples(self, identity: Identity) -> Examples:
        """Open a device's examples, once, and try the task on the first device's.

        Raises:
            EmptyDataset, MissingData, TaskNotAdditive, TaskFailed: see ``headwater.common.errors``.
            MissingColumn, NoSuchPartition: see ``common.data.shares``.
        """
        return self._opened(identity)

    def _open(self, identity: Identity) -> Examples:
        examples = self.shares.of(
            identity.rule, data=identity.data, part=identity.part, num_parts=identity.num_parts
        )
        if self._must_check:
            self.check(examples, identity.name)
            self._must_check = False
        return examples

    def check(self, examples: Examples, name: str) -> None:
        """Try the task on real examples: it must run, and its loss must be a sum."""
        place = self.workplace(examples, name, ThisMachine())
        try:
            self._foresee(place)
            check_runs(TRIAL, _first_of(place), place)
        finally:
            self._remember(name)
        check_additive(self.task, self.image.model, examples)
        give_back()  # it held the gradients of a few examples at once
        self.accumulator.zero()

    def _foresee(self, place: TrainingContext) -> None:
        """Learn, once, what an example takes with activation checkpointing.

        Before anything is measured without it, as that takes more; and long before memory is short.
        """
        if self._is_foreseen:
            return
        self.image.model.train()
        self._checkpointed_bytes = checkpointed_bytes(TRIAL, _first_of(place), place)
        self._is_foreseen = True
        foreseen = self._checkpointed_bytes
        if foreseen is None:
            log.info("there is nothing in the model that activation checkpointing could drop")
        else:
            log.info("with activation checkpointing an example takes %.1f MiB", foreseen / 2**20)

    def _remember(self, name: str) -> None:
        """Remember that a device has activation checkpointing on; it stays on."""
        if checkpointing.is_on_in(self.image.modules):
            self.checkpointed.add(name)

    def load_model(self, run_id: int, version: int, image: memoryview | bytes) -> None:
        """Take over the server's model, unless this version of it is here already."""
        if self._loaded != (run_id, version):
            self._loaded = None
            self.image.load(image)
            self._loaded = (run_id, version)

    def split(
        self, identity: Identity, *, run_seed: int, fraction: float
    ) -> tuple[Examples, Examples]:
        """Return the examples to train on and those held out."""
        examples = self.examples(identity)
        if fraction == 0:
            return examples, Subset(examples, [])  # type: ignore[arg-type]
        apart = held_out_positions(len(examples), fraction=fraction, run_seed=run_seed, name=identity.name)
        kept = sorted(set(range(len(examples))) - set(apart))
        return Subset(examples, kept), Subset(examples, apart)  # type: ignore[arg-type]

    def _trained_on(self, identity: Identity, plan: Plan) -> Examples:
        """Return what a device trains on: all that it has, less what it holds out."""
        if plan.held_out_fraction == 0:
            return self.examples(identity)
        return self.split(identity, run_seed=plan.run_seed, fraction=plan.held_out_fraction)[0]

    def workplace(
        self,
        examples: Examples,
        name: str,
        hardware: Hardware,
        accumulator: Accumulator | None = None,
        batches: Batches = NO_BATCHES,
    ) -> TrainingContext:
        """Return all that a device needs to work on a plan; the model is set up for this device."""
        self.held.make_room()
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
            restraint=hardware.restraint,
            vitals=hardware.vitals,
            stop=stop_requested.is_set,
            batches=batches,
        )

    def describe(
        self, identity: Identity, hardware: Hardware, request: DescribeRequest
    ) -> DeviceReport:
        """Say what the device is and, if asked, how fast it trains.

        Raises:
            ModelMismatch: the server's model is laid out otherwise.
        """
        if request.layout_digest != self.image.layout.digest:
            raise ModelMismatch(
                f"{identity.name}: this device's model has {self.image.layout.num_parameters:,} "
                f"parameters in layout {self.image.layout.digest[:12]}, the server's has "
                f"{request.num_parameters:,} in {request.layout_digest[:12]}"
            )
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
        """Measure, or look up, how fast the device trains.

        Raises:
            OutOfMemory: one example alone does not fit, not with activation checkpointing either.
        """
        place = self.workplace(self.examples(identity), identity.name, hardware)
        self._foresee(place)
        self.accumulator.zero()
        try:
            speed = hardware.speed(place)
        except OutOfMemory:
            model = self.image.model
            if checkpointing.is_on(model) or not checkpointing.switch_on(model):
                raise
            place.memory.relieve(self._checkpointed_bytes)
            log.warning("%s: one example fits only with activation checkpointing", identity.name)
            self.accumulator.zero()
            speed = hardware.speed(place)
        finally:
            self._remember(identity.name)
            self.accumulator.zero()
        return speed

    def train(
        self,
        identity: Identity,
        hardware: Hardware,
        plan: Plan,
        walk: SamplerState,
        *,
        spool: Spool | None = None,
    ) -> tuple[Update, SamplerState]:
        """Work on a plan; return the update and the walk with the round pending.

        A spool is left until the update was handed over, and removed if there is none.
        """
        walk = walk.settle(plan.counted_round)
        taken, place = self.at(identity, hardware, plan, walk)
        try:
            update = make_update(plan, taken, place, self.sum(plan, taken, place, spool))
        except Exception:
            if spool is not None:
                spool.remove()
            raise
        report = update.report
        num_taken = report.num_examples + report.num_refused
        return update, walk.pend(plan.round, taken.after(num_taken, len(place.examples)))

    def sum(
        self, plan: Plan, taken: Window, place: TrainingContext, spool: Spool | None = None
    ) -> LocalSum:
        """Sum a window's gradients into the place's accumulator.

        Raises:
            HeadwaterError: see ``client.training.local_update.summed``.
        """
        try:
            return sum_gradients(plan, taken, place, spool)
        except BuffersChanged:
            self._loaded = None  # the next plan brings the server's buffers back
            raise
        finally:
            self._remember(place.name)

    def at(
        self,
        identity: Identity,
        hardware: Hardware,
        plan: Plan,
        walk: SamplerState,
    ) -> tuple[Window, TrainingContext]:
        """Return a plan's examples from a place on, and all that the device needs to sum them."""
        examples = self._trained_on(identity, plan)
        taken = _window_of(plan, walk, identity, examples)
        return taken, self.workplace(examples, identity.name, hardware)

    def skip(self, identity: Identity, plan: Plan, walk: SamplerState) -> SamplerState:
        """Return the walk behind a plan's window: nothing in it could be summed, nor ever will."""
        examples = self._trained_on(identity, plan)
        walk = walk.settle(plan.counted_round)
        bad = _window_of(plan, walk, identity, examples)
        return SamplerState(place=bad.after(len(bad.positions), len(examples)))

    def evaluate(self, identity: Identity, plan: Plan) -> EvaluateReport:
        """Sum loss and metrics over the examples that the device holds out.

        Raises:
            NonFiniteUpdate: one of the sums is not finite.
        """
        _, apart = self.split(identity, run_seed=plan.run_seed, fraction=plan.held_out_fraction)
        loss_total, weight, metrics = evaluate_sums(
            self.task, self.image.model, apart, plan.micro_batch_size
        )
        if not all(math.isfinite(value) for value in (loss_total, *metrics.values())):
            raise NonFiniteUpdate(f"{identity.name}: the held-out loss or a metric is not finite")
        return EvaluateReport(
            name=identity.name, weight=weight, loss_sum=loss_total, metric_sums=metrics
        )


def _first_of(place: TrainingContext) -> Window:
    num_examples = len(place.examples)
    return window(SamplerPosition(), quota=TRIED, run_seed=0, name=place.name, num_examples=num_examples)


def _window_of(plan: Plan, walk: SamplerState, identity: Identity, examples: Examples) -> Window:
    return window(
        walk.place,
        quota=plan.quota,
        num_more=plan.most_examples - plan.quota,
        run_seed=plan.run_seed,
        name=identity.name,
        num_examples=len(examples),
    )


@functools.cache
def trainer_of(task_spec: str, *, replace_batch_norm: bool, check_task: bool) -> Trainer:
    """Return this process's resident for a task, made at the first call."""
    return Trainer(task_spec, replace_batch_norm=replace_batch_norm, check_task=check_task)
