"""Plans that test a model, on a device: what the owner's protection leaves of them."""

from __future__ import annotations

from headwater.client.evaluation.other_model import check_kept
from headwater.client.flower.request import DeviceRequest
from headwater.client.plan_features import PlanFeature
from headwater.common.errors import ProtocolMismatch
from headwater.common.evaluation.measures import Measures, measures_of
from headwater.common.evaluation.terms import EvaluationTerms
from headwater.common.messages import Plan
from headwater.common.task import Task

BESIDE = {EvaluationTerms.NAME, "secagg"}
"""What a plan of a test may ask for: what another feature adds up has other subjects."""


class EvaluationPlans(PlanFeature):
    """Checks that the server counts what the device's own task says, and nothing beside it."""

    def allow(self, request: DeviceRequest, plan: Plan) -> None:
        terms, name = plan.of(EvaluationTerms), request.identity.name
        assert terms is not None  # see client.plan_features
        trainer = request.trainer
        measures_for(plan, terms, trainer.task, name=name)
        check_kept(trainer.image, terms, name=name)
        if others := plan.terms.keys() - BESIDE:
            raise ProtocolMismatch(
                f"{name}, round {plan.round}: the plan tests a model, and asks for "
                f"{', '.join(sorted(others))} beside it",
                remedy="use a server of this version",
            )


def measures_for(plan: Plan, terms: EvaluationTerms, task: Task, *, name: str) -> Measures:
    """Return what the device's own task counts, which must be what the server's does.

    ``name`` is the device's.

    Raises:
        TaskError: see ``measures_of``.
        ProtocolMismatch: it counts something else than the server's.
    """
    measures = measures_of(task)
    asked = (terms.measures, terms.num_counts, terms.num_reals)
    if asked != (measures.digest, measures.num_counts, measures.num_reals):
        raise ProtocolMismatch(
            f"{name}, round {plan.round}: the server's task counts something else of its "
            "predictions than this device's: other names, classes or bins",
            remedy="start both sides with the same file of the task",
        )
    return measures
