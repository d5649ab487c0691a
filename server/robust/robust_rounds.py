"""Rounds whose mean is a robust rule's: updates are held one by one, and compared at the end."""

from __future__ import annotations

from dataclasses import replace

from headwater.common.model.vectors import zero_tensors
from headwater.server.aggregation.round_reports import RoundSum, plain_sum
from headwater.server.fleet import Fleet
from headwater.server.robust.held_updates import HeldUpdates
from headwater.server.rounds.features import Opening, RunFeature, RunState
from headwater.server.rounds.open_round import OpenRound


class RobustRounds(RunFeature):
    """Holds a round's updates, and returns the rule's mean."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        num_parameters = run.image.layout.num_parameters
        chosen = run.settings.aggregation
        assert chosen.rule != "sum"  # see ``FEATURES``
        self._held = HeldUpdates(
            chosen.rule,
            num_parameters=num_parameters,
            share=chosen.attackers,
            ram_bytes=run.settings.server.staging_bytes,
            folder=run.settings.out,
        )

    def open(self, opening: Opening) -> None:
        self._held.open(num_clients=len(opening.plans))
        opening.held = self._held

    def close(self, opened: OpenRound, fleet: Fleet) -> RoundSum:
        """Return the rule's mean; it is not that of the examples that noise is estimated from.

        Raises:
            TooFewClients: fewer updates than --min-clients, or than the rule needs.
        """
        self._run.check_enough(opened, opened.accepted)
        done = plain_sum(
            opened.columns,
            names=tuple(opened.accepted),
            mean_P=self._held.mean(self._run.sum),
            weight=self._held.weight,
            max_weight_per_example=self._run.max_weight_per_example,
            noise=None,
        )
        spans = self._run.image.layout.spans
        return replace(done, unused=zero_tensors(done.mean_P, spans, opened.unused))
