"""Plans under which devices step parameters of their own."""

from __future__ import annotations

from headwater.common.own_parameters.terms import OwnStepTerms
from headwater.server.planning.features import DraftPlans, PlanningFeature


class OwnStepPlans(PlanningFeature):
    """Says how devices step their own parameters."""

    def write(self, drafts: DraftPlans) -> None:
        drafts.ask(OwnStepTerms(learning_rate=self.settings.local.rate))
