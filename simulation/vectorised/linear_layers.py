"""Finds a model's linear layers, and reads their inputs and output gradients during a pass.

From these follow the gradient of each layer, and each device's norms (``gradient_norms``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwater.simulation.vectorised.gradient_norms import SquaredNorms

# Parameters outside linear layers, as a share of all: above it their copies, one for each example,
# take as much memory as the devices' vectors would.
MAX_OTHER_SHARE = 1 / 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinearLayers:
    """A model's linear layers, the shapes [1, ..., O] of their outputs, and other parameters."""

    layers: Mapping[str, nn.Linear]
    output_shapes: Mapping[str, torch.Size]
    others: Mapping[str, nn.Parameter]

    @property
    def num_others(self) -> int:
        """The number of parameters outside linear layers; each example has a copy of them."""
        return sum(parameter.numel() for parameter in self.others.values())

    @property
    def detached(self) -> Mapping[str, Tensor]:
        """The layers' parameters by name, without gradients: ``add`` computes these."""
        return {
            f"{name}.{own}": parameter.detach()
            for name, layer in self.layers.items()
            for own, parameter in layer.named_parameters()
        }

    def add(self, name: str, inputs: Tensor, gradients: Tensor, norms: SquaredNorms) -> None:
        """Add a layer's gradient to its parameters, and its squared norms to ``norms``.

        Takes the layer's inputs of N examples, and the gradients of its outputs.
        """
        layer = self.layers[name]
        inputs_NTI = inputs.reshape(len(inputs), -1, inputs.shape[-1])
        gradients_NTO = gradients.reshape(len(gradients), -1, gradients.shape[-1])
        weight_OI = norms.add_linear(inputs_NTI, gradients_NTO, has_bias=layer.bias is not None)
        rows = gradients_NTO.flatten(0, 1)
        if weight_OI is None:
            weight_OI = rows.t() @ inputs_NTI.flatten(0, 1)
        add_to_gradient(layer.weight, weight_OI)
        if layer.bias is not None:
            add_to_gradient(layer.bias, rows.sum(0))

    @contextmanager
    def recording(self, probes: Mapping[str, Tensor], inputs: dict[str, Tensor]) -> Iterator[None]:
        """Record the layers' ``inputs`` and add ``probes`` to their outputs while the model runs.

        A probe is zero, and its gradient is that of the layer's output.

        Raises:
            RuntimeError: a layer did not run once, as it did in the self-test.
        """

        def record(name: str, given: Tensor, output: Tensor) -> Tensor:
            if name in inputs:
                raise RuntimeError(f"the layer {name} ran twice")
            inputs[name] = given
            return output + probes[name]

        with _hooked(self.layers, record):
            yield
        if inputs.keys() != self.layers.keys():
            raise RuntimeError("a layer of the model did not run")


def find_linear_layers(model: nn.Module, run: Callable[[], object]) -> LinearLayers | None:
    """Return the linear layers that run once in ``run``, a pass over one example.

    All parameters of a layer are trained, and no other module has one of them. None if too many
    parameters are outside of such layers.
    """
    shapes: dict[str, list[torch.Size]] = {}

    def record(name: str, given: Tensor, output: Tensor) -> Tensor:
        shapes.setdefault(name, []).append(output.shape)
        return output

    owners = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    candidates = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and isinstance(module.weight, nn.Parameter)  # no parametrization
        and all(one.requires_grad and owners[id(one)] == 1 for one in module.parameters())
    }
    with _hooked(candidates, record):
        run()
    layers = {name: candidates[name] for name, own in shapes.items() if len(own) == 1}
    inside = {id(one) for layer in layers.values() for one in layer.parameters()}
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    found = LinearLayers(
        layers=layers,
        output_shapes={name: shapes[name][0] for name in layers},
        others={name: one for name, one in trained.items() if id(one) not in inside},
    )
    total = sum(parameter.numel() for parameter in trained.values())
    return found if found.num_others <= MAX_OTHER_SHARE * total else None


@contextmanager
def _hooked(
    layers: Mapping[str, nn.Linear], hook: Callable[[str, Tensor, Tensor], Tensor]
) -> Iterator[None]:
    """Replace each layer's output by ``hook`` of its name, input and output."""
    with ExitStack() as stack:
        for name, layer in layers.items():
            handle = layer.register_forward_hook(
                lambda _, given, output, name=name: hook(name, given[0], output)
            )
            stack.callback(handle.remove)
        yield


def add_to_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to a parameter's gradient, which is a view of the accumulator."""
    assert parameter.grad is not None  # the accumulator's
    parameter.grad += gradient
