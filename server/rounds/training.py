"""The state of a run and the round in progress: plan, check each update, fold it, commit.

A round counts whole or not at all: until ``commit`` neither model, optimizer nor places have
changed. Only what was learned of the devices' speed and lateness outlives an aborted round.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from headwater.common.errors import (
    CheckpointCorrupt,
    Diverged,
    EmptyUpdate,
    SettingsError,
    TooFewClients,
)
from headwater.common.model.parameters import build_model, load_initial
from headwater.common.model.vectors import all_finite, squared_norm
from headwater.common.settings.schema import Settings
from headwater.common.task import load_task, max_weight_per_example
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.aggregation.round_sum import (
    RoundSum,
    total_loss,
    total_metrics,
    total_summed_weight,
)
from headwater.server.aggregation.server_optimizer import ServerOptimizer, rate_factor
from headwater.server.fleet import Fleet
from headwater.server.planning import device_estimates as learned
from headwater.server.planning import exclusions
from headwater.server.planning.noise_scale import RoundNoise, round_noise, total
from headwater.server.planning.round_plans import Planned, Planning, held_out_fraction
from headwater.server.planning.target_batch import BatchTotals, Target
from headwater.server.rounds import checkpoint
from headwater.server.rounds import evaluation as evaluate
from headwater.server.rounds.open_round import OpenRound
from headwater.server.secagg import session as secure_round
from headwater.server.secagg.parameters import SessionSetup
from headwater.server.secagg.retries import sum_masked

NOTHING_FINITE = "lower --learning-rate if the model diverged, or look at the devices' data"


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
            SettingsError, TaskError, ModelMismatch: see ``headwater.common.errors``.
        """
        if settings.task is None:
            raise SettingsError("no task is set", remedy="name it with --task FILE.py:Class")
        _check_masked(settings)
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
        self.planning = Planning(settings, self.target, self.image.layout)
        self.sum = CohortSum(self.image.layout)
        self.round = 0
        self.run_id = run_id
        self.counted: dict[str, int] = {}
        self.followed = secure_round.EncodingState()
        self.sessions: secure_round.SessionNumbers | None = None

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
        self.counted = dict(progress.counted)
        self.planning.learned = learned.of_json(progress.learned)
        self.target.restore(progress.target)
        self.followed = secure_round.EncodingState.of_json(progress.secure)
        self.planning.excluded = exclusions.from_json(progress.secure.get("culprits", {}))
        fleet.restore_simulated(progress.simulated)
        return True

    def _asked(self) -> dict[str, Any]:
        """Return the settings on which the devices' places depend."""
        chosen = self.settings
        return {
            "seed": chosen.seed,
            "task": chosen.task,
            "simulation.clients": chosen.simulation.clients,
            "held_out_fraction": held_out_fraction(self.settings.evaluation),
        }

    def open_round(self, planned: Planned) -> OpenRound:
        """Empty the sum for a round of these plans."""
        plans = planned.plans
        bound = max_weight_per_example(self.task)
        self.sum.open(
            num_clients=len(plans),
            planned_weight=sum(
                plan.weigh_as or bound * plan.most_examples for plan in plans.values()
            ),
        )
        return OpenRound(
            plans=plans,
            total=self.sum,
            max_weight_per_example=bound,
            owned=self.planning.owned,
            num_left_out=planned.num_too_slow,
        )

    def close_round(self, opened: OpenRound, fleet: Fleet) -> RoundSum:
        """Divide the cohort's sum once by its weight; a masked one is opened in a secure session.

        Raises:
            TooFewClients: fewer updates than --min-clients.
            RoundAborted: the secure session was.
        """
        is_masked = self.settings.secure.aggregation != "off"
        self._check_enough(opened, opened.ready if is_masked else opened.accepted)
        if is_masked:
            done = self._close_masked(opened, fleet)
            self._check_enough(opened, done.names)
            return done
        bound = max_weight_per_example(self.task)
        columns = opened.columns
        return RoundSum(
            names=tuple(opened.accepted),
            mean_P=self.sum.close(),
            weight=self.sum.weight,
            num_examples=sum(chain.from_iterable(part.num_examples for part in columns)),
            summed_weight=total_summed_weight(columns, max_weight_per_example=bound),
            loss_sum=total_loss(columns),
            metric_sums=total_metrics(columns),
            noise=total(opened.noise),
        )

    def _close_masked(self, opened: OpenRound, fleet: Fleet) -> RoundSum:
        chosen = self.settings.secure
        cohort = secure_round.ReadyCohort.of(
            opened.ready,
            opened.plans,
            max_weight_per_example=max_weight_per_example(self.task),
            refuse=opened.refuse,
        )
        if self.sessions is None:
            self.sessions = secure_round.SessionNumbers(self.settings.out, run_id=self.run_id)
        sessions, number = self.sessions, self.round + 1

        def open_session(cohort: secure_round.ReadyCohort) -> SessionSetup:
            return secure_round.setup_of(
                cohort,
                chosen,
                self.followed,
                run_id=self.run_id,
                number=sessions.next(number),
                image=self.image,
            )

        bounds = None
        if chosen.ring_bits == 16:
            bounds = secure_round.block_bounds(self.followed, self.image.layout.num_parameters)
        unmasked = sum_masked(
            cohort,
            fleet,
            open_session=open_session,
            bounds=bounds,
            phase_seconds=chosen.phase_seconds,
            refuse=opened.refuse,
            leave_out=lambda found: self.planning.leave_out(found, round_number=number),
        )
        done, self.followed = secure_round.decode_sum(unmasked, self.followed)
        return done

    def _check_enough(self, opened: OpenRound, there: Sized) -> None:
        """Abort if fewer devices are in the round than it needs.

        Raises:
            TooFewClients: saying who failed and why.
        """
        needed = self.settings.cohort.min_clients
        if len(there) < max(needed, 1):
            nothing_finite = opened.refused and all(
                isinstance(error, EmptyUpdate) for error in opened.refused.values()
            )
            why = "; ".join(f"{name}: {error}" for name, error in list(opened.refused.items())[:3])
            left_out = f", {opened.num_left_out} left out as too slow"
            raise TooFewClients(
                f"round {self.round + 1}: {len(there)} of {len(opened.plans)} clients "
                f"answered in time{left_out if opened.num_left_out else ''}, at least {needed} are "
                f"needed" + (f" ({why})" if why else ""),
                remedy=NOTHING_FINITE if nothing_finite else None,
            )

    def commit(self, done: RoundSum, opened: OpenRound) -> Committed:
        """Take the step; the round counts from here on.

        Raises:
            Diverged: the step led to parameters that are not finite.
        """
        sums = BatchTotals(
            num_examples=done.num_examples,
            summed_weight=done.summed_weight,
            sent_weight=done.weight,
        )
        noise = None
        if done.noise is not None and self.settings.plan.local_steps == 1:
            # Local steps move the model between the two batch sizes.
            noise = round_noise(done.noise, squared_mean=squared_norm(done.mean_P))
        rate = self.optimizer.step(
            done.mean_P,
            rate_factor(self.settings.schedule.batch_scaling, self.target.ratio(sums)),
        )
        if not all_finite(self.image.values_P):
            raise Diverged(
                f"round {self.round + 1}: the step led to parameters that are not finite"
            )
        self.round += 1
        self.counted |= dict.fromkeys(done.names, self.round)
        self.planning.count(opened.accepted)
        target = self.target.num_examples if self.target.by else None
        self.target.commit(sums, noise)
        return Committed(
            learning_rate=rate,
            target=target,
            noise=noise,
            noise_scale=self.target.noise_scale.ratio,
        )

    def progress(self, fleet: Fleet, optimizer: str) -> checkpoint.Progress:
        """Gather what a checkpoint holds beside its tensors."""
        return checkpoint.Progress(
            run_id=self.run_id,
            round=self.round,
            layout_digest=self.image.layout.digest,
            optimizer=optimizer,
            largest=self.sum.largest,
            counted=self.counted,
            learned=learned.to_json(self.planning.learned),
            asked=self._asked(),
            target=self.target.state(),
            secure={
                **self.followed.to_json(),
                "culprits": exclusions.to_json(self.planning.excluded),
            },
            simulated=fleet.simulated_state(),
        )


def _check_masked(settings: Settings) -> None:
    """Check that nothing tells of single devices what masks are to hide.

    Raises:
        SettingsError: devices would tell the loss on what they hold out.
    """
    if settings.secure.aggregation != "off" and settings.evaluation.on_devices:
        raise SettingsError(
            "each device would tell its own held-out loss, which secure aggregation is to hide",
            remedy="leave out --evaluate-on-devices: the server tests on examples of its own",
        )
