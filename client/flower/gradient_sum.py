"""Sums gradients in a user's own training loop, for example in a Flower app's ClientApp.

Create a ``GradientSum`` once the model holds the round's parameters, run ``loss.backward()`` for
each micro-batch with a *summed* loss, and send ``tensors()`` with the weight that the loss was
summed over. ``server.flower.sum_of_gradients`` adds the sums of all clients.
"""

from __future__ import annotations

from torch import Tensor, nn

from headwater.client.training.accumulator import Accumulator
from headwater.common.errors import TaskError
from headwater.common.model.parameters import ModelImage


class GradientSum:
    """The sum of the gradients of every backward pass since this object was created."""

    def __init__(self, model: nn.Module) -> None:
        """Move the model's parameters into one block of memory, and its gradients into one vector.

        Raises:
            BatchDependentLayer, UnsupportedModel: see ``ModelImage``.
        """
        self._image = ModelImage(model)
        self._accumulator = Accumulator(self._image)
        self._versions = self._parameter_versions()

    def tensors(self) -> dict[str, Tensor]:
        """Return each trainable parameter's summed gradient by its name, as views of the vector.

        The sum of a parameter that no backward pass has reached is zero.

        Raises:
            TaskError: the loop steps an optimizer, or zeroes the gradients.
        """
        if self._parameter_versions() != self._versions:
            raise TaskError(
                "the parameters changed while their gradients were summed",
                remedy="take optimizer.step() out of the loop: the server takes the step",
            )
        self._accumulator.check_views()
        slots, spans = self._image.layout.trainable, self._image.layout.spans
        return {
            slot.name: self._accumulator.values_P[start:end].view(slot.shape)
            for slot, (start, end) in zip(slots, spans, strict=True)
        }

    def _parameter_versions(self) -> list[int]:
        return [parameter._version for parameter in self._image.trainable()]
