"""The local steps of a plan: an optimizer of torch on the means of the client's own sums.

The optimizer's state and the copy of the server's parameters are counted to the device's memory
before they are allocated, so that micro-batches are cut smaller in time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.client.local_training.local_work import LocalWork
from headwater.client.local_training.step_spool import StepContent
from headwater.client.training.context import TrainingContext
from headwater.common.additivity.penalty import add_penalty
from headwater.common.local_training.local_optimizer import held_bytes, local_optimizer, path_length
from headwater.common.local_training.local_terms import LocalTerms
from headwater.common.model.vectors import CHUNK
from headwater.common.optimizers.torch_compiler_stub import without_dynamo


class LocalSteps:
    """An optimizer's steps on the means of the client's own sums, by the plan's terms."""

    def __init__(self, terms: LocalTerms, context: TrainingContext) -> None:
        self._terms = terms
        self._context = context

    def train(self, work: LocalWork) -> Tensor:
        image, terms, rate = self._context.image, self._terms, work.learning_rate
        num_bytes = held_bytes(terms, num_parameters=image.layout.num_parameters)
        with self._context.memory.holding(num_bytes):
            start_P = work.start_P
            optimizer = local_optimizer(terms, image.trainable(), rate=rate, model=image.model)
            work.stepping(optimizer)
            for mean_P in work.steps(
                StepContent(image, optimizer)
            ):  # the mean is in the parameters' gradients
                if terms.proximal:  # this term of the loss uses every parameter
                    _pull_back(mean_P, image.values_P, start_P, terms.proximal)
                penalised = add_penalty(self._context.task, image, mean_P)
                if not terms.proximal:
                    self._context.accumulator.hide_unused(but=penalised)
                with without_dynamo():
                    optimizer.step()
            # The accumulator's vector is free now and takes the difference.
            own_P = self._context.accumulator.values_P
            difference_P = torch.sub(start_P, image.values_P, out=own_P)
        length = 1.0
        if terms.is_normalized and work.num_taken:
            length = path_length(terms, work.num_taken, rate=rate)
        return difference_P.mul_(work.weight / length)


def _pull_back(gradient_P: Tensor, values_P: Tensor, start_P: Tensor, mu: float) -> None:
    """Add mu (parameters - start) to a gradient, in place, without another vector."""
    parts = (torch.split(one_P, CHUNK) for one_P in (gradient_P, values_P, start_P))
    for gradient, values, start in zip(*parts, strict=True):
        gradient.add_(values - start, alpha=mu)
