"""The features of a run's rounds: the moments at which they act on a sum, and the one list of them.

A feature is imported if the run's settings turn it on. It attaches to the core, which knows it by
these moments alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from headwater.common.errors import FeatureMissing, SettingsError
from headwater.common.messages import EvaluateReport, Plan
from headwater.common.model.parameters import ModelImage
from headwater.common.settings.schema import Settings
from headwater.common.task import Examples, Task
from headwater.common.user_code.named_objects import part_of
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.aggregation.norm_watch import NormWatch
from headwater.server.aggregation.round_reports import RoundSum
from headwater.server.aggregation.server_optimizer import ServerOptimizer
from headwater.server.fleet import Fleet
from headwater.server.planning.features import PlanningMoments
from headwater.server.planning.round_plans import RoundPlanner
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.open_round import Holder, OpenRound
from headwater.server.rounds.round_row import RoundRow

if TYPE_CHECKING:
    from headwater.common.flower.sent_model import SentModel


class ModelAtRest(Exception):
    """Ends a run whose model does not change from round to round; it is no error."""


class RunState(Protocol):
    """What a feature may know of the run."""

    settings: Settings
    task: Task
    test_examples: Examples | None
    image: ModelImage
    held_model: SentModel
    """The model as devices hold it; a feature may put another in its place."""
    optimizer: ServerOptimizer
    sum: CohortSum
    planner: RoundPlanner
    round: int
    run_id: int
    max_weight_per_example: int
    features: dict[str, RunFeature]

    @property
    def population(self) -> int:
        """The number of clients that are known."""

    def check_enough(self, opened: OpenRound, included: Sized) -> None:
        """Check that enough updates are included; see ``headwater.server.aggregation.quorum``."""


@dataclass(kw_only=True, slots=True)
class Opening:
    """What is decided as a round opens."""

    plans: Mapping[str, Plan]
    owned: Mapping[str, int]
    """The number of examples that each client has, or ``UNTOLD_EXAMPLES``."""
    norm_watch: NormWatch | None
    """The limit of the updates' norms; None if they are not watched."""
    scale_bits: int | None = None
    """f, if the sum is made in steps of 2^-f; None: as the cohort sum chooses."""
    held: Holder | None = None
    """Where updates are held one by one, for a mean of its own; None: they are added to the sum."""
    releases_reports: bool = True
    """Whether the updates' reports tell what their devices did."""


class RunFeature(PlanningMoments):
    """The moments of a run; a feature overrides those that it needs."""

    def __init__(self, run: RunState) -> None:
        """Take the run, whose model is built."""

    # The run.

    def check(self) -> None:
        """Check, before the run begins, that it can do what the settings say.

        Raises:
            HeadwaterError: it cannot.
        """

    def share(self, publish: Callable[[], None]) -> None:
        """Call ``publish`` when the run's folder holds what must outlive this server."""

    def begin(self, *, num_rounds: int) -> None:
        """Open what the feature has in the run's folder, which is of so many rounds.

        Raises:
            HeadwaterError: it cannot be read, or does not go with the settings.
        """

    def check_left(self, *, round_number: int) -> None:
        """Check, before clients connect, that a resumed run may have another round.

        Raises:
            HeadwaterError: it may not.
        """

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the checkpoint."""
        return {}

    def tensors(self) -> Mapping[str, Tensor]:
        """Return tensors for the checkpoint, by name."""
        return {}

    def restore(self, row: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take what ``to_json`` and ``tensors`` gave; the initial state if both are empty."""

    # A round, in this order.

    def awaited(self) -> Callable[[str], bool] | None:
        """Return which clients count among those that a round waits for; None: all."""
        return None

    def turns(self, names: Collection[str]) -> Sequence[str] | None:
        """Return the clients that may be in the next round, in order; None: all, in any order."""
        return None

    def open(self, opening: Opening) -> None:
        """Change what is decided as a round opens."""

    def sending(self) -> None:
        """Prepare ``held_model``, which devices are about to be sent."""

    def answered(self, opened: OpenRound) -> None:
        """Learn from a round whose answers are all in; it outlives an aborted round.

        Raises:
            ModelAtRest: no round will change the model.
            HeadwaterError: the run ends.
        """

    def close(self, opened: OpenRound, fleet: Fleet) -> RoundSum | None:
        """Return the round's sum in the place of ``plain_sum``; None: that one."""
        return None

    def reveal(self, opened: OpenRound, unmasked: Any = None) -> None:
        """Change a sum that is about to become known, or note it on disk first.

        ``unmasked`` is what a secure session opened; None: the plain sum.
        """

    def closed(self, done: RoundSum, opened: OpenRound) -> RoundSum:
        """Change the sum after its division.

        A round without the model's sum has an empty ``mean_P``, and takes a step if one is set.
        """
        return done

    def rate_factor(self, done: RoundSum) -> float:
        """Return by what the learning rate of the step is multiplied."""
        return 1.0

    def committed(self, done: RoundSum) -> None:
        """Note that the round counts."""

    def figures(self, opened: OpenRound) -> dict[str, Any]:
        """Return fields of the round's row."""
        return {}

    def tested(self, row: RoundRow) -> None:
        """Learn from a committed round that ends with an evaluation.

        Raises:
            HeadwaterError: the run ends.
        """

    @property
    def needs_checkpoint(self) -> bool:
        """Whether the last round's checkpoint is to be written at once, for what ``saved`` does."""
        return False

    def saved(self, folder: Path) -> None:
        """Write what goes with the round whose checkpoint is in the run's folder."""

    def why_stopped(self) -> str | None:
        """Return why the run ends after this round; None if it goes on."""
        return None

    @property
    def has_learned(self) -> bool:
        """Whether the last attempt taught something, so that its abort does not count."""
        return False

    @property
    def leaves_out_paused(self) -> bool:
        """Whether a round whose step would move nothing is better left out."""
        return False


# By name: whether the settings turn it on, and its class. In the order in which they act.
FEATURES: dict[str, tuple[Callable[[Settings], bool], str]] = {
    "batch_scaling": (
        lambda settings: settings.schedule.batch_scaling != "none",
        "headwater.server.batch_scaling.scaled_rates:ScaledRates",
    ),
    "compression": (
        lambda settings: settings.compression.down != "off",
        "headwater.server.compression.compressed_rounds:CompressedRounds",
    ),
    "low_rank": (
        lambda settings: settings.compression.up == "low-rank",
        "headwater.server.compression.low_rank_rounds:LowRankRounds",
    ),
    "robust": (
        lambda settings: settings.aggregation.rule != "sum",
        "headwater.server.robust.robust_rounds:RobustRounds",
    ),
    "privacy": (
        lambda settings: settings.privacy.is_on,
        "headwater.server.privacy.private_rounds:PrivateRounds",
    ),
    "evaluation": (
        lambda settings: settings.device_test.model is not None,
        "headwater.server.evaluation.evaluation_rounds:EvaluationRounds",
    ),
    "statistics": (
        lambda settings: settings.statistics.is_on,
        "headwater.server.statistics.statistics_rounds:StatisticsRounds",
    ),
    "secagg": (
        lambda settings: settings.secure.aggregation != "off",
        "headwater.server.secagg.masked_rounds:MaskedRounds",
    ),
    "local_training": (
        lambda settings: settings.local.is_on or settings.algorithm.name is not None,
        "headwater.server.local_training.corrected_rounds:CorrectedRounds",
    ),
    "control_variates": (
        lambda settings: settings.local.algorithm == "scaffold",
        "headwater.server.local_state.scaffold_rounds:ScaffoldRounds",
    ),
    "selection": (
        lambda settings: bool(settings.evaluation.best or settings.evaluation.stop_when),
        "headwater.server.selection.selected_rounds:SelectedRounds",
    ),
}


def run_features(run: RunState) -> dict[str, RunFeature]:
    """Return the features that the run's settings turn on, by name, in their order."""
    if hasattr(run.task, "use_statistics"):  # an object may have those of a run before
        part_of("headwater.common.statistics.columns").take_back(run.task)
    found: dict[str, RunFeature] = {}
    for name, (is_on, place) in FEATURES.items():
        if is_on(run.settings):
            found[name] = part_of(place)(run)
    if run.settings.feature.name is not None:
        found |= part_of("headwater.server.own_feature.server_feature").own_run_features(run)
    return found


def round_runner(settings: Settings, fleet: object) -> Any:
    """Return what runs a round in the place of a synchronous one; None if nothing does."""
    if settings.device_test.compare_with is not None:
        return part_of("headwater.server.evaluation.comparing_fleet").run_round
    if not settings.asynchronous.is_on:
        return None
    module = part_of("headwater.server.asynchronous.buffered_rounds")
    return module.BufferedRounds(fleet, settings)


def by_label(reports: Sequence[EvaluateReport]) -> dict[str, list[EvaluateReport]]:
    """Return the reports of the devices of each label that has metrics; {} if no device has one."""
    if not any(report.labels for report in reports):
        return {}
    found: dict[str, list[EvaluateReport]] = part_of(
        "headwater.server.device_labels.metrics_by_label"
    ).by_label(reports)
    return found


def trackers(settings: Settings) -> list[Observer]:
    """Return the TensorBoard log of a run with a folder, and the observer of ``--track``.

    Raises:
        SettingsError: there is no such observer, or its package is not installed.
    """
    found: list[Observer] = []
    if settings.out is not None:
        with suppress(FeatureMissing):  # nobody asked for the log: a run does without it
            module = part_of("headwater.server.tracking.tensorboard_tracker")
            found.append(module.TensorboardTracker())
    if settings.track not in (None, "tensorboard"):
        found.append(part_of("headwater.server.tracking.trackers").tracker(settings.track))
    return found


def check_resumed(before: Mapping[str, Any], settings: Settings) -> None:
    """Check that a resumed run's features go with what its rounds had so far, on or off.

    ``before`` are its settings by their dotted keys.

    Raises:
        SettingsError: they do not.
    """
    modes = ("off", "semi-honest", "active")
    had, has = before.get("secure.aggregation", "off"), settings.secure.aggregation
    if modes.index(had) > modes.index(has):
        raise SettingsError(
            f"the rounds of this run had {had} secure aggregation so far, and the next ones would "
            f"have {'none' if has == 'off' else has}: devices that rely on the run's masks would "
            "send what these have hidden",
            remedy=f"resume with --secure-aggregation {had}; or begin a new run: another --out",
        )
    if before.get("statistics.is_on", False) != settings.statistics.is_on:
        raise SettingsError(
            "the rounds of this run so far were trained "
            f"with{'out' if settings.statistics.is_on else ''} statistics of the examples, and the "
            f"next ones would be with{'' if settings.statistics.is_on else 'out'}",
            remedy="resume with the same --statistics or --no-statistics; or begin a new run: "
            "another --out",
        )
    part_of("headwater.server.privacy.settings_check").check_resumed(before, settings.privacy)
    engine = before.get("simulation.engine", settings.simulation.engine)
    is_moved = (engine == "grpc") is not (settings.simulation.engine == "grpc")
    if is_moved and settings.keeps_device_files:
        raise SettingsError(
            f"the devices of this run keep files of the engine {engine}, which the engine "
            f"{settings.simulation.engine} would begin without: their own parameters or state, "
            "what compression left, or what privacy was spent",
            remedy=f"resume with --engine {engine}",
        )
