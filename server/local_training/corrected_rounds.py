"""Rounds of devices that took unlike numbers of local steps, whose mean is corrected for that."""

from __future__ import annotations

from headwater.server.aggregation.round_reports import RoundSum
from headwater.server.local_training.step_correction import correct_steps
from headwater.server.rounds.features import RunFeature
from headwater.server.rounds.open_round import OpenRound


class CorrectedRounds(RunFeature):
    """Multiplies the mean by the mean length of the devices' paths."""

    def closed(self, done: RoundSum, opened: OpenRound) -> RoundSum:
        reports = opened.accepted if opened.releases_reports else {}
        correct_steps(done, opened.plans, reports, opened.times)
        return done
