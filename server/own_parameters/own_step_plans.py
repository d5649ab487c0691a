"""Plans under which devices step parameters of their own."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.common.own_parameters.terms import OwnStepTerms
from headwater.server.planning.features import DraftPlan, PlanningFeature


class OwnStepPlans(PlanningFeature):
    """Says how devices step their own parameters."""

    def write(self, drafts: Sequence[DraftPlan], *, num_invited: int) -> None:
        terms = OwnStepTerms(learning_rate=self.settings.local.rate)
        for draft in drafts:
            draft.ask(terms)
