"""Rounds of local steps: the mean of unlike numbers of steps is corrected, and rates are shown."""

from __future__ import annotations

from typing import Any

from headwater.common.additivity.penalty import has_penalty
from headwater.common.errors import SettingsError
from headwater.common.local_training.local_optimizer import local_optimizer
from headwater.common.local_training.local_terms import local_terms
from headwater.server.aggregation.round_reports import RoundSum
from headwater.server.local_training.local_rates import LocalRates
from headwater.server.local_training.step_correction import correct_steps
from headwater.server.rounds.features import RunFeature, RunState
from headwater.server.rounds.open_round import OpenRound


class CorrectedRounds(RunFeature):
    """Multiplies the mean by the mean length of the devices' paths, and shows the local rate."""

    def __init__(self, run: RunState) -> None:
        """Check that the local optimizer can be made, and that an algorithm takes all steps.

        Raises:
            SettingsError: it cannot, or the task has a penalty beside it.
        """
        local, algorithm = run.settings.local, run.settings.algorithm.name
        if algorithm is not None and has_penalty(run.task):
            raise SettingsError(
                f"the task has a penalty, and the client algorithm {algorithm} takes its own steps",
                remedy="add the penalty's gradient in the algorithm, and leave it out of the task",
            )
        if algorithm is None:
            terms = local_terms(local, run.settings.plan)
            local_optimizer(terms, run.image.trainable(), rate=local.rate, model=run.image.model)
        self._run, self._rates = run, LocalRates(local, run.settings.local_schedule)

    def check(self) -> None:
        """Check the rates of all rounds, if their number is set.

        Raises:
            SettingsError: see ``LocalRates.of_round``.
        """
        for number in range(1, (self._run.settings.num_rounds or 0) + 1):
            self._rates.of_round(number)

    def figures(self, opened: OpenRound) -> dict[str, Any]:
        """Return the rate of the local steps, where it changes."""
        if not self._rates.is_set:
            return {}
        return {"local_learning_rate": self._rates.of_round(self._run.round)}

    def closed(self, done: RoundSum, opened: OpenRound) -> RoundSum:
        reports = opened.accepted if opened.releases_reports else {}
        correct_steps(done, opened.plans, reports, opened.times)
        return done
