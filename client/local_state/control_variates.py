"""SCAFFOLD on a device: local steps that do not drift towards the device's own optimum.

Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
algorithm 1 with option II. A device keeps its control variate c_i, the mean gradient along its last
round's steps, and adds c - c_i to the gradient of each step, where c is the mean of all devices'.
Afterwards c_i is the mean of the gradients that were seen, before that correction:

    c_i = (parameters before - after) / (steps x rate) - (c - c_i)

A device's first round is not corrected: it has no c_i yet. So its c_i is one of gradients alone.
The paper has c_i = 0 there, which adds the whole of c to the steps of a device that comes late. If
all devices are in the first round, both are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.client.own_feature.device_feature import DeviceFeature, DeviceWork
from headwater.common.errors import ProtocolMismatch
from headwater.common.local_state.terms import MAX_VALUE, VARIATES, WEIGHTS, ScaffoldTerms
from headwater.common.local_training.terms import LocalPlan
from headwater.common.messages import Plan

VARIATE, WEIGHT, FIRST_ROUND = "variate", "weight", "first_round"


class ControlVariates(DeviceFeature):
    """Keeps c_i, the weight with which it is in the server's sums, and when these began."""

    def __init__(self, terms: ScaffoldTerms, plan: Plan) -> None:
        super().__init__(terms)
        self._plan = plan
        self._added_P: Tensor | None = None
        """What each step's gradient gets: c - c_i; None in the device's first round."""

    def begin(self, work: DeviceWork) -> None:
        """Take up the control variate of the last counted round, if it is in the server's sums.

        Raises:
            ProtocolMismatch: c has another length than the model.
        """
        state, num_sent = self.state, self.terms.variate.numel()
        num_values = work.parameters_P.numel()
        if num_sent != num_values:
            raise ProtocolMismatch(
                f"{work.name}, round {work.round}: the plan has a mean of {num_sent:,} values, the "
                f"model has {num_values:,} parameters",
                remedy="use a server of this version",
            )
        is_known = FIRST_ROUND in state and int(state[FIRST_ROUND]) == self.terms.first_round
        if not is_known or state[VARIATE].numel() != num_values:
            self.state = {}
            return
        self._added_P = self.terms.variate - state[VARIATE]

    def direction(self, work: DeviceWork, mean_P: Tensor) -> None:
        if self._added_P is not None:
            mean_P += self._added_P

    def end(self, work: DeviceWork) -> None:
        """Send by how much weight x c_i has changed; a value beyond the limit changes nothing."""
        weight = float(self._plan.weigh_as or work.total.weight)
        before_P = self.state[VARIATE] * self.state[WEIGHT] if self.state else 0.0
        weight_before = float(self.state[WEIGHT]) if self.state else 0.0
        variate_P = self._mean_gradient(work)
        change_P = variate_P * weight - before_P
        if weight and bool((change_P.abs() <= MAX_VALUE).all()):  # False if one is not finite
            self.state = {
                VARIATE: variate_P,
                WEIGHT: torch.tensor(weight),
                FIRST_ROUND: torch.tensor(self.terms.first_round),
            }
        else:
            change_P, weight = torch.zeros_like(variate_P), weight_before
        self.sums = {VARIATES: change_P, WEIGHTS: torch.tensor([weight - weight_before])}

    def _mean_gradient(self, work: DeviceWork) -> Tensor:
        """Return the mean gradient of the steps, as the task's losses had it."""
        local = self._plan.of(LocalPlan)
        assert local is not None
        moved_P = work.vector_P / max(work.total.weight, 1)
        if local.how is None or not local.how.is_normalized:  # else it is divided by them already
            moved_P /= work.num_steps
        moved_P /= work.learning_rate
        return moved_P if self._added_P is None else moved_P - self._added_P
