"""Activation checkpointing for any model: a block's activations are computed twice, not kept.

Chen et al. 2016, "Training deep nets with sublinear memory cost". Between the forward and the
backward pass only the inputs of each block are held; when the backward pass comes to a block, its
forward pass is run again. The gradient is the same to the bit: the same operations on the same
inputs, with torch's random numbers and autocast as they were. It costs about a third of the time.

The task has no part in it. The forward of the model's repeated blocks is replaced on the instances,
which leaves parameters and the state_dict as they are, survives a deep copy, and can be undone.

``torch.utils.checkpoint`` does the same on the same hooks, and imports torch._dynamo at its first
call: 83 MB (and 6 s) with torch 2.13, on a device that has no memory left.

What it cannot do: a block whose forward pass differs the second time for other reasons than torch's
own random numbers (a generator of its own, Python's ``random``) is found out where it leads to
other shapes, and nowhere else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from headwater.client.memory.peak_model import WORKING_FACTOR
from headwater.client.memory.recompute import run, shown_to

# A Sequential of so few operations is one block among others; a longer one is cut into groups.
FEW_OPERATIONS = 4

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def switch_on(model: nn.Module) -> bool:
    """Compute the activations of the model's blocks twice from now on; again changes nothing.

    Returns whether there is a block. A model that is a single operation has none.
    """
    blocks = [b for b in _blocks_of(model) if not isinstance(b, torch.jit.ScriptModule)]
    for block in blocks:
        if _twice(block) is None:
            block.forward = _Twice(block)
    return bool(blocks)


def switch_off(model: nn.Module) -> None:
    """Keep the activations again; where they are kept already, nothing changes."""
    for module in model.modules():
        twice = _twice(module)
        if twice is not None:
            del module.forward
            if twice.replaced is not None:
                module.forward = twice.replaced


def is_on(model: nn.Module) -> bool:
    """Tell whether any activations of the model are computed twice."""
    return is_on_in(model.modules())


def is_on_in(modules: Iterable[nn.Module]) -> bool:
    """Tell it of a model whose modules are at hand."""
    return any([isinstance(vars(module).get("forward"), _Twice) for module in modules])  # noqa: C419 - a generator takes twice as long


def _twice(module: nn.Module) -> _Twice | None:
    found = vars(module).get("forward")
    return found if isinstance(found, _Twice) else None


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return what is computed twice: the repeated blocks, or the direct children without any."""
    if isinstance(model, CONTAINERS):
        return list(_repeated(model))
    found: list[nn.Module] = []
    for child in model.children():
        has_parameters = any(True for _ in child.parameters())
        found += list(_repeated(child)) or ([child] if has_parameters else [])
    return found


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the compound children of containers, and plain Sequentials of operations.

    The outermost container counts: a child of it is opened only if it is a container of blocks
    itself, or the only compound child there is.
    """
    children = list(module.children())
    compound = [child for child in children if _is_compound(child)]
    if not isinstance(module, CONTAINERS):
        for child in compound:
            yield from _repeated(child)
    elif compound:
        for child in compound:
            may_open = isinstance(child, CONTAINERS) or len(compound) == 1
            yield from _repeated(child) if may_open and _holds_blocks(child) else (child,)
    elif isinstance(module, nn.Sequential) and children:
        yield module
    else:
        yield from children


def _is_compound(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _holds_blocks(module: nn.Module) -> bool:
    """Tell whether there is a container of blocks, or a long one of operations, anywhere in it."""
    return any(
        len(inner) > FEW_OPERATIONS or sum(map(_is_compound, inner.children())) > 1
        for inner in module.modules()
        if isinstance(inner, CONTAINERS)
    )


class _Twice:
    """The forward of a block, whose activations are dropped and computed again."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self.replaced: Callable[..., Any] | None = vars(block).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block, plain = self._block, self.replaced
        if plain is None and type(block).forward is nn.Sequential.forward and len(args) == 1:
            values = args[0]
            for group in _groups(list(block.children())):
                values = run(functools.partial(_in_turn, group), (values,), {})
            return values
        forward = plain or functools.partial(type(block).forward, block)
        return run(forward, args, kwargs)


def _groups(operations: list[nn.Module]) -> list[list[nn.Module]]:
    """Cut a Sequential into about sqrt(n) groups of sqrt(n), none of which begins in place.

    One of few operations, or of compound ones, is not cut.
    """
    if len(operations) <= FEW_OPERATIONS or any(map(_is_compound, operations)):
        return [operations]
    size = math.ceil(math.sqrt(len(operations)))
    groups: list[list[nn.Module]] = [[]]
    for operation in operations:
        if len(groups[-1]) >= size and not getattr(operation, "inplace", False):
            groups.append([])
        groups[-1].append(operation)
    return groups


def _in_turn(operations: list[nn.Module], values: Any) -> Any:
    for operation in operations:
        values = operation(values)
    return values


class _Footprint:
    """The bytes that a forward pass holds: each storage once, the model's own not at all."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
        self._own |= {tensor.untyped_storage().data_ptr() for tensor in model.buffers()}
        self._held: dict[int, int] = {}
        self._largest_block = 0

    def see(self, inputs: list[Tensor], inner: list[Tensor], is_dropped: bool) -> None:
        """Take note of a block: of its inputs, which are held, and of its inner activations."""
        self._held |= self._bytes_of(inputs if is_dropped else [*inputs, *inner])
        block = self._bytes_of(inner)
        self._largest_block = max(
            self._largest_block, sum(n for at, n in block.items() if at not in self._held)
        )

    def hold(self, tensor: Tensor) -> Tensor:
        """Take note of what is held outside of blocks."""
        self._held |= self._bytes_of([tensor])
        return tensor.detach()

    def _bytes_of(self, tensors: list[Tensor]) -> dict[int, int]:
        storages = [tensor.untyped_storage() for tensor in tensors]
        return {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in self._own}

    @property
    def num_bytes(self) -> float:
        return sum(self._held.values()) + WORKING_FACTOR * self._largest_block


def footprint_bytes(model: nn.Module, forward: Callable[[], object]) -> float | None:
    """Return the bytes that a forward and backward pass takes with checkpointing, by prediction.

    ``forward`` is run once, with checkpointing on, which takes less than a plain forward pass; on
    or off it is left as it was. What is held between the passes counts once, the largest block
    ``WORKING_FACTOR`` times. None if the model has no blocks.
    """
    was_on = is_on(model)
    if not switch_on(model):
        return None
    seen = _Footprint(model)
    try:
        with shown_to(seen.see), saved_tensors_hooks(seen.hold, lambda tensor: tensor):
            forward()
    finally:
        if not was_on:
            switch_off(model)
    return seen.num_bytes
