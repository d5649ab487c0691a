"""What an algorithm of local training that keeps a state does in a plan that asks for it.

The state is kept as that of a feature of the user's: pending until the server says that the round
counted, in a file of the device's state folder (``client.own_feature.own_round``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.client.local_state.control_variates import ControlVariates
from headwater.client.local_state.kept_optimizer import KeptOptimizer, OptimizerRound
from headwater.client.own_feature.own_round import OwnRound
from headwater.common.local_state.terms import ScaffoldTerms
from headwater.common.local_training.terms import LocalPlan
from headwater.common.messages import Plan
from headwater.common.model.local_state import LocalStore


def state_rounds(plan: Plan, store: Callable[[str], LocalStore | None]) -> Sequence[OwnRound]:
    """Return what SCAFFOLD and the kept optimizer do; ``store`` gives the place of a state."""
    found: list[OwnRound] = []
    if (terms := plan.of(ScaffoldTerms)) is not None:
        device, place = ControlVariates(terms, plan), store("algorithm.scaffold")
        found.append(OwnRound(device, plan, place, what="SCAFFOLD"))
    local = plan.of(LocalPlan)
    if local is not None and local.carries_state:
        place = store("algorithm.optimizer")
        found.append(OptimizerRound(KeptOptimizer(local), plan, place, what="the local optimizer"))
    return found
