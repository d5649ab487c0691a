"""Passes over the examples of many devices at once, by ``torch.func``.

The loss of a task is a sum over examples (``common.data.additivity`` checks it), so what one example adds
to it can be asked of each apart: ``vmap`` runs ``loss_sum`` for batches of one example, all in the
same operators. Their sum's gradient is one backward pass; a device's own gradient is that of the
sum of its examples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwater.common.data.batches import UnsupportedBatch
from headwater.common.model.parameters import ModelImage
from headwater.common.task import Task
from headwater.simulation.compute.compiled import compiled, say
from headwater.simulation.compute.example_rows import Packed
from headwater.simulation.compute.gradient_norms import Squares
from headwater.simulation.compute.linear_hooks import Layers, Told, layers_of

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleSums:
    """What each of N examples adds to the loss, the weight and the metrics."""

    loss: Floats
    weight: Floats
    metrics: Mapping[str, Floats]


class ManyExamples:
    """A task's model at the examples of many devices."""

    def __init__(self, task: Task, image: ModelImage, packed: Packed) -> None:
        self._image = image
        self._packed = packed
        self._summing = _Summing(task, image.model)
        self._names = [
            name for name, parameter in self._summing.named_parameters() if parameter.requires_grad
        ]
        self._of_each = vmap(self._one)
        self._compiled: Callable[..., Any] | None = None

    def compile(self) -> None:
        """Let ``add`` be compiled from now on, if that can be; else it is said why not."""
        self._compiled = compiled(self._of_each)

    def add(self, tensors: Sequence[Tensor], factors: Tensor | None, precision: str) -> ExampleSums:
        """Add the gradient of the examples' summed loss to the parameters' own.

        ``factors`` [n] scale what each example adds to the gradient.

        Raises:
            UnsupportedBatch: the task or its model cannot be run so.
        """
        self._image.model.train()
        if self._compiled is not None:
            try:
                return self._add(self._compiled, tensors, factors, precision)
            except MemoryError:
                raise
            except Exception as error:  # the compiler's, or one that comes again below
                reason = error if isinstance(error, UnsupportedBatch) else _sentence(error)
                say(f"passes are not compiled: {reason}")
                self._compiled = None
        return self._add(self._of_each, tensors, factors, precision)

    def _add(
        self,
        of_each: Callable[..., Any],
        tensors: Sequence[Tensor],
        factors: Tensor | None,
        precision: str,
    ) -> ExampleSums:
        with _named(), _cast(precision):
            loss, weight, metrics = of_each(*tensors)
        total = loss.sum() if factors is None else (loss * factors).sum()
        total.backward()
        return _sums(loss, weight, metrics)

    def layers(self, tensors: Sequence[Tensor]) -> Layers | None:
        """See on a few examples whether the model's layers can tell each device's norms."""
        self._image.model.train()

        def run() -> None:
            with _cast("float32"), torch.no_grad():
                self._of_each(*tensors)

        parameters = dict(self._summing.named_parameters())
        with _named():
            return layers_of({name: parameters[name] for name in self._names}, run)

    def add_told(
        self,
        tensors: Sequence[Tensor],
        factors: Tensor | None,
        layers: Layers,
        squares: Squares,
    ) -> ExampleSums:
        """Do what ``add`` does, in float32, and add the squares of what is added to ``squares``.

        Raises:
            UnsupportedBatch: the task or its model cannot be run so, or runs otherwise than it did.
        """
        self._image.model.train()
        num_examples = len(tensors[0])
        copies = {
            name: parameter.detach().expand(num_examples, *parameter.shape).requires_grad_()
            for name, parameter in layers.elsewhere.items()
        }

        def one(copies: Mapping[str, Tensor], *example: Tensor) -> Any:
            return functional_call(self._summing, dict(copies), (self._alone(example),))

        told = Told(layers, squares)
        with _named(), _cast("float32"):
            with told.listening():
                loss, weight, metrics = vmap(one)(copies, *tensors)
            total = loss.sum() if factors is None else (loss * factors).sum()
            total.backward()
        if not told.is_complete:
            raise UnsupportedBatch("the model's layers do not tell of all examples")
        for name, copy in copies.items():
            if copy.grad is not None:
                gradients = layers.elsewhere[name].grad
                assert gradients is not None  # the accumulator's
                gradients += copy.grad.sum(0)
                squares.add_vectors(copy.grad.flatten(1))
        return _sums(loss, weight, metrics)

    def rows(
        self, tensors: Sequence[Tensor], mask_RM: Tensor, precision: str
    ) -> tuple[Tensor, ExampleSums]:
        """Return the gradient of each row of examples [R, P], and what each example adds.

        ``tensors`` are [R, M, ...]; what ``mask_RM`` has as 0 adds nothing.

        Raises:
            UnsupportedBatch: the task or its model cannot be run so.
        """
        self._image.model.train()
        parameters = dict(self._summing.named_parameters())
        trained = {name: parameters[name].detach() for name in self._names}

        def summed(trained: Mapping[str, Tensor], mask_M: Tensor, *tensors: Tensor) -> Any:
            def one(*example: Tensor) -> Any:
                return functional_call(self._summing, dict(trained), (self._alone(example),))

            loss, weight, metrics = vmap(one)(*tensors)
            return (loss * mask_M).sum(), (loss.detach(), weight, metrics)

        of_each = vmap(grad(summed, has_aux=True), in_dims=(None, 0, *(0 for _ in tensors)))
        with _named(), _cast(precision):
            gradients, (loss, weight, metrics) = of_each(trained, mask_RM, *tensors)
        num_rows = len(mask_RM)
        flat = [gradients[name].reshape(num_rows, -1) for name in self._names]
        return torch.cat(flat, dim=1), _sums(loss, weight, metrics)

    def weights(self, tensors: Sequence[Tensor], precision: str) -> Floats:
        """Return what each example weighs [n]."""
        with _named(), _cast(precision), torch.no_grad():
            _, weight, _ = self._of_each(*tensors)
        found: Floats = weight.numpy()
        return found

    def _one(self, *example: Tensor) -> Any:
        return self._summing(self._alone(example))

    def _alone(self, example: Sequence[Tensor]) -> Any:
        return self._packed.batch([tensor.unsqueeze(0) for tensor in example])


class _Summing(nn.Module):
    """``loss_sum`` as a module's forward pass, in tensors alone, so that torch.func can run it."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self._task = task
        self.model = model

    def forward(self, batch: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return loss, weight and metrics of a batch."""
        answer = self._task.loss_sum(self.model, batch)
        sums = answer[2] if len(answer) == 3 else {}
        weight = torch.as_tensor(answer[1], dtype=torch.float64)
        metrics = {
            str(name): torch.as_tensor(value).detach().to(torch.float64)
            for name, value in sums.items()
        }
        return answer[0], weight, metrics


@contextlib.contextmanager
def _named() -> Any:
    """Turn what torch.func cannot run into a reason; a failed allocation stays one."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedBatch(_sentence(error)) from error


def _sentence(error: Exception) -> str:
    sentence = str(error).partition(". ")[0].partition("\n")[0]
    return f"{type(error).__name__}: {sentence[:200]}"


@contextlib.contextmanager
def _cast(precision: str) -> Any:
    """Compute in the plan's precision, and attention by operators that torch.func has rules for.

    It runs the fused one of the CPU example by example, with a warning at each.
    """
    autocast = (
        torch.autocast("cpu", dtype=torch.bfloat16)
        if precision == "bfloat16"
        else contextlib.nullcontext()
    )
    with sdpa_kernel(SDPBackend.MATH), autocast:
        yield


def _sums(loss: Tensor, weight: Tensor, metrics: Mapping[str, Tensor]) -> ExampleSums:
    return ExampleSums(
        loss=loss.detach().double().numpy(),
        weight=weight.numpy(),
        metrics={name: value.numpy() for name, value in metrics.items()},
    )
