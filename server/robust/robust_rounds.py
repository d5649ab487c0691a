"""Rounds whose mean is a robust rule's: updates are held one by one, and compared at the end."""

from __future__ import annotations

from headwater.server.robust.held_updates import HeldUpdates
from headwater.server.rounds.features import Opening, RunFeature, RunState


class RobustRounds(RunFeature):
    """Holds a round's updates for the rule, and takes its mean."""

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
