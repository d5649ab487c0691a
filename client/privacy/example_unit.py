"""What a device requires of a plan whose unit of privacy is an example (docs/privacy.md).

The bound on an example holds only if it reaches the sum through its own clipped gradient alone, and
the epsilon of a run only if an example comes again in the next epoch and no earlier. The server
checks its settings for the same; a device does not rely on that.
"""

from __future__ import annotations

from headwater.client.training.sampler import SamplerState
from headwater.common.errors import ExamplesForgotten, ProtocolMismatch
from headwater.common.local_training.terms import PLAIN, LocalPlan
from headwater.common.messages import Plan
from headwater.common.privacy.terms import PrivacyTerms

REMEDY = "start the server with --privacy-unit device, or without what this names"


def check_example_unit(plan: Plan, sampler: SamplerState, *, name: str, has_local: bool) -> None:
    """Check that a plan of example privacy bounds what each single example adds.

    ``has_local`` says whether parameters stay on the device.

    Raises:
        ProtocolMismatch: it does not, which no server of ours asks for.
        ExamplesForgotten: a plain sum of the run has an update of this device that its state does
            not know of. (Under masks the server counts every round as if all examples came again.)
    """
    terms, local = plan.of(PrivacyTerms), plan.of(LocalPlan) or PLAIN
    assert terms is not None
    faults = {
        "local steps": local.takes_steps,
        "a client algorithm": local.algorithm is not None,
        "parameters that stay on the device": has_local,
        "more examples than its noise is for": plan.quota > terms.max_examples,
        "examples held out, of which one may move others": plan.held_out_fraction > 0,
    }
    for fault, is_found in faults.items():
        if is_found:
            raise ProtocolMismatch(
                f"{name}: the plan clips each example's gradient, which bounds nothing with "
                f"{fault}",
                remedy=REMEDY,
            )
    if not plan.hides_data and not sampler.knows(plan.counted_round):
        raise ExamplesForgotten(
            f"{name}: the run's round {plan.counted_round} has examples of this device, and its "
            "state file does not say which"
        )
