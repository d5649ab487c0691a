"""Private plans on a device: the owner's limit, and what is spent."""

from __future__ import annotations

from headwater.client.flower.request import DeviceRequest
from headwater.client.plan_features import PlanFeature, own_order_seed
from headwater.client.privacy.budget import check_budget, check_test, spent_of
from headwater.client.privacy.budget_data import check_start
from headwater.client.privacy.example_unit import check_example_unit
from headwater.client.privacy.round_spending import planned_window, spend
from headwater.client.training.sampler import SamplerState
from headwater.common.messages import Plan
from headwater.common.privacy.terms import PrivacyTerms


class PrivatePlans(PlanFeature):
    """Privacy: what noise for single examples excludes, the owner's limit, and what is spent."""

    def allow(self, request: DeviceRequest, plan: Plan) -> None:
        name, window, terms = request.identity.name, None, plan.of(PrivacyTerms)
        if terms is not None and terms.unit == "example":
            has_local = request.local_store is not None
            check_example_unit(plan, request.sampler, name=name, has_local=has_local)
            window = planned_window(request, plan, own_order_seed(request, plan))
        chosen = request.settings.privacy
        check_budget(plan, chosen, name=name, spent=spent_of(request), window=window)
        check_start(request.trainer, request.identity, request.state_folder, chosen)

    def sent(self, request: DeviceRequest, plan: Plan, sampler: SamplerState) -> None:
        if (terms := plan.of(PrivacyTerms)) is not None:
            spend(request, terms, sampler)

    def check_test(self, request: DeviceRequest) -> None:
        check_test(request.settings.privacy, name=request.identity.name)
