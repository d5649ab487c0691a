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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from client.growth import WORKING_FACTOR
from client.memory import give_back
from common.errors import TaskError

# A Sequential of so few operations is one block among others; a longer one is cut into groups.
FEW_OPERATIONS = 4
# Behind a block that dropped so much, freed memory is given back. glibc's heap, grown before
# checkpointing was switched on, would else scatter the next blocks over what the last ones left:
# 8 layers of 128 in 512, 4 x 512 tokens, then peaked at 650 MB instead of 345, for 1 to 7 % more
# time; a process that never did without checkpointing peaks at 337.
GIVEN_BACK_BYTES = 1 << 20

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
    return any(_twice(module) is not None for module in model.modules())


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
                values = _run(functools.partial(_in_turn, group), (values,), {})
            return values
        forward = plain or functools.partial(type(block).forward, block)
        return _run(forward, args, kwargs)


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


def _run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a forward pass that can be run again; one inside of another is part of it."""
    global _current
    if _current is not None or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    _current = passed = _Pass(forward, args, kwargs)
    try:
        with saved_tensors_hooks(passed.pack, passed.unpack):
            return forward(*args, **kwargs)
    finally:
        _current = None
        passed.end()


class _Enough(BaseException):
    """The last activation that is needed is there; no block may catch it."""


class _Pass:
    """One forward pass of a block, and its activations once they were computed again."""

    def __init__(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._forward, self._args, self._kwargs = forward, args, kwargs
        self._inputs = list(_tensors_in((args, kwargs)))
        self._versions = [tensor._version for tensor in self._inputs]
        self._random = torch.default_generator.get_state()
        self._autocast = (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )
        self._kept: list[Tensor] | None = []
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._again: dict[int, Tensor] = {}
        self._num_bytes = 0

    def pack(self, tensor: Tensor) -> int:
        """Keep an activation to the end of the block, and a number in its place."""
        assert self._kept is not None
        self._kept.append(tensor.detach())  # a node must not hold itself through its output
        self._shapes.append((tensor.shape, tensor.dtype))
        return len(self._shapes) - 1

    def end(self) -> None:
        """Drop the activations, unless the block changed its inputs and cannot be run again."""
        is_dropped = self._are_inputs_unchanged()
        if _footprint is not None:
            _footprint.see(self._inputs, self._kept or [], is_dropped=is_dropped)
        if is_dropped:
            self._num_bytes = sum(t.nbytes for t in self._kept or [])
            self._kept = None
            self._give_back()

    def _give_back(self) -> None:
        if self._num_bytes >= GIVEN_BACK_BYTES:
            give_back()

    def unpack(self, number: int) -> Tensor:
        """Return an activation, computed again if it is not there (any more)."""
        if self._kept is not None:
            return self._kept[number]
        if number not in self._again:
            self._run_again()
        return self._again.pop(number)

    def _are_inputs_unchanged(self) -> bool:
        return [tensor._version for tensor in self._inputs] == self._versions

    def _run_again(self) -> None:
        """Run the forward pass as it was run, up to its last activation.

        Raises:
            TaskError: it is not the same any more.
        """
        global _current
        if not self._are_inputs_unchanged():
            raise self._error("the input of a block is changed in place behind the block")
        self._give_back()  # of the block behind this one, which is done
        enabled, dtype, caches = self._autocast
        random, outer = torch.default_generator.get_state(), _current
        self._again = {}
        _current = self
        torch.default_generator.set_state(self._random)
        try:
            with (
                torch.enable_grad(),
                torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=caches),
                saved_tensors_hooks(self._pack_again, _never),
            ):
                self._forward(*self._args, **self._kwargs)
        except _Enough:
            pass
        finally:
            _current = outer
            torch.default_generator.set_state(random)
        if len(self._again) < len(self._shapes):
            raise self._error("the forward pass of a block is another the second time")

    def _pack_again(self, tensor: Tensor) -> None:
        number = len(self._again)
        if (tensor.shape, tensor.dtype) != self._shapes[number]:
            raise self._error("the forward pass of a block has other shapes the second time")
        self._again[number] = tensor.detach()
        if len(self._again) == len(self._shapes):
            raise _Enough

    @staticmethod
    def _error(what: str) -> TaskError:
        return TaskError(
            f"{what}, and its activations cannot be computed again",
            remedy="leave that out of the model, or give the device more memory: activation "
            "checkpointing is on because not even one example fits without it",
        )


_current: _Pass | None = None
"""The pass that runs now, for the first time or again."""


def _never(_: None) -> Tensor:
    raise AssertionError("the graph of a second forward pass has no backward pass")


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)


class _Footprint:
    """The bytes that a forward pass holds: each storage once, the model's own not at all."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
        self._own |= {tensor.untyped_storage().data_ptr() for tensor in model.buffers()}
        self._held: dict[int, int] = {}
        self._largest_block = 0

    def see(self, inputs: list[Tensor], inner: list[Tensor], *, is_dropped: bool) -> None:
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


_footprint: _Footprint | None = None


def footprint_bytes(model: nn.Module, forward: Callable[[], object]) -> float | None:
    """Return the bytes that a forward and backward pass takes with checkpointing, by prediction.

    ``forward`` is run once, with checkpointing on, which takes less than a plain forward pass; on
    or off it is left as it was. What is held between the passes counts once, the largest block
    ``WORKING_FACTOR`` times. None if the model has no blocks.
    """
    global _footprint
    was_on = is_on(model)
    if not switch_on(model):
        return None
    _footprint = seen = _Footprint(model)
    try:
        with saved_tensors_hooks(seen.hold, lambda tensor: tensor):
            forward()
    finally:
        _footprint = None
        if not was_on:
            switch_off(model)
    return seen.num_bytes
