"""A plan that a sum of windows without a link answers."""

from __future__ import annotations

from flwr.app import RecordDict

from headwater.client.flower.request import DeviceRequest
from headwater.client.offline.offline_windows import deliverable
from headwater.client.plan_features import PlanFeature
from headwater.common.flower import records
from headwater.common.messages import Plan


class OfflineSums(PlanFeature):
    """Windows that were summed without a link, whose sum answers the next plan."""

    def check(self, request: DeviceRequest, plan: Plan) -> RecordDict | None:
        late = deliverable(request, plan)
        return None if late is None else records.update_content(late, as_view=True)
