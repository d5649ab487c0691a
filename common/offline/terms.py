"""Windows that a device sums while it has no link, in a plan."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from headwater.common.messages import Natural
from headwater.common.terms import Terms


class OfflineTerms(Terms):
    """How many windows of the plan's examples a device may sum under one plan."""

    NAME: ClassVar[str] = "offline"

    windows: Annotated[int, Field(ge=1, le=2**20)]
    refused_round: Natural | None = Field(
        None, description="the round of this client's last update, if the server refused that one"
    )

    @property
    def why_alone(self) -> str | None:
        return None if self.windows == 1 else super().why_alone

    @property
    def max_windows(self) -> int:
        return self.windows
