"""FedProx (Li et al. 2020, algorithm 2): local steps that are pulled towards the server's model.

``--algorithm fedprox`` has it built in, with any local optimizer; here it shows in a few lines how
an algorithm of your own takes local steps.

Try it: headwater-simulate --optimizer sgd --lr 1 --local-steps 5 --clients 20 \
    --client-algorithm examples/extensions/fedprox.py:FedProx --algorithm-argument mu=0.1
"""

from __future__ import annotations

from torch import Tensor

from headwater.client.local_training.local_work import LocalWork


class FedProx:
    """Adds mu (parameters - start) to each local step's mean gradient."""

    def __init__(self, mu: float = 0.01) -> None:
        self.mu = mu

    def train(self, work: LocalWork) -> Tensor:
        model_P, start_P = work.parameters_P, work.start_P
        for mean_P in work.steps():
            model_P -= work.learning_rate * (mean_P + self.mu * (model_P - start_P))
        return work.weight * (start_P - model_P)
