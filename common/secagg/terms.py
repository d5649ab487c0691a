"""Masks, in a plan."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from headwater.common.messages import Natural
from headwater.common.settings.fields import Seconds
from headwater.common.terms import Terms


class MaskingTerms(Terms):
    """Answer with a ``ReadyReport``, keep the update, and wait for a secure session."""

    NAME: ClassVar[str] = "secagg"

    num_invited: Natural | None = Field(
        None, description="the clients that have such a plan, the most in a session"
    )
    answer_seconds: Seconds | None = Field(
        None,
        description="when the plan is answered, whatever the data; what is not done by then is "
        "left out",
    )

    def shared_text(self) -> str:
        """Return nothing: a session agrees on its members, and devices of unlike speed on no time.

        A device refuses a time in which it cannot do its quota (``client.secagg.plan_policy``).
        """
        return ""

    @property
    def hides_pace(self) -> bool:
        return True

    @property
    def hides_data(self) -> bool:
        return True

    @property
    def answers_after(self) -> float | None:
        return self.answer_seconds

    @property
    def keeps_update(self) -> bool:
        return True

    def update_bytes(self, num_values: int) -> int:
        """Return 0: the masked vector is sent in a later reply."""
        return 0
