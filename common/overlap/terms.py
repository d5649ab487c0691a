"""Plans of which two are out at a time, so that a device computes while its link works."""

from __future__ import annotations

from typing import ClassVar

from headwater.common.messages import Natural
from headwater.common.terms import Terms


class OverlapTerms(Terms):
    """That the device may be sent its next plan before this one's update has arrived."""

    NAME: ClassVar[str] = "overlap"

    after: Natural | None = None
    """The round of the client's earlier plan that is still out; None if there is none."""

    @property
    def overlaps(self) -> bool:
        return True

    @property
    def after_round(self) -> int | None:
        return self.after
