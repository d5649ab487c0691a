"""The features of a device's round, in their order: the one list that names them.

A feature is imported when a plan asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headwater.client.training.context import TrainingContext
from headwater.client.training.round import Feature, Work, carry_out
from headwater.client.training.sampler import Window
from headwater.client.training.spool import Spool
from headwater.common.messages import Plan, Update
from headwater.common.model.local_state import LocalStore
from headwater.common.named_objects import part_of
from headwater.common.settings.schema import Settings

if TYPE_CHECKING:
    from headwater.client.local_training.local_work import ClientAlgorithm
    from headwater.client.own_feature.own_round import OwnRound


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
) -> Work:
    """Return a plan's work with the features that it calls for."""
    features = features_of(plan, context, algorithm, own)
    return Work(plan=plan, window=window, context=context, spool=spool, features=features)


def train_round(
    plan: Plan, window: Window, context: TrainingContext, spool: Spool | None = None
) -> Update:
    """Carry out a plan, with the features that it calls for.

    Raises:
        HeadwaterError: see ``carry_out``.
    """
    return carry_out(work_of(plan, window, context, spool))


def own_rounds(
    plan: Plan, settings: Settings, store: Callable[[str], LocalStore | None]
) -> Sequence[OwnRound]:
    """Return what a feature of the user's does in a plan, in a list; ``store`` gives its place.

    Raises:
        SettingsError: there is no such feature.
    """
    if settings.feature.name is None:
        return ()
    found: Sequence[OwnRound] = _loaded("own_feature.own_round:own_rounds")(
        plan, settings.feature, store("feature")
    )
    return found


def _loaded(place: str) -> Any:
    """Return what a room of the client holds: the arrows from a feature run to the core alone."""
    return part_of(f"headwater.client.{place}")
