"""The state of a run and the round in progress: plan, check each update, fold it, commit.

A round counts whole or not at all: until ``commit`` neither model, optimizer nor places have
changed. Only what was learned of the devices' speed and lateness outlives an aborted round.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import (
    CheckpointCorrupt,
    CountOutOfRange,
    Diverged,
    EmptyUpdate,
    HeadwaterError,
    LateUpdate,
    SettingsError,
    TooFewClients,
    UnexpectedUpdate,
    UpdateRefused,
)
from common.parameters import build_model, load_initial
from common.settings import Settings
from common.task import load_task, max_weight_per_example
from common.update import DescribeRequest, DeviceReport, Plan, Update, UpdateReport
from server import checkpoint, evaluate
from server.aggregate import CohortSum
from server.cohort import select
from server.fleet import Dropout, Fleet
from server.noise_scale import RoundNoise, round_noise, squared_norm, sums_of, total
from server.pace import Pace, at_pace, followed, told
from server.planner import DEADLINE_SHARE, Assignment, assign
from server.server_optimizer import ServerOptimizer, rate_factor
from server.target import Target, gathered

log = logging.getLogger(__name__)

NOTHING_FINITE = "lower --learning-rate if the model diverged, or look at the devices' data"

# The share of the deadline in which a device trains: less each time that it comes too late, so that
# model and update have time to travel, and a little more again each time that it does not.
LATE_FACTOR, IN_TIME_FACTOR, LEAST_SHARE = 0.6, 1.02, 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """What a round's step was taken with."""

    learning_rate: float
    target: int | None
    noise: RoundNoise | None
    noise_scale: float | None


class Training:
    """The state of one run: model, optimizer, sum, and what each device had counted."""

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
        self.test_examples = evaluate.open_test_examples(self.task, self.image)
        self.optimizer = ServerOptimizer(self.image, settings.optimizer, settings.schedule)
        self.target = Target(
            settings.plan, max_weight_per_example=max_weight_per_example(self.task)
        )
        self.sum = CohortSum(self.image.layout)
        self.round = 0
        self.run_id = run_id
        self.counted: dict[str, int] = {}
        self.paces: dict[str, Pace] = {}
        self.shares: dict[str, float] = {}
        self.owned: dict[str, int] = {}

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
        for key, was in progress.asked.items():
            if self._asked()[key] != was:
                raise SettingsError(
                    f"the run in {folder} was started with {key} = {was!r}, not "
                    f"{self._asked()[key]!r}: the devices' places would mean other examples",
                    remedy="resume with the settings that it left: --resume --out DIR alone",
                )
        self.image.bytes_U8.copy_(image_U8)
        self.optimizer.restore(optimizer, progress.optimizer)
        self.sum.restore(progress.largest)
        self.round, self.run_id = progress.round, progress.run_id
        self.counted, self.shares = dict(progress.counted), dict(progress.shares)
        self.paces = {
            name: Pace(per_micro_batch=a, per_example=b) for name, (a, b) in progress.paces.items()
        }
        self.target.restore(progress.target)
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
        by_name = {report.name: self._at_pace(report) for report in reports}
        invited = select(
            list(by_name), size=cohort.size, seed=self.settings.seed, round_number=round_number
        )
        self.owned = {name: by_name[name].num_examples for name in invited}
        target = self.target.open(num_invited=len(invited))
        assignments = assign(
            [by_name[name] for name in invited],
            self.settings.plan.model_copy(update={"effective_batch_size": target}),
            deadline_seconds=cohort.deadline_seconds,
            image_bytes=self.image.layout.num_bytes,
            update_bytes=4 * self.image.layout.num_parameters,
        )
        if len(assignments) < cohort.min_clients:
            raise TooFewClients(
                f"round {round_number}: {len(assignments)} of {len(invited)} invited clients can "
                f"finish one example in time, at least {cohort.min_clients} are needed"
            )
        return {
            name: self._plan(name, assignments[name]) for name in invited if name in assignments
        }

    def _at_pace(self, report: DeviceReport) -> DeviceReport:
        """Return a report with the pace that was followed so far, or told if this is the first."""
        pace = self.paces.get(report.name) or told(report)
        if pace is None:
            return report
        self.paces[report.name] = pace
        return at_pace(report, pace)

    def _plan(self, name: str, assignment: Assignment) -> Plan:
        chosen = self.settings.plan
        size = self.target.micro_batch_size(assignment.quota, assignment.micro_batch_size)
        evened = "" if size == assignment.micro_batch_size else ", cut evenly to tell the noise"
        return Plan(
            round=self.round + 1,
            run_seed=self.settings.seed,
            model_version=self.round,
            quota=assignment.quota,
            micro_batch_size=size,
            local_steps=chosen.local_steps,
            local_learning_rate=chosen.local_learning_rate,
            precision=chosen.precision,
            deadline_seconds=self._seconds_to_train(name),
            counted_round=self.counted.get(name),
            held_out_fraction=self._held_out_fraction,
            reason=assignment.reason + evened,
        )

    def _seconds_to_train(self, name: str) -> float | None:
        """Return how much of the deadline a device may train; the rest is for its transfers."""
        deadline = self.settings.cohort.deadline_seconds
        return None if deadline is None else deadline * self.shares.get(name, DEADLINE_SHARE)

    def learn_shares(self, opened: OpenRound) -> None:
        """Let those who came too late begin to send earlier, and give the others time back."""
        for name in opened.plans:
            share = self.shares.get(name, DEADLINE_SHARE)
            if isinstance(opened.refused.get(name), LateUpdate):
                self.shares[name] = max(share * LATE_FACTOR, LEAST_SHARE)
            elif name in self.shares:
                self.shares[name] = min(share * IN_TIME_FACTOR, DEADLINE_SHARE)

    def _asked(self) -> dict[str, Any]:
        """Return the settings on which the devices' places depend."""
        chosen = self.settings
        return {
            "seed": chosen.seed,
            "task": chosen.task,
            "simulation.clients": chosen.simulation.clients,
            "held_out_fraction": self._held_out_fraction,
        }

    def open_round(self, plans: Mapping[str, Plan]) -> OpenRound:
        """Empty the sum for a round of these plans."""
        bound = max_weight_per_example(self.task)
        self.sum.open(
            num_clients=len(plans),
            planned_weight=bound * sum(plan.quota for plan in plans.values()),
        )
        return OpenRound(plans=plans, total=self.sum, max_weight_per_example=bound)

    def commit(self, opened: OpenRound) -> Committed:
        """Divide once and take the step; the round counts from here on.

        Raises:
            TooFewClients: fewer updates than --min-clients; nothing has changed.
        """
        needed = self.settings.cohort.min_clients
        if len(opened.accepted) < max(needed, 1):
            nothing_finite = opened.refused and all(
                isinstance(error, EmptyUpdate) for error in opened.refused.values()
            )
            why = "; ".join(f"{name}: {error}" for name, error in list(opened.refused.items())[:3])
            raise TooFewClients(
                f"round {self.round + 1}: {len(opened.accepted)} of {len(opened.plans)} clients "
                f"answered in time, at least {needed} are needed" + (f" ({why})" if why else ""),
                remedy=NOTHING_FINITE if nothing_finite else None,
            )
        mean_P = self.sum.close()
        noise = self._noise(opened, mean_P)
        summed = gathered(
            opened.accepted.values(), max_weight_per_example=max_weight_per_example(self.task)
        )
        rate = self.optimizer.step(
            mean_P,
            rate_factor(self.settings.schedule.batch_scaling, self.target.ratio(summed)),
        )
        if not bool(torch.isfinite(self.image.values_P).all()):
            raise Diverged(
                f"round {self.round + 1}: the step led to parameters that are not finite"
            )
        self.round += 1
        self.counted |= dict.fromkeys(opened.accepted, self.round)
        for name in self.paces.keys() & opened.accepted.keys():
            self.paces[name] = followed(self.paces[name], opened.accepted[name].steps)
        target = self.target.num_examples if self.target.by else None
        self.target.commit(summed, noise)
        return Committed(
            learning_rate=rate,
            target=target,
            noise=noise,
            noise_scale=self.target.noise_scale.ratio,
        )

    def _noise(self, opened: OpenRound, mean_P: Tensor) -> RoundNoise | None:
        """Estimate the round's gradient noise; None where local steps moved the model meanwhile."""
        if self.settings.plan.local_steps > 1:
            return None
        sums = total(
            sums_of(report, num_owned=self.owned[name]) for name, report in opened.accepted.items()
        )
        return round_noise(sums, squared_mean=squared_norm(mean_P))

    def progress(self, fleet: Fleet, optimizer: str) -> checkpoint.Progress:
        """Gather what a checkpoint holds beside its tensors."""
        return checkpoint.Progress(
            run_id=self.run_id,
            round=self.round,
            layout_digest=self.image.layout.digest,
            optimizer=optimizer,
            largest=self.sum.largest,
            counted=self.counted,
            paces={name: (p.per_micro_batch, p.per_example) for name, p in self.paces.items()},
            asked=self._asked(),
            shares=self.shares,
            target=self.target.state(),
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
            again = " (again)" if report.name in self.accepted else ""
            self.refused[report.name + again] = error
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
