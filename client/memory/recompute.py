"""A forward pass that holds its inputs alone, and is run again when the backward pass needs more.

Autograd hands every tensor that it saves to ``pack`` and asks ``unpack`` for it in the backward
pass (torch.autograd.graph.saved_tensors_hooks). A block's are dropped when its forward pass ends,
and computed again at the first that is asked for, on the same inputs, with torch's random numbers
and autocast as they were; so all bits are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from headwater.common.errors import TaskError
from headwater.common.system.heap import give_back

# Behind a block that dropped so much, freed memory is given back. glibc's heap, grown before
# checkpointing was switched on, would else scatter the next blocks over what the last ones left:
# 8 layers of 128 in 512, 4 x 512 tokens, then peaked at 650 MB instead of 345, for 1 to 7 % more
# time; a process that never did without checkpointing peaks at 337.
GIVEN_BACK_BYTES = 1 << 20

See = Callable[[list[Tensor], list[Tensor], bool], None]
"""Takes a block's inputs, what autograd saved in it, and whether that is dropped."""


def run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a forward pass that can be run again; one inside of another is part of it."""
    global _current
    if _current is not None or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    _current = passed = Pass(forward, args, kwargs)
    try:
        with saved_tensors_hooks(passed.pack, passed.unpack):
            return forward(*args, **kwargs)
    finally:
        _current = None
        passed.end()


class _Enough(BaseException):
    """The last activation that is needed is there; no block may catch it."""


class Pass:
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
        if _see is not None:
            _see(self._inputs, self._kept or [], is_dropped)
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


_current: Pass | None = None
"""The pass that runs now, for the first time or again."""

_see: See | None = None


@contextlib.contextmanager
def shown_to(see: See) -> Iterator[None]:
    """Show each block to ``see`` when its forward pass ends."""
    global _see
    _see = see
    try:
        yield
    finally:
        _see = None


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
