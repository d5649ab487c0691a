"""Plans that ask for statistics, on a device: what the owner's protection leaves of them."""

from __future__ import annotations

from headwater.client.flower.request import DeviceRequest
from headwater.client.plan_features import PlanFeature
from headwater.client.statistics.statistics_round import columns_for
from headwater.common.errors import ProtocolMismatch
from headwater.common.messages import Plan
from headwater.common.statistics.terms import StatisticsTerms

BESIDE = {StatisticsTerms.NAME, "secagg", "privacy"}
"""What a plan that measures may ask for. A device masks each example in one sum of its columns,
whatever the model is: another feature's sums of that round could be of any model."""


class StatisticsPlans(PlanFeature):
    """Checks that the server measures what the device's own task says, and nothing beside it."""

    def allow(self, request: DeviceRequest, plan: Plan) -> None:
        terms, name = plan.of(StatisticsTerms), request.identity.name
        assert terms is not None  # see client.plan_features
        columns_for(plan, terms, request.trainer.task, name=name)
        if terms.found is None and (others := plan.terms.keys() - BESIDE):
            raise ProtocolMismatch(
                f"{name}, round {plan.round}: the plan measures statistics, and asks for "
                f"{', '.join(sorted(others))} beside them",
                remedy="use a server of this version",
            )
        if terms.found is None and {"secagg", "privacy"} <= plan.terms.keys():
            raise ProtocolMismatch(
                f"{name}, round {plan.round}: the plan measures statistics under masks and asks "
                "for noise, which devices do not add to them",
                remedy="use a server of this version",
            )
