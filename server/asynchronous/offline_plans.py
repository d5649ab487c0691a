"""Plans under which a device may sum several windows while it has no link."""

from __future__ import annotations

from headwater.common.offline.terms import OfflineTerms
from headwater.server.planning.features import DraftPlans, PlanningFeature


class OfflinePlans(PlanningFeature):
    """Says how many windows a device may sum under one plan."""

    def write(self, drafts: DraftPlans) -> None:
        drafts.ask(OfflineTerms(windows=self.settings.asynchronous.offline_windows))
