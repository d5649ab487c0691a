"""A run: rounds of planning, summing, one division and one step, each whole or not at all.

Nothing here knows of Flower or of sockets: a ``Fleet`` brings the devices' answers, in any order.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import save_file

from common.errors import (
    CheckpointCorrupt,
    CountOutOfRange,
    HeadwaterError,
    RoundAborted,
    SettingsError,
    StateError,
    TaskError,
    TooFewClients,
    UnexpectedUpdate,
    UpdateRefused,
)
from common.parameters import ModelImage, build_model, load_initial, state_dict
from common.settings import Settings
from common.task import load_task, max_weight_per_example
from common.update import DescribeRequest, DeviceReport, EvaluateReport, Plan, Update, UpdateReport
from server import checkpoint, evaluate
from server.aggregate import CohortSum
from server.cohort import select
from server.metrics import ClientRow, Journal, RoundRow, client_row
from server.planner import Assignment, assign
from server.server_optimizer import ServerOptimizer

log = logging.getLogger(__name__)

MODEL = "model.safetensors"
SETTINGS = "settings.toml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropout:
    """A client that was asked and did not finish, and why."""

    name: str
    error: HeadwaterError


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that went over the wire so far."""

    bytes_up: int = 0
    bytes_down: int = 0


class Fleet(Protocol):
    """The devices, as the rounds see them."""

    def describe(self, request: DescribeRequest, *, min_clients: int) -> list[DeviceReport]:
        """Wait until ``min_clients`` are there, and return the report of every device that is."""
        ...

    def train(
        self, plans: Mapping[str, Plan], image: ModelImage, *, timeout_seconds: float | None
    ) -> Iterator[Update | Dropout]:
        """Send plans and model, and yield each answer as it comes.

        An update's vector is valid until the next one is asked for.
        """
        ...

    def evaluate(
        self, plans: Mapping[str, Plan], image: ModelImage, *, timeout_seconds: float | None
    ) -> Iterator[EvaluateReport | Dropout]:
        """Send the model for evaluation, and yield each answer as it comes."""
        ...

    def traffic(self) -> Traffic:
        """Return the bytes sent and received so far."""
        ...

    def simulated_state(self) -> dict[str, Any]:
        """Return the devices' own state, if they live and die with this process; else nothing."""
        ...

    def restore_simulated(self, state: Mapping[str, Any]) -> None:
        """Take up what ``simulated_state`` gave."""
        ...


OnRound = Callable[[RoundRow], None]


class Training:
    """The state of one run, and its rounds."""

    def __init__(self, settings: Settings, *, run_id: int) -> None:
        """Build the model at its start.

        Raises:
            SettingsError, TaskError, ModelMismatch: see ``common.errors``.

        """
        if settings.task is None:
            raise SettingsError("no task is set", remedy="name it with --task FILE.py:Class")
        self.settings = settings
        self.task = load_task(settings.task)
        self.image = build_model(
            self.task, seed=settings.seed, replace_batch_norm=settings.model.replace_batch_norm
        )
        if settings.model.initial is not None:
            load_initial(self.image, settings.model.initial)
        self.optimizer = ServerOptimizer(self.image, settings.optimizer, settings.schedule)
        self.sum = CohortSum(self.image.layout)
        self.round = 0
        self.run_id = run_id
        self.counted: dict[str, int] = {}
        self.seconds = 0.0

    def resume(self, folder: Path, fleet: Fleet) -> bool:
        """Take up the checkpoint in ``folder``; False if there is none.

        Raises:
            CheckpointCorrupt: it cannot be read, or is that of another model.

        """
        found = checkpoint.load(folder)
        if found is None:
            return False
        progress, image_U8, optimizer = found
        if progress.layout_digest != self.image.layout.digest:
            raise CheckpointCorrupt(
                f"the checkpoint in {folder} is that of another model",
                remedy="resume with the task that the run was started with",
            )
        self.image.bytes_U8.copy_(image_U8)
        self.optimizer.restore(optimizer, progress.optimizer)
        self.sum.restore(progress.largest)
        self.round, self.run_id = progress.round, progress.run_id
        self.counted, self.seconds = dict(progress.counted), progress.seconds
        fleet.restore_simulated(progress.simulated)
        return True

    def describe_request(self) -> DescribeRequest:
        """Return what every device is asked when it is first seen."""
        return DescribeRequest(
            run_seed=self.settings.seed,
            wants_speed=self.settings.plan.accumulation_steps is None,
            layout_digest=self.image.layout.digest,
            num_parameters=self.image.layout.num_parameters,
            held_out_fraction=self._held_out_fraction,
        )

    @property
    def _held_out_fraction(self) -> float:
        chosen = self.settings.evaluation
        return chosen.held_out_fraction if chosen.on_devices else 0.0

    def plan_round(self, reports: Iterable[DeviceReport]) -> dict[str, Plan]:
        """Choose the next round's cohort and what each member is asked to do.

        Raises:
            TooFewClients: the planner left out so many that the round cannot count.

        """
        cohort, round_number = self.settings.cohort, self.round + 1
        by_name = {report.name: report for report in reports}
        invited = select(
            list(by_name), size=cohort.size, seed=self.settings.seed, round_number=round_number
        )
        assignments = assign(
            [by_name[name] for name in invited],
            self.settings.plan,
            deadline_seconds=cohort.deadline_seconds,
        )
        if len(assignments) < cohort.min_clients:
            raise TooFewClients(
                f"round {round_number}: {len(assignments)} of {len(invited)} invited clients can "
                f"finish one example in time, at least {cohort.min_clients} are needed"
            )
        return {
            name: self._plan(name, assignments[name]) for name in invited if name in assignments
        }

    def _plan(self, name: str, assignment: Assignment) -> Plan:
        chosen = self.settings.plan
        return Plan(
            round=self.round + 1,
            run_seed=self.settings.seed,
            model_version=self.round,
            quota=assignment.quota,
            micro_batch_size=assignment.micro_batch_size,
            local_steps=chosen.local_steps,
            local_learning_rate=chosen.local_learning_rate,
            precision=chosen.precision,
            deadline_seconds=self.settings.cohort.deadline_seconds,
            counted_round=self.counted.get(name),
            held_out_fraction=self._held_out_fraction,
            reason=assignment.reason,
        )

    def open_round(self, plans: Mapping[str, Plan]) -> OpenRound:
        """Empty the sum for a round of these plans."""
        bound = max_weight_per_example(self.task)
        self.sum.open(
            num_clients=len(plans),
            planned_weight=bound * sum(plan.quota for plan in plans.values()),
        )
        return OpenRound(plans=plans, total=self.sum, max_weight_per_example=bound)

    def commit(self, opened: OpenRound) -> None:
        """Divide once and take the step; the round counts from here on.

        Raises:
            TooFewClients: fewer updates than --min-clients; nothing has changed.

        """
        needed = self.settings.cohort.min_clients
        if len(opened.accepted) < max(needed, 1):
            why = "; ".join(f"{name}: {error}" for name, error in list(opened.refused.items())[:3])
            raise TooFewClients(
                f"round {self.round + 1}: {len(opened.accepted)} of {len(opened.plans)} clients "
                f"answered in time, at least {needed} are needed" + (f" ({why})" if why else "")
            )
        self.optimizer.step(self.sum.close())
        self.round += 1
        self.counted |= dict.fromkeys(opened.accepted, self.round)

    def progress(self, fleet: Fleet, optimizer: str) -> checkpoint.Progress:
        """Gather what a checkpoint holds beside its tensors."""
        return checkpoint.Progress(
            run_id=self.run_id,
            round=self.round,
            layout_digest=self.image.layout.digest,
            optimizer=optimizer,
            largest=self.sum.largest,
            counted=self.counted,
            seconds=self.seconds,
            simulated=fleet.simulated_state(),
        )


class OpenRound:
    """A round in progress: which updates were accepted, which refused."""

    def __init__(
        self, *, plans: Mapping[str, Plan], total: CohortSum, max_weight_per_example: int
    ) -> None:
        self.plans = plans
        self.accepted: dict[str, UpdateReport] = {}
        self.refused: dict[str, HeadwaterError] = {}
        self._total = total
        self._max_weight = max_weight_per_example

    def take(self, answer: Update | Dropout) -> None:
        """Check an answer and fold it, or count why not."""
        if isinstance(answer, Dropout):
            self.refused[answer.name] = answer.error
            return
        report = answer.report
        try:
            self._check(report)
            self._total.check(answer.values_P, name=report.name)
        except UpdateRefused as error:
            log.warning("%s: %s", error.code, error)
            if report.name not in self.accepted:
                self.refused[report.name] = error
            return
        self._total.fold(answer.values_P, report.weight)
        self.accepted[report.name] = report

    def _check(self, report: UpdateReport) -> None:
        """Hold a report against its plan.

        Raises:
            UnexpectedUpdate: nobody asked for it, or it is here already.
            CountOutOfRange: more examples or weight than the plan can lead to, or none.

        """
        plan = self.plans.get(report.name)
        if plan is None or report.name in self.accepted:
            raise UnexpectedUpdate(f"{report.name}: no update of it is awaited")
        if report.round != plan.round:
            raise UnexpectedUpdate(
                f"{report.name}: an update for round {report.round} in round {plan.round}"
            )
        if not 0 < report.num_examples <= plan.quota:
            raise CountOutOfRange(
                f"{report.name}: {report.num_examples} examples, its quota was {plan.quota}"
            )
        if not 0 < report.weight <= report.num_examples * self._max_weight:
            raise CountOutOfRange(
                f"{report.name}: weight {report.weight} for {report.num_examples} examples of at "
                f"most {self._max_weight} each"
            )
        if len(report.steps) > plan.quota + 1:
            raise CountOutOfRange(
                f"{report.name}: {len(report.steps)} steps for {plan.quota} examples"
            )


def run(training: Training, fleet: Fleet, *, on_round: OnRound, resume: bool = False) -> None:
    """Run all rounds of ``training.settings`` and leave the model and its metrics in ``out``.

    Raises:
        HeadwaterError: see ``common.errors``. What was committed stays in the checkpoint.

    """
    settings = training.settings
    folder = settings.out
    journal = None
    if folder is not None:
        if resume and training.resume(folder, fleet):
            log.info("resumed behind round %d", training.round)
        elif (folder / checkpoint.FILE).exists() and not resume:
            raise SettingsError(
                f"{folder} holds the checkpoint of another run",
                remedy="go on with it by --resume, or choose another --out",
            )
        journal = Journal(folder, resumed_round=training.round)
        _write_settings(folder, settings)
    try:
        _run_rounds(training, fleet, journal, on_round)
    finally:
        if journal is not None and folder is not None:
            journal.close()
            _save_model(folder, training)


def _run_rounds(
    training: Training, fleet: Fleet, journal: Journal | None, on_round: OnRound
) -> None:
    settings = training.settings
    num_aborted = 0
    while training.round < settings.rounds:
        try:
            row = _run_round(training, fleet)
        except RoundAborted as error:
            num_aborted += 1
            log.warning("%s: %s", error.code, error)
            if num_aborted >= settings.cohort.max_aborted_rounds:
                raise
            continue
        num_aborted = 0
        if journal is not None and settings.out is not None:
            journal.append(row)
            tensors, rest = training.optimizer.state()
            checkpoint.save(
                settings.out,
                training.progress(fleet, rest),
                image_U8=training.image.bytes_U8,
                optimizer=tensors,
            )
        on_round(row)


def _run_round(training: Training, fleet: Fleet) -> RoundRow:
    """Run one round and commit it in memory."""
    settings = training.settings
    watch = _Stopwatch()
    reports = fleet.describe(training.describe_request(), min_clients=settings.cohort.min_clients)
    plans = training.plan_round(reports)
    watch.lap("plan")
    before = fleet.traffic()
    opened = training.open_round(plans)
    fold_seconds = 0.0
    timeout = settings.cohort.deadline_seconds
    for answer in fleet.train(plans, training.image, timeout_seconds=timeout):
        start = time.perf_counter()
        opened.take(answer)
        fold_seconds += time.perf_counter() - start
    watch.lap("train", less=fold_seconds)
    watch.split["fold"] = fold_seconds
    _raise_common_fault(opened)
    rate = training.optimizer.learning_rate
    training.commit(opened)
    watch.lap("step")
    metrics = _evaluate(training, fleet, opened)
    watch.lap("evaluate")
    after = fleet.traffic()
    training.seconds += watch.total
    reports_in = opened.accepted.values()
    weight = sum(report.weight for report in reports_in)
    return RoundRow(
        round=training.round,
        num_clients=len(opened.accepted),
        num_invited=len(plans),
        num_examples=sum(report.num_examples for report in reports_in),
        weight=weight,
        loss=math.fsum(report.loss_sum for report in reports_in) / weight,
        metrics=metrics,
        learning_rate=rate,
        seconds=watch.total,
        seconds_split=watch.split,
        slowest_client_seconds=max(report.seconds for report in reports_in),
        updates_per_hour=3600 * len(opened.accepted) / watch.total,
        bytes_up=after.bytes_up - before.bytes_up,
        bytes_down=after.bytes_down - before.bytes_down,
        num_scale_shifts=training.sum.num_shifts,
        refused={name: f"{error.code}: {error}" for name, error in opened.refused.items()},
        clients=_rows(opened),
    )


def _rows(opened: OpenRound) -> list[ClientRow]:
    return [
        client_row(opened.accepted[name], plan_reason=plan.reason, local_steps=plan.local_steps)
        for name, plan in opened.plans.items()
        if name in opened.accepted
    ]


def _raise_common_fault(opened: OpenRound) -> None:
    """If a fault of the task kept every client from answering, it is the run's fault."""
    if not opened.accepted:
        for error in opened.refused.values():
            if isinstance(error, TaskError):
                raise error


def _evaluate(training: Training, fleet: Fleet, opened: OpenRound) -> dict[str, float]:
    """Return the round's metrics: training sums always, test and held-out when they are due."""
    reports = opened.accepted.values()
    names = sorted({name for report in reports for name in report.metric_sums})
    sums = {n: math.fsum(report.metric_sums.get(n, 0.0) for report in reports) for n in names}
    weight = sum(report.weight for report in reports)
    metrics = {f"train_{name}": value / weight for name, value in sums.items()}
    chosen = training.settings.evaluation
    is_last = training.round == training.settings.rounds
    if training.round % chosen.every_rounds and not is_last:
        return metrics
    metrics |= evaluate.on_server(training.task, training.image)
    if chosen.on_devices:
        plans = {
            name: plan.model_copy(update={"model_version": training.round})
            for name, plan in opened.plans.items()
        }
        answers = fleet.evaluate(
            plans, training.image, timeout_seconds=training.settings.cohort.deadline_seconds
        )
        metrics |= evaluate.on_devices(a for a in answers if isinstance(a, EvaluateReport))
    return metrics


class _Stopwatch:
    """Splits a round's seconds by what they were spent on."""

    def __init__(self) -> None:
        self.split: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str, *, less: float = 0.0) -> None:
        now = time.perf_counter()
        self.split[name] = now - self._last - less
        self._last = now

    @property
    def total(self) -> float:
        return sum(self.split.values())


def _write_settings(folder: Path, settings: Settings) -> None:
    try:
        (folder / SETTINGS).write_text(settings.to_toml())
    except OSError as error:
        raise StateError(f"cannot write {folder / SETTINGS}: {error.strerror}") from error


def _save_model(folder: Path, training: Training) -> None:
    def write(part: Path) -> None:
        save_file(state_dict(training.image), part)

    try:
        checkpoint.write_whole(folder / MODEL, write)
    except Exception as error:
        raise StateError(
            f"the model could not be saved in {folder}: {error}",
            remedy="free space and go on with --resume: the checkpoint holds the model",
        ) from error
