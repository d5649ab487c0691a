"""The features of a device's round, in their order: the one list that names them.

A feature is imported when a plan asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from headwater.client.training.context import TrainingContext
from headwater.client.training.round import Feature, Work, carry_out
from headwater.client.training.sampler import Window
from headwater.common.messages import EvaluateReport, Plan, Update
from headwater.common.model.local_state import LocalStore
from headwater.common.model.parameters import ModelImage
from headwater.common.settings.schema import AlgorithmSettings, Settings
from headwater.common.user_code.named_objects import part_of

if TYPE_CHECKING:
    from headwater.client.local_training.local_work import ClientAlgorithm
    from headwater.client.own_feature.own_round import OwnRound
    from headwater.client.training.spool import Spool


def features_of(
    plan: Plan,
    context: TrainingContext,
    algorithm: ClientAlgorithm | None = None,
    own: Sequence[Feature] = (),
) -> Sequence[Feature]:
    """Return the features that a plan calls for on this device, with the user's ``own``.

    ``algorithm`` is the device's.
    """
    found: list[Feature] = [*own]
    if "statistics" in plan.terms:
        found.append(_loaded("statistics.statistics_round:StatisticsRound")())
        if not plan.asks_model:
            return found
    if "evaluation" in plan.terms:
        return [*found, _loaded("evaluation.evaluation_round:EvaluationRound")()]
    if algorithm is not None or ("local_training" in plan.terms and plan.moves_model):
        found.append(_loaded("local_training.local_training:LocalTraining")(algorithm))
    if context.image.local_L.numel():
        found.append(_loaded("own_parameters.own_step:OwnStep")())
    if "privacy" in plan.terms:
        found.append(_loaded("privacy.private_round:PrivateRound")())
    return found


def work_of(
    plan: Plan,
    window: Window,
    context: TrainingContext,
    spool: Spool | None = None,
    algorithm: ClientAlgorithm | None = None,
    own: Sequence[Feature] = (),
    least_tested: int = 0,
) -> Work:
    """Return a plan's work with the features that it calls for."""
    return Work(
        plan=plan,
        window=window,
        context=context,
        spool=spool,
        features=features_of(plan, context, algorithm, own),
        least_tested=least_tested,
    )


def train_round(
    plan: Plan, window: Window, context: TrainingContext, spool: Spool | None = None
) -> Update:
    """Carry out a plan, with the features that it calls for.

    Raises:
        HeadwaterError: see ``carry_out``.
    """
    return carry_out(work_of(plan, window, context, spool))


def algorithm_of(chosen: AlgorithmSettings) -> Any:
    """Return the device's client algorithm; None if none is set.

    Raises:
        SettingsError: it cannot be found or constructed, or has no method ``train``.
    """
    return None if chosen.name is None else _loaded("algorithms.lookup:algorithm_of")(chosen)


def warn_of_untried(settings: Settings) -> None:
    """Log that a client algorithm is not tried; see ``client.algorithms.lookup``."""
    if settings.algorithm.name is not None and not settings.check_task:
        _loaded("algorithms.lookup:warn_of_untried")(settings)


def algorithm_trial(algorithm: Any) -> Any:
    """Return what tries a client algorithm before the first round; None without one."""
    if algorithm is None:
        return None
    return partial(_loaded("algorithms.trial:try_algorithm"), algorithm)


def trial_of(algorithm: Any) -> Callable[[TrainingContext], None]:
    """Return what tries, before the first round, the parts of a task that plans may ask for."""
    of_algorithm = algorithm_trial(algorithm)

    def trial(context: TrainingContext) -> None:
        task = context.task
        if hasattr(task, "statistics") and isinstance(getattr(task, "measured", None), Mapping):
            _loaded("statistics.statistics_round:try_statistics")(context)
        if of_algorithm is not None:
            of_algorithm(context)

    return trial


def algorithm_for(plan: Plan, chosen: AlgorithmSettings, *, name: str) -> Any:
    """Return the client algorithm for a plan, or None.

    Raises:
        AlgorithmMismatch: the server's run has another one than this device.
        SettingsError: see ``algorithm_of``.
    """
    if chosen.name is None and not plan.terms:
        return None
    return _loaded("algorithms.lookup:algorithm_for")(plan, chosen, name=name)


def check_algorithm(servers: str | None, chosen: AlgorithmSettings, *, name: str) -> None:
    """Compare the algorithm of the server's run with the device's.

    Raises:
        AlgorithmMismatch: they differ.
    """
    if servers is not None or chosen.name is not None:
        _loaded("algorithms.lookup:check_algorithm")(servers, chosen, name=name)


def own_parameters(image: ModelImage, built: Callable[[int], ModelImage]) -> Any:
    """Return what loads the parameters that stay on each device; None if none does."""
    if not image.layout.local:
        return None
    return _loaded("own_parameters.own_parameters:OwnParameters")(image, built)


def check_test(settings: Settings) -> None:
    """Check that the device's own features let it test a model.

    Raises:
        FeatureMissing: see ``client.own_feature.own_round.check_test``.
    """
    if settings.feature.name is not None:
        _loaded("own_feature.own_round:check_test")(settings.feature)


def takes_model(plan: Plan) -> bool:
    """Return whether a plan of a test brings a model that is kept, and asks for no figure."""
    return "evaluation" in plan.terms


def take_model(image: ModelImage, plan: Plan, *, name: str) -> EvaluateReport:
    """Keep the model that came, see ``client.evaluation.other_model``; return an empty report."""
    report: EvaluateReport = _loaded("evaluation.other_model:take_model")(image, plan, name=name)
    return report


def own_rounds(
    plan: Plan, settings: Settings, store: Callable[[str], LocalStore | None]
) -> Sequence[OwnRound]:
    """Return what features that may keep a state do in a plan: the user's, and an algorithm's.

    ``store`` gives the place of a state.

    Raises:
        SettingsError: there is no such feature.
    """
    found: list[OwnRound] = []
    local = plan.terms.get("local_training")
    if "control_variates" in plan.terms or (local is not None and local.carries_state):
        found += _loaded("local_state.state_rounds:state_rounds")(plan, store)
    if settings.feature.name is not None:
        found += _loaded("own_feature.own_round:own_rounds")(plan, settings.feature, store)
    return found


def _loaded(place: str) -> Any:
    """Return what a room of the client holds: the arrows from a feature run to the core alone."""
    return part_of(f"headwater.client.{place}")
