r"""SCAFFOLD (Karimireddy et al. 2020): local steps that do not drift to a client's own optimum.

A feature has up to three parts: what its plans say, what the server does, what a client does. Each
client subtracts its own drift from each local step, and adds the mean drift of all.

``--algorithm scaffold`` has it built in; here it shows in a few lines how a feature of your own has
a state, a tensor on its way down and a second sum.

Try it: headwater-simulate --feature examples/extensions/scaffold.py:Scaffold --local-steps 5 \
    --partition dirichlet --optimizer sgd --lr 1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import headwater


class Scaffold:
    """Algorithm 1 of the paper, with option II."""

    class Terms(headwater.Terms):
        """What a plan says: c, the mean drift, which each client answers with its own change."""

        variate: headwater.Values

        def sums(self, num_values: int) -> dict[str, headwater.SumOf]:
            return {"variates": headwater.SumOf(length=num_values)}

    class Server(headwater.ServerFeature):
        """Keeps c, also in the checkpoint."""

        def __init__(self, run: Any) -> None:
            super().__init__(run)
            self.variate_P = torch.zeros(run.image.layout.num_parameters)

        def terms(self) -> headwater.Terms:
            found: headwater.Terms = self.Terms(variate=self.variate_P)
            return found

        def committed(self, done: Any) -> None:
            self.variate_P = self.variate_P + done.sums["variates"] / self.run.population

        def tensors(self) -> Mapping[str, Tensor]:
            return {"variate": self.variate_P}

        def restore(self, row: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
            self.variate_P = tensors.get("variate", self.variate_P)

    class Device(headwater.DeviceFeature):
        """Keeps c_i in ``state``: it moves on if the round counts."""

        def begin(self, work: headwater.DeviceWork) -> None:
            self.own_P = self.state.get("variate", torch.zeros_like(self.terms.variate))

        def direction(self, work: headwater.DeviceWork, mean_P: Tensor) -> None:
            mean_P += self.terms.variate - self.own_P

        def end(self, work: headwater.DeviceWork) -> None:
            mean_P = work.vector_P / (work.total.weight * work.num_steps * work.learning_rate)
            new_P = self.own_P - self.terms.variate + mean_P
            self.sums = {"variates": new_P - self.own_P}
            self.state = {"variate": new_P}
