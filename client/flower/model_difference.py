"""Sends what a user's own training loop did to the model: several optimizer steps in a Flower app.

Create a ``ModelDifference`` once the model holds the round's parameters, train as ever, call
``count(n)`` after each optimizer step, and return ``reply(message, metrics)``. It sends weight x
(parameters before - after), which ``SumOfGradients(model, local_training=True)`` adds in 64-bit
integers, divides once, and takes as a gradient: with SGD at a rate of 1 this is FedAvg (McMahan et
al. 2017, algorithm 1), and any optimizer of torch may take its place (FedAdam, DiLoCo).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from torch import nn

from headwater.client.flower.gradient_sum import check_received, whole_number
from headwater.common.errors import EmptyUpdate, NonFiniteUpdate
from headwater.common.flower.gradient_reply import reply_content
from headwater.common.model.parameters import ModelImage
from headwater.common.model.vectors import all_finite


class ModelDifference:
    """How far the trainable parameters have moved since this object was created."""

    def __init__(self, model: nn.Module) -> None:
        """Move the model's parameters into one block of memory, and copy them.

        Raises:
            BatchDependentLayer, UnsupportedModel: see ``ModelImage``.
        """
        self.weight = 0
        """The examples, or tokens, of all steps so far; an example counts in each epoch."""
        self._num_steps = 0
        self._image = ModelImage(model)
        self._start_P = self._image.values_P.clone()

    def count(self, n: int) -> None:
        """Count a step that was taken on ``n`` examples (or tokens).

        Raises:
            CountsDisagree: ``n`` is not a whole number from 1.
        """
        self.weight += whole_number(n, least=1)
        self._num_steps += 1

    def reply(self, message: Message, metrics: Mapping[str, float] | None = None) -> Message:
        """Return the reply to a Flower message: the difference, its weight, and the metrics.

        Raises:
            OtherParameters: training did not begin at the parameters in the message.
            EmptyUpdate: ``count`` was never called.
            NonFiniteUpdate: training diverged.
        """
        if not self.weight:
            raise EmptyUpdate(
                "difference.count(n) was never called: there is nothing to send",
                remedy="call it after each optimizer.step()",
            )
        spans = {
            slot.name: (span, slot.shape)
            for slot, span in zip(
                self._image.layout.trainable, self._image.layout.spans, strict=True
            )
        }

        def cut(values_P: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                name: values_P[start:end].view(shape)
                for name, ((start, end), shape) in spans.items()
            }

        check_received(cut(self._start_P), message)
        difference_P = (self._start_P - self._image.values_P).mul_(self.weight)
        if not all_finite(difference_P):
            raise NonFiniteUpdate(
                "the parameters are not finite after the local steps",
                remedy="lower the client's learning rate",
            )
        content = reply_content(
            ArrayRecord(cut(difference_P)),
            MetricRecord(dict(metrics or {})),
            layout=self._image.layout.digest,
            weight=self.weight,
            num_passes=self._num_steps,
            is_reduction_seen=True,
            is_difference=True,
        )
        return Message(content, reply_to=message)
