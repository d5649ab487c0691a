"""Plans whose updates are sent encoded."""

from __future__ import annotations

from headwater.common.compression.planned_bytes import download_bytes, upload_bytes
from headwater.common.compression.terms import terms_of
from headwater.server.planning.features import DraftPlans, PlanningFeature


class CompressedPlans(PlanningFeature):
    """Says how updates are encoded, and how much less is moved."""

    def transfer_bytes(self, down: int, up: int, *, num_values: int) -> tuple[int, int]:
        return download_bytes(self.settings, self.layout), upload_bytes(self.settings, self.layout)

    def write(self, drafts: DraftPlans) -> None:
        if (terms := terms_of(self.settings.compression)) is not None:
            drafts.ask(terms)
