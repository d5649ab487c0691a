"""Plans whose updates are sent encoded."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.server.planning.features import DraftPlan, PlanningFeature


class CompressedPlans(PlanningFeature):
    """Says how updates are encoded."""

    def write(self, drafts: Sequence[DraftPlan], *, num_invited: int) -> None:
        terms = self.settings.compression.terms
        assert terms is not None  # see ``FEATURES``
        for draft in drafts:
            draft.ask(terms)
