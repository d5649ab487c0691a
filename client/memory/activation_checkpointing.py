"""Activation checkpointing for any model: a block's activations are recomputed instead of kept.

Chen et al. 2016, "Training deep nets with sublinear memory cost". Between the forward and the
backward pass only the inputs of each block are kept; when the backward pass reaches a block, its
forward pass runs again (``headwater.client.memory.recompute``). The gradient is the same to the
bit. A step of a transformer took 2.3 times the CPU time for 0.44 of the peak memory.

Less can be asked of a block: ``Recomputed.CHEAP`` drops what cheap operations computed, and nothing
else (``headwater.client.memory.cheap_outputs``): a decoder's block of width 1,024 then keeps 20
instead of 34 MB of 512 tokens, for 1 % of the CPU time.

The task does not take part. The forward methods of the model's repeated blocks are replaced on the
instances. That leaves parameters and the state_dict as they are, survives a deep copy, and can be
undone.

Limitation: if a block's second forward pass differs for a reason other than torch's random numbers
(a generator of its own, Python's ``random``, an attribute that the model sets between two calls of
the block), this is detected only where shapes differ. A block within ``torch.func.grad`` or one of
its like, which allows no hooks, keeps its activations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from headwater.client.memory import cheap_outputs, recompute

# A Sequential of so few operations is one block; a longer one is split into groups.
FEW_OPERATIONS = 4

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Recomputed(IntEnum):
    """What is computed again of a block's activations."""

    NOTHING = 0
    CHEAP = 1
    """The outputs of cheap operations."""
    ALL = 2


Choice = Mapping[int, Recomputed]
"""What is computed again of each block, by its number; all of a block that is not in it."""


def switch_on(model: nn.Module, choice: Choice | None = None) -> bool:
    """Recompute the activations of the model's blocks from now on; a second call changes nothing.

    Blocks are numbered from 0, in the model's order; the choice replaces one that was made before.
    Returns whether the model has a block. A model of a single operation has none.
    """
    blocks = _checkpointable(model)
    for number, block in enumerate(blocks):
        extent = (choice or {}).get(number, Recomputed.ALL)
        checkpointed = _checkpointed(block)
        if extent is Recomputed.NOTHING:
            _restore(block)
        elif checkpointed is None:
            block.forward = _CheckpointedForward(block, number, extent)
        else:
            checkpointed.extent = extent
    return bool(blocks)


def choice_of(model: nn.Module) -> Choice:
    """Return what is computed again of each block."""
    found = enumerate(map(_checkpointed, _checkpointable(model)))
    return {number: one.extent if one else Recomputed.NOTHING for number, one in found}


def switch_off(model: nn.Module) -> None:
    """Keep the activations again."""
    for module in model.modules():
        _restore(module)


def _restore(module: nn.Module) -> None:
    checkpointed = _checkpointed(module)
    if checkpointed is not None:
        del module.forward
        if checkpointed.replaced is not None:
            module.forward = checkpointed.replaced


def is_on(model: nn.Module) -> bool:
    """Return whether any activations of the model are recomputed."""
    return is_on_in(model.modules())


def is_all_recomputed(model: nn.Module) -> bool:
    """Return whether all activations of all blocks are recomputed: no more memory can be saved."""
    extents = choice_of(model).values()
    return bool(extents) and min(extents) is Recomputed.ALL


def is_on_in(modules: Iterable[nn.Module]) -> bool:
    """Return ``is_on`` of a model whose modules are known."""
    # A list, as a generator takes twice as long.
    found = [isinstance(vars(module).get("forward"), _CheckpointedForward) for module in modules]
    return any(found)


def _checkpointed(module: nn.Module) -> _CheckpointedForward | None:
    forward = vars(module).get("forward")
    return forward if isinstance(forward, _CheckpointedForward) else None


def _checkpointable(model: nn.Module) -> list[nn.Module]:
    return [b for b in _blocks_of(model) if not isinstance(b, torch.jit.ScriptModule)]


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated blocks, or its direct children if it has none."""
    if isinstance(model, CONTAINERS):
        return list(_repeated(model))
    blocks: list[nn.Module] = []
    for child in model.children():
        has_parameters = any(True for _ in child.parameters())
        blocks += list(_repeated(child)) or ([child] if has_parameters else [])
    return blocks


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the compound children of containers, and plain Sequentials of operations.

    The outermost container counts: its child is opened only if it is a container of blocks itself,
    or the only compound child.
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
    """Return whether a container of blocks, or a long one of operations, is anywhere in it."""
    return any(
        len(inner) > FEW_OPERATIONS or sum(map(_is_compound, inner.children())) > 1
        for inner in module.modules()
        if isinstance(inner, CONTAINERS)
    )


class _CheckpointedForward:
    """Replaces the forward method of a block whose activations are recomputed."""

    def __init__(self, block: nn.Module, number: int, extent: Recomputed) -> None:
        self._block, self._number, self.extent = block, number, extent
        self._is_refused = False
        self.replaced: Callable[..., Any] | None = vars(block).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_refused:
            return self._plain(*args, **kwargs)
        random = torch.default_generator.get_state()
        try:
            return self._recomputed(*args, **kwargs)
        except RuntimeError as error:
            if not recompute.refuses_hooks(error) or recompute.is_running():
                raise
        # The block calls torch.func or is called by it: it runs again, and keeps its activations.
        self._is_refused = True
        torch.default_generator.set_state(random)
        return self._plain(*args, **kwargs)

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.replaced or functools.partial(type(self._block).forward, self._block)
        return forward(*args, **kwargs)

    def _recomputed(self, *args: Any, **kwargs: Any) -> Any:
        block, plain = self._block, self.replaced
        if self.extent is Recomputed.CHEAP:
            forward = plain or functools.partial(type(block).forward, block)
            return cheap_outputs.run(forward, args, kwargs)
        is_plain = plain is None and type(block).forward is nn.Sequential.forward
        if isinstance(block, nn.Sequential) and is_plain and len(args) == 1:
            values = args[0]
            for group in _groups(list(block)):  # children() has an operation used twice once
                in_sequence = functools.partial(_in_sequence, group)
                values = recompute.run(in_sequence, (values,), {}, block=self._number)
            return values
        forward = plain or functools.partial(type(block).forward, block)
        return recompute.run(forward, args, kwargs, block=self._number)


def _groups(operations: list[nn.Module]) -> list[list[nn.Module]]:
    """Split a Sequential into about sqrt(n) groups of sqrt(n), none of which begins in place.

    One of few operations, or with compound ones, is not split.
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


def _in_sequence(operations: list[nn.Module], values: Any) -> Any:
    for operation in operations:
        values = operation(values)
    return values
