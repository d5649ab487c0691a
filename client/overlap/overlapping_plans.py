"""Plans that are carried out while an update is sent, and what of a device forbids them.

What a device keeps of a round is pending until the server says that the round counted. With two
rounds pending, only the place among the examples and the residual of a compressed update are kept
twice; a plan that would change anything else is refused.
"""

from __future__ import annotations

from headwater.client.flower.request import DeviceRequest
from headwater.client.plan_features import PlanFeature
from headwater.common.errors import SettingsError
from headwater.common.messages import Plan
from headwater.common.terms import KINDS

ALLOWED = {"compression", "local_training", "offline", "overlap"}
"""The terms that go with it."""


class OverlappingPlans(PlanFeature):
    """Plans of which two are out at a time."""

    def check(self, request: DeviceRequest, plan: Plan) -> None:
        """Check that nothing in the plan keeps a state that is pending once.

        Raises:
            SettingsError: something does.
        """
        keeping = sorted(name for name in plan.terms if name not in ALLOWED)
        local = plan.terms.get("local_training")
        if local is not None and local.carries_state:
            keeping.append("local_training")
        if request.trainer.image.layout.local:
            keeping.append("own_parameters")
        if plan.max_windows > 1:
            keeping.append("offline")
        if keeping:
            named = ", ".join(name if name in KINDS else f"the feature {name}" for name in keeping)
            raise SettingsError(
                f"{request.identity.name}, round {plan.round}: a plan with --overlap may have none "
                f"of this: {named}",
                remedy="start the server without --overlap, or without what is named",
            )
