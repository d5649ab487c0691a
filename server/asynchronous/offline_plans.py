"""Plans under which a device may sum several windows while it has no link."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.common.offline.terms import OfflineTerms
from headwater.server.planning.features import DraftPlan, PlanningFeature


class OfflinePlans(PlanningFeature):
    """Says how many windows a device may sum under one plan."""

    def write(self, drafts: Sequence[DraftPlan], *, num_invited: int) -> None:
        terms = OfflineTerms(windows=self.settings.asynchronous.offline_windows)
        for draft in drafts:
            draft.ask(terms)
