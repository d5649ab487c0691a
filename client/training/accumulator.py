"""The accumulator: one contiguous float32 vector whose slices are the parameters' gradients.

Autograd adds into an existing ``param.grad`` in place. Summing K micro-batches therefore needs no
copy, no optimizer and no division: after the last backward pass the vector is the update.

Each slice has a version counter of its own, which torch raises with every addition. The counter
distinguishes a parameter that no loss used, whose gradient is None in a plain loop, from one whose
gradient is zero, at no cost in a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor

from headwater.common.errors import TaskError
from headwater.common.model.parameters import ModelImage
from headwater.common.model.vectors import CHUNK, all_finite, saturate, squared_norm

VERSION = attrgetter("_version")


class Accumulator:
    """Holds the sums of the gradients since the last ``zero``.

    ``values_P`` is that of the shared parameters, ``local_L`` that of those which stay on the
    device. ``memory`` is one vector of both.
    """

    def __init__(self, image: ModelImage, memory: Tensor | None = None) -> None:
        """Sum in a new vector, or in this ``memory`` [P + L], which is unchanged until ``zero``."""
        num_shared = image.layout.num_parameters
        num_values = num_shared + image.layout.num_local
        self.memory = torch.zeros(num_values) if memory is None else memory
        self.values_P, self.local_L = self.memory[:num_shared], self.memory[num_shared:]
        self._has_local = image.layout.num_local > 0
        self._chunks = torch.split(self.values_P, CHUNK)
        shared = image.trainable()
        self._parameters, self._num_tensors = [*shared, *image.local()], len(shared)
        self._apart: Tensor | None = None
        self._use(self.memory)
        self._move_out: Callable[[], None] | None = None
        if memory is None:
            self.zero()

    def lend(self, move_out: Callable[[], None]) -> None:
        """Leave the vector's memory to an update until ``reclaim``, which calls ``move_out``."""
        self._move_out = move_out

    def reclaim(self) -> None:
        """Take the vector's memory back: the update that uses it copies its values first."""
        if self._move_out is not None:
            self._move_out()
            self._move_out = None

    def zero(self) -> None:
        """Set the vector to zero and make its slices the parameters' gradients."""
        self.memory.zero_()
        self._note_versions()
        self._set_gradients()

    def _use(self, memory: Tensor) -> None:
        """Make the slices of a vector the parameters' gradients."""
        sizes = [parameter.numel() for parameter in self._parameters]
        parts = torch.split(memory, sizes)
        self._views = [
            part.view(parameter.shape).data  # a view would share the vector's version counter
            for parameter, part in zip(self._parameters, parts, strict=True)
        ]
        self._addresses = [view.data_ptr() for view in self._views]
        self._note_versions()
        self._set_gradients()

    def _note_versions(self) -> None:
        self._versions = [view._version for view in self._views]

    @property
    def num_changes(self) -> int:
        """The number of changes in place so far, of the vector and of each gradient."""
        return int(sum(map(VERSION, self._views), self.memory._version))

    def unused(self) -> tuple[int, ...]:
        """Return the shared parameters, by their place, that no pass has reached since ``zero``."""
        pairs = zip(self._views[: self._num_tensors], self._versions, strict=False)
        return tuple(at for at, (view, version) in enumerate(pairs) if view._version == version)

    def mark_used(self, unused: Collection[int]) -> None:
        """Count all shared parameters but these as reached: their sum was read from a file."""
        for at in range(self._num_tensors):
            if at not in unused:
                self._versions[at] = -1

    def mark_directed(self) -> None:
        """Count shared parameters as reached whose gradient is not zero: a feature made it so."""
        for at in self.unused():
            if self._views[at].any():
                self._versions[at] = -1

    def hide_unused(self, *, but: Collection[int] = ()) -> None:
        """Let the gradients of parameters that no pass has reached be None until ``zero``.

        Not those of the places ``but``. An optimizer then leaves them as they are, weight decay and
        momentum included.
        """
        for at in self.unused():
            if at not in but:
                self._parameters[at].grad = None

    def _set_gradients(self) -> None:
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    @contextmanager
    def apart(self) -> Iterator[Tensor]:
        """Collect gradients in another vector, of zeros at first, until the block ends.

        ``memory`` stays as it is. The vector is allocated at the first use, and stays.

        Raises:
            TaskError: see ``check_views``; at the end.
        """
        if self._apart is None:
            self._apart = torch.zeros_like(self.memory)
        own = self._views, self._addresses, self._versions
        try:
            self._use(self._apart)
            self._apart.zero_()
            yield self._apart
            self.check_views()
        finally:
            self._views, self._addresses, self._versions = own
            self._set_gradients()

    def add_apart(self, collected: Tensor, unused: Collection[int]) -> None:
        """Add a finite vector that was collected ``apart``; the sum is cut to float32's range.

        ``unused`` are the parameters that no pass reached meanwhile.
        """
        self.memory.add_(collected)
        saturate(self.memory)
        self.mark_used(unused)

    def gradient_norm(self) -> float:
        """Return the Euclidean norm of ``values_P``; it is finite if and only if ``memory`` is.

        Summed in chunks: one float32 sum over 4.9 million coordinates had an error of 4e-5. Squares
        of float32 overflow near 1.8e19, so an infinite sum of squares is computed again in float64,
        where every finite float32 has a finite square.
        """
        squared = math.fsum([torch.dot(chunk, chunk).item() for chunk in self._chunks])
        if not math.isfinite(squared):
            squared = squared_norm(self.values_P)
        is_finite = squared >= 0 and (not self._has_local or all_finite(self.local_L))
        return math.sqrt(squared) if is_finite else math.nan

    def check_views(self) -> None:
        """Check that every gradient is still a slice of the vector.

        Raises:
            TaskError: the task replaced a ``grad``, so the sum is lost.
        """
        for parameter, address in zip(self._parameters, self._addresses, strict=True):
            grad: Tensor | None = parameter.grad
            if grad is None or grad.data_ptr() != address:
                raise TaskError(
                    "loss_sum replaced the gradients of the model, and the sum so far is lost",
                    remedy="leave zero_grad, backward and optimizers out of loss_sum",
                )
