"""Follows metrics over a run's evaluations: which round is the best, and when to stop early.

Only an improvement counts: an equal value, or NaN, is none. The run stops after ``patience``
evaluations in a row without one (Prechelt 1998, "Early stopping - but when?", criterion UP).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headwater.common.errors import SettingsError, UnknownMetric
from headwater.common.settings.fields import direction, split_criterion
from headwater.common.settings.schema import EvaluationSettings

DEFAULT_PATIENCE = 10
TRAINING, HELD_OUT = "train_", "held_out_loss"


@dataclass(frozen=True, kw_only=True, slots=True)
class Followed:
    """A metric's best value so far."""

    criterion: str
    """The setting that names the metric: ``accuracy``, ``min:test_error``."""
    metric: str
    """The metric's full name in rounds.jsonl."""
    value: float | None = None
    """None as long as every value was NaN."""
    round: int | None = None
    num_since: int = 0
    """The evaluations since then, which brought no improvement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSelection:
    """What ``--best`` and ``--stop-when`` have found so far; None before the first evaluation."""

    best: Followed | None = None
    stop: Followed | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the state as a checkpoint stores it."""
        return {
            name: asdict(value)
            for name, value in (("best", self.best), ("stop", self.stop))
            if value is not None
        }


def restored(state: Mapping[str, Any], chosen: EvaluationSettings) -> ModelSelection:
    """Return a checkpoint's state; a criterion that has changed since starts anew."""

    def followed(name: str, criterion: str | None) -> Followed | None:
        saved = state.get(name)
        return Followed(**saved) if saved and saved["criterion"] == criterion else None

    return ModelSelection(
        best=followed("best", chosen.best), stop=followed("stop", chosen.stop_when)
    )


def check_criteria(chosen: EvaluationSettings, names: Collection[str] | None) -> None:
    """Check before the first round that its evaluations will have the metrics.

    ``names`` are those that the task returned for its first test example; None if it has no test
    examples. Then nothing is known of the metrics on examples that devices hold out.

    Raises:
        SettingsError: the run has no evaluation.
        UnknownMetric: no evaluation will have the metric.
    """
    for flag, criterion in (("--best", chosen.best), ("--stop-when", chosen.stop_when)):
        if criterion is None or split_criterion(criterion)[1].startswith(TRAINING):
            continue
        if names is not None:
            kinds = ("test_", "held_out_") if chosen.on_devices else ("test_",)
            known = {f"{kind}{name}" for kind in (*kinds, TRAINING) for name in (*names, "loss")}
            full_name(criterion, known)
        elif not chosen.on_devices:
            raise SettingsError(
                f"{flag} {criterion} needs an evaluation, and the task has no test_examples",
                remedy="give the task the method test_examples, or let devices hold examples out "
                "with --evaluate-on-devices, or follow the training with train_loss",
            )


def after_evaluation(
    state: ModelSelection,
    chosen: EvaluationSettings,
    metrics: Mapping[str, float],
    *,
    round_number: int,
    is_extra: bool = False,
) -> ModelSelection:
    """Return the state after an evaluated round.

    One that is ``is_extra`` is tested as the run's last one alone. It may be the best, and counts
    for no patience: a run that goes on would end elsewhere than one that was never cut.

    A metric that this round lacks leaves its state as it was, if an earlier round had it, or if no
    device has answered with its held-out examples.

    Raises:
        UnknownMetric: no evaluation of this run has such a metric.
    """
    is_whole = not chosen.on_devices or HELD_OUT in metrics

    def follow(before: Followed | None, criterion: str | None) -> Followed | None:
        if criterion is None:
            return None
        if before is None:
            try:
                before = Followed(criterion=criterion, metric=full_name(criterion, metrics))
            except UnknownMetric:
                if is_whole:
                    raise
                return None
        value = metrics.get(before.metric)
        if value is None:
            return before
        if not is_better(value, than=before.value, is_minimised=is_minimised(criterion)):
            return Followed(**{**asdict(before), "num_since": before.num_since + 1})
        return Followed(criterion=criterion, metric=before.metric, value=value, round=round_number)

    best, stop = follow(state.best, chosen.best), follow(state.stop, chosen.stop_when)
    return ModelSelection(best=best, stop=state.stop if is_extra else stop)


def is_better(value: float, *, than: float | None, is_minimised: bool) -> bool:
    """Return whether a value improves on the best one so far; NaN never does."""
    if math.isnan(value):
        return False
    return than is None or (value < than if is_minimised else value > than)


def is_minimised(criterion: str) -> bool:
    """Return whether lower values are better: as ``min:`` or ``max:`` says, else by the name."""
    return direction(criterion) == "min"


def full_name(criterion: str, metrics: Collection[str]) -> str:
    """Return the metric that a criterion names: NAME itself, else test_NAME, else held_out_NAME.

    Raises:
        UnknownMetric: there is none of these; lists the metrics that there are.
    """
    _, name = split_criterion(criterion)
    for full in (name, f"test_{name}", f"held_out_{name}"):
        if full in metrics:
            return full
    raise UnknownMetric(
        f"no evaluation has a metric {name}; this run has {', '.join(sorted(metrics))}"
    )


def why_stopped(state: ModelSelection, chosen: EvaluationSettings) -> str | None:
    """Return why ``--stop-when`` ends the run here, or None if it goes on."""
    followed, patience = state.stop, chosen.patience or DEFAULT_PATIENCE
    if followed is None or followed.num_since < patience:
        return None
    best = (
        "it was never a number"
        if followed.value is None
        else f"its best is {followed.value:.6g}, in round {followed.round}"
    )
    return f"{followed.metric} has not improved in {followed.num_since} evaluations; {best}"
