"""The device's side of a feature of the user's: the moments of one round, and what it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headwater.client.training.gradient_pass import forward
from headwater.client.training.round import Work
from headwater.client.training.window_sum import WindowSum
from headwater.common.data.example_lengths import Positions
from headwater.common.local_training.terms import PLAIN, LocalPlan
from headwater.common.terms import Terms


class DeviceFeature:
    """The moments of a round on a device; a feature overrides those that it needs."""

    is_required = False
    """Whether the device refuses plans that ask nothing of the feature, as one that protects it."""

    def __init__(self, terms: Terms) -> None:
        """Take the plan's terms, as the server's side wrote them; make a new object each round."""
        self.terms: Any = terms
        self.state: dict[str, Tensor] = {}
        """What the device keeps for the next round, of those that count: it begins empty. What is
        set here is forgotten again if the server does not count the round."""
        self.sums: dict[str, Tensor] = {}
        """The sums beside the model's that ``Terms.sums`` declares, to be set by ``end``."""

    def begin(self, work: DeviceWork) -> None:
        """Begin a round, with the model as the server sent it."""

    def direction(self, work: DeviceWork, mean_P: Tensor) -> None:
        """Change the mean gradient [P] of a local step in place, before the step is taken."""

    def end(self, work: DeviceWork) -> None:
        """End a round whose vector is made; set ``sums`` and ``state``."""


class DeviceWork:
    """A round on a device, as a feature of the user's sees it."""

    def __init__(self, work: Work) -> None:
        self._work = work

    @property
    def round(self) -> int:
        """The number of the round, from 1."""
        return self._work.plan.round

    @property
    def name(self) -> str:
        """The device's name."""
        return self._work.context.name

    @property
    def parameters_P(self) -> Tensor:  # noqa: N802 - a tensor's dimensions are in capitals
        """A copy of the model's parameters as they are now."""
        return self._work.context.image.values_P.clone()

    @property
    def vector_P(self) -> Tensor:  # noqa: N802 - as above
        """What was made: a sum of gradients, or weight x (start - end) of local steps.

        Dataset weighting, compression and privacy change it before it is sent.
        """
        return self._work.values_P

    @property
    def total(self) -> WindowSum:
        """Counts, losses, weight and metrics of what was summed."""
        return self._work.total

    @property
    def num_steps(self) -> int:
        """The local steps that were taken; 1 for an exact sum."""
        return self._work.num_steps

    @property
    def learning_rate(self) -> float:
        """The local learning rate of the plan."""
        return (self._work.plan.of(LocalPlan) or PLAIN).learning_rate

    def losses(self, at_P: Tensor | None = None) -> Iterator[tuple[float, int]]:
        """Yield the loss sum and the weight of the window's micro-batches; no gradients.

        They are those of the model as it is, or of its parameters as ``at_P`` [P].
        """
        for positions in self._micro_batches():
            with self._parameters_as(at_P):
                loss, weight = self._forward(positions)
            yield float(loss.detach()), weight

    def gradients(self, at_P: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Yield the gradient [P] of each micro-batch's loss sum at the parameters ``at_P``, [P].

        With it comes the batch's weight. ``at_P`` is read again before each: whoever changes it in
        place takes steps. The model and what the round sums stay as they are.
        """
        shared = self._work.context.image.trainable()
        for positions in self._micro_batches():
            with self._parameters_as(at_P):
                loss, weight = self._forward(positions)
                parts = torch.autograd.grad(loss, shared, allow_unused=True, materialize_grads=True)
            yield torch.cat([part.reshape(-1) for part in parts]), weight

    def _micro_batches(self) -> Iterable[Positions]:
        return self._work.context.cut(self._work.window.positions, self._work.plan)

    def _forward(self, positions: Positions) -> tuple[Tensor, int]:
        plan, context, window = self._work.plan, self._work.context, self._work.window
        loss, weight, _ = forward(plan, window, positions, context)
        return loss, weight

    @contextmanager
    def _parameters_as(self, values_P: Tensor | None) -> Iterator[None]:
        """Give the model other parameters; those that it had come back, to the bit."""
        if values_P is None:
            yield
            return
        own_P = self._work.context.image.values_P
        before_P = own_P.clone()
        own_P.copy_(values_P)
        try:
            yield
        finally:
            own_P.copy_(before_P)

    def examples(self) -> Iterator[Any]:
        """Yield the window's examples, as the task's data set has them."""
        for position in self._work.window.positions:
            yield self._work.context.examples[position]
