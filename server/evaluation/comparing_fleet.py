"""The round of a comparison: all devices are sent the other model first, and then the plans."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, cast

from headwater.common.flower.sent_model import SentModel
from headwater.common.messages import Plan
from headwater.server.evaluation.evaluation_rounds import EvaluationRounds
from headwater.server.fleet import Answer, Dropout, Fleet
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.round_loop import synchronous_round
from headwater.server.rounds.round_row import RoundRow
from headwater.server.rounds.run_state import Training

log = logging.getLogger(__name__)


def run_round(training: Training, fleet: Fleet, observer: Observer) -> RoundRow:
    """Run one round in which two models are compared.

    Raises:
        HeadwaterError: see ``synchronous_round``.
    """
    feature = training.features["evaluation"]
    assert isinstance(feature, EvaluationRounds)
    other = feature.other
    assert other is not None  # see ``server.rounds.features.round_runner``
    return synchronous_round(training, cast(Fleet, _ComparingFleet(fleet, other)), observer)


class _ComparingFleet:
    """A fleet that sends another model before each round's plans."""

    def __init__(self, fleet: Fleet, other: SentModel) -> None:
        self._fleet, self._other = fleet, other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def train(
        self,
        plans: Mapping[str, Plan],
        image: SentModel,
        *,
        num_needed: int = 0,
        timeout_seconds: float | None,
    ) -> Iterator[Answer]:
        """Send the other model to all devices, and then the plans with the first."""
        # By its version a device tells the two apart; no round after this one has it.
        first = {
            name: plan.model_copy(update={"model_version": plan.model_version + 1})
            for name, plan in plans.items()
        }
        lost: dict[str, Dropout] = {}
        for answer in self._fleet.evaluate(first, self._other, timeout_seconds=timeout_seconds):
            if isinstance(answer, Dropout):
                lost[answer.name] = answer
        yield from lost.values()
        yield from self._fleet.train(
            {name: plan for name, plan in plans.items() if name not in lost},
            image,
            num_needed=num_needed,
            timeout_seconds=timeout_seconds,
        )
