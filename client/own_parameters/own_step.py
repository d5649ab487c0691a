"""The step of the parameters that stay on the device.

They and the shared ones are differentiated at the same point, so the shared vector is exact under
the device's own parameters. They take a step of plain SGD wherever their gradients are complete:
with the mean of the window, or of each local step, and the task's penalty.
"""

from __future__ import annotations

import torch

from headwater.client.training.round import Feature, Work
from headwater.common.additivity.penalty import has_penalty, own_penalty
from headwater.common.errors import NonFiniteUpdate
from headwater.common.model.vectors import all_finite
from headwater.common.own_parameters.terms import OwnStepTerms


class OwnStep(Feature):
    """Steps the device's own parameters along the mean of their summed gradients."""

    def summed(self, work: Work, weight: int) -> None:
        """Take the step; none if nothing has a weight.

        Raises:
            NonFiniteUpdate: the parameters would not be finite.
            TaskFailed, TaskError: see ``headwater.common.additivity.penalty``.
        """
        image, sum_L = work.context.image, work.context.accumulator.local_L
        if not weight or not sum_L.numel():
            return
        rate = (work.plan.of(OwnStepTerms) or OwnStepTerms()).learning_rate
        stepped_L = torch.sub(image.local_L, sum_L, alpha=rate / weight)
        if has_penalty(work.context.task):
            stepped_L.sub_(own_penalty(work.context.task, image), alpha=rate)
        if not all_finite(stepped_L):
            raise NonFiniteUpdate(
                f"{work.context.name}, round {work.plan.round}: the parameters that stay on the "
                "device diverged",
                remedy="lower --local-learning-rate",
            )
        image.local_L.copy_(stepped_L)
