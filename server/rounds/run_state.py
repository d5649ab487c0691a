"""The state of a run: model, optimizer, cohort sum and planner, and the commit of a round.

A round counts as a whole or not at all: until ``commit``, neither the model nor the optimizer nor
the clients' places in their data have changed. Only what was learned of the clients' speed and
lateness outlives an aborted round.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from headwater.common.additivity.penalty import add_penalty, check_penalty
from headwater.common.errors import Diverged, NothingSummed, SettingsError, TaskError
from headwater.common.messages import Plan
from headwater.common.model.parameters import build_model
from headwater.common.model.vectors import all_finite, squared_norm, zero_tensors
from headwater.common.settings.changes import Changes, of_training
from headwater.common.settings.schema import Settings
from headwater.common.task import load_task, max_weight_per_example, tell_round, weight_unit
from headwater.common.terms import KINDS
from headwater.common.wording import counted
from headwater.server.aggregation.believed_figures import false_figures, without_figures
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.aggregation.norm_watch import NormWatch
from headwater.server.aggregation.quorum import check_quorum
from headwater.server.aggregation.round_reports import ReportColumns, RoundSum, plain_sum
from headwater.server.aggregation.server_optimizer import ServerOptimizer
from headwater.server.fleet import BranchOrder, Fleet, UpdateRules
from headwater.server.planning.cohort import PopulationOrder, population_order
from headwater.server.planning.features import demand_in, planning_features
from headwater.server.planning.noise_scale import RoundNoise, round_noise, total
from headwater.server.planning.plan_table import PlanTable
from headwater.server.planning.round_plans import RoundPlanner, RoundPlans
from headwater.server.planning.target_batch import BatchTotals, Target
from headwater.server.rounds import evaluation
from headwater.server.rounds.features import Opening, RunFeature, run_features
from headwater.server.rounds.left_out_examples import LeftOutLog
from headwater.server.rounds.open_round import Holder, OpenRound

if TYPE_CHECKING:
    from headwater.common.flower.sent_model import SentModel
    from headwater.server.aggregation.extra_sums import ExtraSums

log = logging.getLogger(__name__)

MAX_NAMES = 5  # devices that a line of the log names


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The figures of a committed step; ``target`` is in examples."""

    learning_rate: float
    target: int | None
    noise: RoundNoise | None
    noise_scale: float | None


class Training:
    """The state of one run."""

    def __init__(
        self, settings: Settings, *, run_id: int, order: PopulationOrder = population_order
    ) -> None:
        """Build the model with its initial parameters.

        ``order`` is ``population_order``, or the same function with a cache.

        Raises:
            SettingsError, TaskError, ModelMismatch: see ``headwater.common.errors``.
        """
        if settings.task is None:
            raise SettingsError("no task is set", remedy="name it with --task FILE.py:Class")
        self.settings = settings
        self.task = load_task(settings.task)
        self.image = build_model(
            self.task,
            seed=settings.seed,
            batch_norm=settings.model.batch_norm,
            local_parameters=settings.model.local_parameters,
            frozen_dtype=settings.model.frozen_dtype,
        )
        if settings.model.initial is not None:
            from headwater.server.rounds.initial_model import load_initial

            load_initial(self.image, settings.model.initial, measures=settings.statistics.is_on)
        if not all_finite(self.image.values_P):
            raise TaskError(
                "the model that new_model builds has parameters that are NaN or infinite",
                remedy="look at how new_model sets or loads them: no round could change the model",
            )
        self.test_examples = evaluation.server_test_examples(self.task, self.image, settings)
        self._num_test_left_out = 0
        self.optimizer = ServerOptimizer(self.image, settings.server_optimizer, settings.schedule)
        if self.optimizer.keeps_others and settings.evaluation.on_devices:
            raise SettingsError(
                f"{settings.optimizer.kind} keeps other weights than it steps, and devices hold "
                "the stepped ones: they would test those",
                remedy="leave out --evaluate-on-devices: the server tests on examples of its own",
            )
        self.max_weight_per_example = max_weight_per_example(self.task)
        self._check_penalty()
        planning = planning_features(settings, self.image.layout)
        self.target = Target(
            settings.plan,
            max_weight_per_example=self.max_weight_per_example,
            weight_unit=weight_unit(self.task),
            demand=demand_in(planning),
        )
        self.planner = RoundPlanner(
            settings,
            self.target,
            self.image.layout,
            order,
            features=[*planning],
            frozen=self.image.frozen_digest or None,
        )
        self.sum = CohortSum(self.image.layout)
        self.norm_watch = NormWatch(multiple=settings.aggregation.norm_multiple)
        self._opening: Opening | None = None
        self.round = 0
        self.num_unsaved, self.saved_at = 0, -math.inf
        """The rounds since the last checkpoint, and its time on the monotonic clock."""
        self.is_between_rounds = True
        """Whether all that a checkpoint holds is of the last committed round."""
        self.is_stepping = False
        """Whether a step has begun whose round has no row yet."""
        self.left_out_log = LeftOutLog()
        self.run_id = run_id
        self.counted: dict[str, int] = {}
        """The last round whose sum includes each client's update."""
        self.held_model: SentModel = self.image
        """The model as devices hold it."""
        self.changed: Changes = {}
        """The settings that a resumed run changed, until its next round is committed."""
        self.publish: Callable[[], None] = lambda: None
        """Commits what the run's folder holds, if a standby follows it (``share``)."""
        self.features: dict[str, RunFeature] = run_features(self)
        """What the settings ask for beyond plain rounds, by name and in order."""
        self.planner.features += self.features.values()

    def _check_penalty(self) -> None:
        """Check that the task's penalty works.

        Raises:
            TaskFailed, TaskError: see ``headwater.common.additivity.penalty``.
        """
        check_penalty(self.task, self.image)

    def sent_model(self) -> SentModel:
        """Return the model of this round's plans, or of its evaluation, as devices will hold it."""
        for feature in self.features.values():
            feature.sending()
        return self.held_model

    def share(self, publish: Callable[[], None]) -> None:
        """Call ``publish`` when the run's folder holds what must outlive this server.

        That is after each checkpoint; before a sum is used whose noise is spent by it, or a secure
        session whose number may be used once; and before asynchronous plans are sent that a device
        may answer days later.
        """
        self.publish = publish
        for feature in self.features.values():
            feature.share(publish)

    def take_changed(self) -> dict[str, list[Any]]:
        """Return what changed when the run was resumed, for the first row after that alone."""
        changed, self.changed = self.changed, {}
        return {key: [*values] for key, values in of_training(changed).items()}

    def open_round(
        self,
        planned: RoundPlans,
        *,
        num_updates: int | None = None,
        times_of: Callable[[Plan, int], int] | None = None,
    ) -> OpenRound:
        """Empty the sum for a round with these plans, as the features change them.

        ``num_updates`` are awaited, None: one for each plan. ``times_of`` says how many times the
        update of a plan counts, by its windows; None: once.

        Raises:
            PrivacySpent: one more sum would exceed the run's epsilon.
        """
        max_weight = self.max_weight_per_example
        opening = Opening(plans=planned.plans, owned=planned.owned, norm_watch=self.norm_watch)
        for feature in self.features.values():
            held = opening.held
            feature.open(opening)
            self._check_holder(opening, before=held)
        plans = PlanTable.of(opening.plans)
        self._check_same(plans)
        planned_weight = sum(plans.weights(max_weight, times_of))
        number = len(plans) if num_updates is None else num_updates
        self.sum.open(
            num_clients=number,
            planned_weight=-(-planned_weight * number // max(len(plans), 1)),
            scale_bits=opening.scale_bits,
        )
        self._opening = opening
        return OpenRound(
            plans=plans,
            total=self.sum,
            rules=self._rules(opening.norm_watch),
            owned=planned.owned,
            num_left_out=planned.num_too_slow,
            metrics=planned.metrics,
            held=opening.held,
            releases_reports=opening.releases_reports and self._asks_model(plans),
            times_of=times_of,
            extra=self._extra_sums(plans),
        )

    def _asks_model(self, plans: Mapping[str, Plan]) -> bool:
        """Whether the round's updates have the model's sum: all of them, or none."""
        may_ask_nothing = self._has_own or not {"statistics", "evaluation"}.isdisjoint(
            self.features
        )
        found = {plan.asks_model for plan in plans.values()} if may_ask_nothing else {True}
        if len(found) > 1:
            raise SettingsError(
                f"round {self.round + 1} asks some clients for the model's sum and some for none",
                remedy="return terms of one kind for all clients",
            )
        return found != {False}

    @property
    def _has_own(self) -> bool:
        return self.settings.feature.name is not None

    def _check_same(self, plans: PlanTable) -> None:
        """Check that the user's feature asks all members of a secure session for the same.

        Raises:
            SettingsError: they are not, and a session would leave some out.
        """
        if "secagg" not in self.features or not self._has_own:
            return
        own = {
            # A session has the updates of one model alone.
            (
                plan.model_version,
                *(id(one) for name, one in plan.terms.items() if name not in KINDS),
            )
            for plan in plans.values()
        }
        if len(own) > len({version for version, *_ in own}):
            raise SettingsError(
                "the feature asks some clients for other than the rest, and --secure-aggregation "
                "hides a client among others of its kind",
                remedy="return the same terms for all clients, or leave out --secure-aggregation",
            )

    def _check_holder(self, opening: Opening, *, before: Holder | None) -> None:
        """Check that the updates have one holder, and none where there is their sum alone.

        Raises:
            SettingsError: a mean of held updates would have no noise, or see what masks hide; or
                an aggregator may add the updates.
        """
        if opening.held is None or opening.held is before:
            return
        others = {"privacy", "secagg"} & self.features.keys()
        settings = self.settings
        has_branches = settings.simulation.aggregators > 1 or settings.server.aggregators
        if has_branches and "robust" not in self.features:  # a rule takes no aggregators
            raise SettingsError(
                "a feature holds the updates one by one, and an aggregator sends their sum",
                remedy="leave out --feature, or --aggregators and --trusted-aggregators",
            )
        if before is not None or others:
            raise SettingsError(
                "a feature holds the updates one by one, and "
                f"{'another does too' if before is not None else 'the run protects their sum'}",
                remedy="leave out --feature, or --aggregation, --secure-aggregation and the flags "
                "of privacy",
            )

    def _extra_sums(self, plans: PlanTable) -> ExtraSums | None:
        """Return what adds up the sums beside the model's; None if no plan asks for one."""
        if not any(plans.terms):
            return None
        from headwater.server.aggregation.extra_sums import ExtraSums  # few rounds have some

        return ExtraSums.of(plans.of_each_kind(), self.image.layout.num_parameters)

    def branch_order(self, plans: Mapping[str, Plan]) -> BranchOrder:
        """Return what an aggregator needs for its devices' part of the open round."""
        return BranchOrder(
            plans=plans,
            scale_bits=self.sum.scale_bits,
            rules=self._rules(None if self._opening is None else self._opening.norm_watch),
        )

    def _rules(self, norm_watch: NormWatch | None) -> UpdateRules:
        return UpdateRules(
            max_weight_per_example=self.max_weight_per_example,
            norm_watch=norm_watch,
            beyond_norm=self.settings.aggregation.beyond_norm,
        )

    def close_round(self, opened: OpenRound, fleet: Fleet) -> RoundSum:
        """Divide the cohort's sum once by its weight, or let a feature do it in its own way.

        Raises:
            TooFewClients: fewer updates than --min-clients, or than a feature needs.
            OutlierInRound: see ``_follow_norms``.
            RoundAborted: see ``RunFeature.close``.
        """
        self._follow_norms(opened)
        features = self.features.values()
        found = (feature.close(opened, fleet) for feature in features)
        done = next((one for one in found if one is not None), None) or self._plain_sum(opened)
        if opened.extra is not None:
            done = replace(done, sums=opened.extra.close())
        for feature in features:
            done = feature.closed(done, opened)
        return done

    def _plain_sum(self, opened: OpenRound) -> RoundSum:
        self.check_enough(opened, opened.accepted)
        if not opened.weight:
            raise NothingSummed(
                f"round {self.round + 1}: the examples of "
                f"{counted(len(opened.accepted), 'device')} weigh 0 together: there is no mean of "
                "their losses"
            )
        for feature in self.features.values():
            feature.reveal(opened)
        asks_model = self._asks_model(opened.plans)
        if not asks_model:  # a feature may make a step of its own sums
            mean_P, weight = torch.zeros(0), opened.weight
        elif opened.held is None:
            mean_P, weight = self.sum.close(), opened.weight
        else:
            mean_P, weight = opened.held.held_mean(self.sum)
        done = plain_sum(
            self._believed(opened),
            names=tuple(opened.accepted),
            mean_P=mean_P,
            weight=weight,
            max_weight_per_example=self.max_weight_per_example,
            # A gradient of several models, or a holder's, is not the mean of the examples that the
            # estimate compares.
            noise=total(opened.noise) if opened.has_one_model and opened.held is None else None,
        )
        if not asks_model:
            return replace(done, loss_sum=math.nan, noise=None)
        # What a codec or a private round's noise has moved is stepped as any other.
        unused = zero_tensors(done.mean_P, self.image.layout.spans, opened.unused)
        return replace(done, unused=unused)

    def _believed(self, opened: OpenRound) -> Sequence[ReportColumns]:
        """Return the round's reports, without figures that are far beyond the others'."""
        columns = opened.columns
        if not (found := false_figures(columns)):
            return columns
        named = list(found.items())[:MAX_NAMES]
        log.warning(
            "round %d: the figures of %s are %s (%s)",
            self.round + 1,
            counted(len(found), "device"),
            # A test's result is made of sums that its devices send beside these figures.
            "in no mean" if self._asks_model(opened.plans) else "far from the others'",
            "; ".join(f"{name}: {why}" for name, why in named),
        )
        opened.outliers += [name for name in found if name not in opened.outliers]
        return without_figures(columns, list(found))

    def _follow_norms(self, opened: OpenRound) -> None:
        """Take the round's norms into the watch; what it learns outlives an aborted round.

        Raises:
            OutlierInRound: no norm was known before this round, and one is far above its median.
        """
        before, norms = self.norm_watch, opened.all_norms
        if norms is None:
            return
        self.norm_watch = before.after(norms)
        if before.largest_median is None and self.settings.aggregation.beyond_norm != "keep":
            accepted = {
                name: opened.norms[name] for name in opened.norms if name in opened.accepted
            }
            self.norm_watch.check_first(accepted, round_number=self.round + 1)

    @property
    def population(self) -> int:
        """The number of clients that are known."""
        return len(self.planner.known)

    def check_enough(self, opened: OpenRound, included: Sized) -> None:
        """Check that enough updates are included; see ``headwater.server.aggregation.quorum``.

        Raises:
            TooFewClients: there are not.
        """
        check_quorum(
            len(included),
            needed=self.settings.cohort.min_clients,
            num_invited=len(opened.plans),
            num_left_out=opened.num_left_out,
            errors=opened.refused,
            round_number=self.round + 1,
        )

    def commit(self, done: RoundSum, opened: OpenRound) -> StepResult:
        """Take the optimizer's step; the round counts from here on.

        Raises:
            Diverged: the step led to parameters that are not finite.
        """
        self.is_stepping = True
        totals = BatchTotals(
            num_examples=done.num_examples,
            summed_weight=done.summed_weight,
            sent_weight=done.weight,
        )
        noise = None
        is_exact = not any(plan.moves_model for plan in islice(opened.plans.values(), 1))
        if done.noise is not None and is_exact:
            # Local steps move the model between the two batch sizes.
            noise = round_noise(done.noise, squared_mean=squared_norm(done.mean_P))
        penalised: tuple[int, ...] = ()
        has_step = len(done.mean_P) > 0
        if is_exact and has_step:  # else each device has added it to its own
            penalised = add_penalty(self.task, self.image, done.mean_P)
        rate = 0.0
        if has_step:
            rate = self.optimizer.step(
                done.mean_P,
                math.prod(feature.rate_factor(done) for feature in self.features.values()),
                unused=[at for at in done.unused if at not in penalised],
            )
        if not all_finite(self.image.values_P):
            raise Diverged(
                f"round {self.round + 1}: the step led to parameters that are not finite"
            )
        self.round += 1
        rounds = opened.table.round[opened.table.at(done.names)]
        self.counted |= zip(done.names, rounds.tolist(), strict=True)
        for feature in self.features.values():
            feature.committed(done)
        target = self.target.num_examples if self.target.by else None
        if has_step:
            self.target.commit(totals, noise)
        return StepResult(
            learning_rate=rate,
            target=target,
            noise=noise,
            noise_scale=self.target.noise_scale.ratio,
        )

    def pass_round(self) -> bool:
        """Leave out a round whose step would move nothing, if a feature asks for it.

        Return whether it was left out.
        """
        features = self.features.values()
        if not self.optimizer.is_paused or not any(one.leaves_out_paused for one in features):
            return False
        self.optimizer.pass_step()
        self.round += 1
        return True

    def check(self) -> None:
        """Check, before the run begins, that its features can do what the settings say.

        Raises:
            HeadwaterError: see ``RunFeature.check``.
        """
        for feature in self.features.values():
            feature.check()

    def evaluate_on_server(self) -> evaluation.EvaluatedRound:
        """Test the model on the task's test examples; see ``evaluation.on_server``."""
        tell_round(self.task, self.round)
        with self.optimizer.kept_weights():
            tested = evaluation.on_server(
                self.task, self.image, self.test_examples, num_known=self._num_test_left_out
            )
        self._num_test_left_out = tested.num_test_left_out
        return tested

    @property
    def why_stopped(self) -> str | None:
        """Why a feature ends the run after this round; None if it goes on."""
        found = (feature.why_stopped() for feature in self.features.values())
        return next((why for why in found if why is not None), None)
