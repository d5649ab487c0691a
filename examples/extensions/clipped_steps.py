"""Local steps whose mean gradients are clipped to a norm (Pascanu et al. 2013, algorithm 1).

Try it: headwater-simulate --optimizer sgd --lr 1 --local-steps 5 --clients 20 \
    --client-algorithm examples/extensions/clipped_steps.py:ClippedSteps
"""

from __future__ import annotations

from torch import Tensor

from headwater.client.local_training.local_work import LocalWork


class ClippedSteps:
    """Clips each local step's mean gradient to ``max_norm``."""

    def __init__(self, max_norm: float = 1.0) -> None:
        self.max_norm = max_norm

    def train(self, work: LocalWork) -> Tensor:
        model_P, start_P = work.parameters_P, work.start_P
        for mean_P in work.steps():
            factor = min(1.0, self.max_norm / (float(mean_P.norm()) or 1.0))
            model_P -= work.learning_rate * factor * mean_P
        return work.weight * (start_P - model_P)
