"""Plans whose updates are sent encoded, and what they left out."""

from __future__ import annotations

from headwater.client.compression.error_feedback import encoded_update, error_feedback_of
from headwater.client.flower.request import DeviceRequest
from headwater.client.plan_features import PlanFeature
from headwater.common.messages import Plan, Update


class CompressedPlans(PlanFeature):
    """Updates that are sent encoded, and what they left out."""

    def encode(
        self, request: DeviceRequest, plan: Plan, update: Update
    ) -> tuple[Update, bytearray | None]:
        return encoded_update(update, plan, error_feedback_of(request))
