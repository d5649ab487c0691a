"""Each device's norms from the pass that adds all devices' gradients, layer by layer.

Where a model's parameters are those of linear layers, what goes into each layer and what comes back
tells the norms (``headwater.simulation.compute.modes.gradient_norms``), and nobody's vector is written down. Parameters elsewhere,
such as those of norms and embeddings, have a copy for each example; so they may only be few. What a
parameter does is seen as the model runs: a weight whose only use is one ``linear`` is a layer's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from headwater.simulation.compute.gradient_norms import Squares

# What parameters elsewhere may be of all: beyond that their copies would be the vectors again.
MOST_ELSEWHERE = 1 / 8
# What tells of a tensor without computing with it.
LOOKS = tuple(vars(torch._C.TensorBase)[name].__get__ for name in ("shape", "dtype", "device"))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layers:
    """The weights of linear layers by their ``id``, and all parameters that are elsewhere."""

    weights: frozenset[int]
    elsewhere: Mapping[str, nn.Parameter]

    @property
    def num_elsewhere(self) -> int:
        """How many numbers each example has a copy of."""
        return sum(parameter.numel() for parameter in self.elsewhere.values())


def layers_of(parameters: Mapping[str, nn.Parameter], run: Callable[[], object]) -> Layers | None:
    """See what each parameter does while the model runs; None: too many are elsewhere."""
    uses = _Uses(parameters)
    with uses:
        run()
    once = {key for key, count in uses.counts.items() if count == 1}
    weights = frozenset(once & {weight for weight, _ in uses.linears})
    biases = once & {bias for weight, bias in uses.linears if weight in weights}
    elsewhere = {name: one for name, one in parameters.items() if id(one) not in weights | biases}
    layers = Layers(weights=weights, elsewhere=elsewhere)
    total = sum(parameter.numel() for parameter in parameters.values())
    return layers if layers.num_elsewhere <= MOST_ELSEWHERE * total else None


class _Uses(TorchFunctionMode):
    """Counts the functions that each parameter is given to, and notes the layers ``linear``."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._known = {id(parameter) for parameter in parameters.values()}
        self.counts: Counter[int] = Counter()
        self.linears: list[tuple[int, int]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in LOOKS:
            self.counts.update(
                id(one) for one in tree_leaves((args, dict(kwargs))) if id(one) in self._known
            )
        if func is functional.linear:
            _, weight, bias = _of_linear(*args, **kwargs)
            self.linears.append((id(weight), id(bias)))
        return func(*args, **kwargs)


class Told:
    """What the layers tell of the examples that run under ``vmap`` while ``listening``."""

    def __init__(self, layers: Layers, squares: Squares) -> None:
        self._layers = layers
        self._squares = squares
        self._told: Counter[int] = Counter()

    def listening(self) -> TorchFunctionMode:
        """Let the layers tell, when the gradients come back to what runs meanwhile."""
        return _Listening(self._layers, self)

    def tell(
        self, weight: Tensor, inputs: Tensor, outputs: Tensor, *, has_bias: bool
    ) -> Tensor | None:
        """Take what went into a layer and what came back to it, of N examples.

        Returns the weight's gradient, if it was computed on the way.
        """
        self._told[id(weight)] += 1
        return self._squares.add_linear(
            inputs.reshape(len(inputs), -1, inputs.shape[-1]),
            outputs.reshape(len(outputs), -1, outputs.shape[-1]),
            has_bias=has_bias,
        )

    @property
    def is_complete(self) -> bool:
        """Whether each layer has told once."""
        return self._told == Counter(self._layers.weights)


class _Listening(TorchFunctionMode):
    def __init__(self, layers: Layers, told: Told) -> None:
        super().__init__()
        self._weights = layers.weights
        self._told = told

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not functional.linear:
            return func(*args, **kwargs)
        inputs, weight, bias = _of_linear(*args, **kwargs)
        if id(weight) not in self._weights:
            return func(*args, **kwargs)
        # A bias that is each example's own copy is told of elsewhere.
        if bias is None or isinstance(bias, nn.Parameter):
            return _linear(inputs, weight, bias, self._told)
        return _linear(inputs, weight, None, self._told) + bias


class _Linear(torch.autograd.Function):
    """``linear``, which tells what goes in and what comes back of all examples at once.

    Under vmap the batch is handed to the same operator as a whole. Calling it takes 0.3 ms, which
    is why only who asks for norms goes through it.
    """

    @staticmethod
    def forward(
        inputs: Tensor, weight: Tensor, bias: Tensor | None, told: Told, is_batched: bool
    ) -> Tensor:
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        entering, weight, _, ctx.told, ctx.is_batched = inputs
        ctx.save_for_backward(entering, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (outputs,) = gradients
        inputs, weight = ctx.saved_tensors
        is_asked, _, has_bias, *_ = ctx.needs_input_grad
        gradient = None
        if ctx.is_batched:  # else it is no example's, and is found to be missing
            gradient = ctx.told.tell(weight, inputs, outputs, has_bias=has_bias)
        rows = outputs.reshape(-1, outputs.shape[-1])
        if gradient is None:
            gradient = rows.t() @ inputs.reshape(-1, inputs.shape[-1])
        return (
            outputs @ weight if is_asked else None,
            gradient,
            rows.sum(0) if has_bias else None,
            None,
            None,
        )

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        told: Told,
        is_batched: bool,
    ) -> tuple[Tensor, int]:
        at = in_dims[0]
        assert at is not None  # the weight and the bias are all examples'
        return _linear(inputs.movedim(at, 0), weight, bias, told, is_batched=True), 0


def _linear(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, told: Told, *, is_batched: bool = False
) -> Tensor:
    found: Tensor = _Linear.apply(inputs, weight, bias, told, is_batched)  # type: ignore[no-untyped-call]
    return found


def _of_linear(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return input, weight and bias, however they are given."""
    found = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    return found["input"], found["weight"], found.get("bias")
