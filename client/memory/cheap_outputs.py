"""A forward pass that drops the outputs of cheap operations, and computes them again when needed.

Autograd keeps, for a transformer's linear layer, the output of the norm or of the activation
function before it; and for that operation its input. The output follows from that input in a
fraction of what the layer takes, so it is dropped, and computed again in the backward pass, from
what is kept anyway and to the same bits. No matrix product or attention is computed again, and
nothing that draws random numbers or has a state.

Nothing is assumed of the model: torch names each operation as it runs (``TorchFunctionMode``) and
each tensor that autograd saves (``saved_tensors_hooks``). An output is dropped only if each of its
inputs is a parameter, is saved, or is itself such an output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from headwater.client.memory.recompute import (
    Autocast,
    address_of,
    check_unchanged,
    is_running,
    tensors_in,
)
from headwater.common.errors import TaskError

# Of these a pass costs little beside a linear layer's, and gives the same bits each time.
CHEAP = frozenset(
    (
        *(functional.gelu, functional.silu, functional.relu, functional.leaky_relu),
        *(functional.elu, functional.mish, functional.hardswish, functional.softplus),
        *(functional.layer_norm, functional.group_norm, getattr(functional, "rms_norm", None)),
        *(torch.relu, torch.mul, torch.pow, torch.square),
        *(Tensor.relu, Tensor.mul, Tensor.__mul__, Tensor.__rmul__),
        *(Tensor.pow, Tensor.__pow__, Tensor.square),
        *(Tensor.clone, Tensor.contiguous, Tensor.reshape, Tensor.flatten),
        *(Tensor.to, Tensor.float, Tensor.type_as),
    )
) - {None}

# A smaller output is kept: the call that computes it again takes as much memory.
LEAST_BYTES = 4096


def run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a forward pass whose cheap outputs are dropped at its end."""
    if is_running() or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    passed = CheapPass()
    try:
        with saved_tensors_hooks(passed.pack, _Saved.unpack), CheapOperations(passed):
            return forward(*args, **kwargs)
    finally:
        passed.end()


class _Output:
    """An output of a cheap operation, and the call that computes it again."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        value: Tensor,
        outputs: Mapping[int, _Output],
    ) -> None:
        self._function, self._autocast = function, Autocast.now()
        self._args = [_input(value, outputs) for value in args]
        self._kwargs = {name: _input(value, outputs) for name, value in kwargs.items()}
        inputs = [*self._args, *self._kwargs.values()]
        self._before = [one.output for one in inputs if isinstance(one, _View)]
        self._versions = [(one, one._version) for one in inputs if isinstance(one, Tensor)]
        self._dtype, self._version = value.dtype, value._version
        self._value: Tensor | None = value
        self.is_unchanged = True
        self.num_users = self._num_served = 0

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor in the value's memory has its elements as they are."""
        return tensor.dtype == self._dtype and not (tensor.is_conj() or tensor.is_neg())

    def end(self) -> None:
        """Let go of the value, at the end of the pass."""
        is_same = self._value is not None and self._value._version == self._version
        self.is_unchanged = is_same and all(one.is_unchanged for one in self._before)
        self._value = None

    def served(self) -> Tensor:
        """Return the value to one of its users; it stays until the last of them has had it.

        Raises:
            TaskError: see ``computed``.
        """
        self._num_served += 1
        value = self.computed()
        self._value = value if self._num_served % self.num_users else None
        return value

    def computed(self) -> Tensor:
        """Return the value, computed again unless it is there.

        Raises:
            TaskError: an input was changed in place since the operation ran.
        """
        if self._value is not None:
            return self._value
        if any(tensor._version != version for tensor, version in self._versions):
            raise TaskError(
                "a layer's input is changed in place after the layer, and what the layer computed "
                "from it cannot be computed again",
                remedy="remove that from the model, or give the device more memory",
            )
        with torch.no_grad(), self._autocast.restored():
            args = map(_again, self._args)
            kwargs = {name: _again(value) for name, value in self._kwargs.items()}
            value: Tensor = self._function(*args, **kwargs)
        return value


class _View:
    """A tensor in the memory of an output."""

    def __init__(self, output: _Output, tensor: Tensor) -> None:
        self.output = output
        self._place = (tensor.size(), tensor.stride(), tensor.storage_offset())

    def of(self, value: Tensor) -> Tensor:
        """Return the tensor, given the output."""
        return value.as_strided(*self._place)


class _Saved:
    """A tensor that autograd saved, or its place in an output that was dropped."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self._version = tensor._version
        self._view: _View | None = None

    def drop(self, output: _Output) -> None:
        """Let go of the tensor, which has the output's memory."""
        assert self.tensor is not None
        self._view, self.tensor = _View(output, self.tensor), None
        output.num_users += 1

    def unpack(self) -> Tensor:
        """Return the tensor, computed again if it was dropped.

        Raises:
            TaskError: it was changed in place since autograd saved it, which torch refuses too.
        """
        if self.tensor is not None:
            check_unchanged(self.tensor, self._version)
            return self.tensor
        assert self._view is not None
        return self._view.of(self._view.output.served())


class CheapPass:
    """What one forward pass saved, and the outputs in it that can be computed again."""

    def __init__(self) -> None:
        self._saved: list[_Saved] = []
        self._kept: set[int] = set()
        # By address. The outputs hold their values until the end, so no address is used twice.
        self._outputs: dict[int, _Output] = {}

    def pack(self, tensor: Tensor) -> _Saved:
        """Keep a tensor until the end of the pass."""
        saved = _Saved(tensor.detach())  # a node must not hold itself through its output
        self._saved.append(saved)
        address = address_of(tensor)
        if address is not None:
            self._kept.add(address)
        return saved

    def note(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        value: Tensor,
    ) -> None:
        """Note an output, unless an input of it is not kept, or has the same memory."""
        address, inputs = address_of(value), [*tensors_in((args, dict(kwargs)))]
        if address is None or value.is_conj() or value.is_neg() or value.nbytes < LEAST_BYTES:
            return
        if address not in map(address_of, inputs) and all(map(self._is_kept, inputs)):
            output = _Output(function, args, kwargs, value.detach(), outputs=self._outputs)
            self._outputs[address] = output

    def end(self) -> int:
        """Drop all that was saved of the noted outputs, let go of the others; return the bytes."""
        dropped: dict[int, int] = {}
        for output in self._outputs.values():
            output.end()
        for saved in self._saved:
            assert saved.tensor is not None
            address = address_of(saved.tensor)
            found = None if address is None else self._outputs.get(address)
            if address and found is not None and found.is_unchanged and found.has(saved.tensor):
                dropped[address] = saved.tensor.untyped_storage().nbytes()
                saved.drop(found)
        self._saved, self._outputs = [], {}
        return sum(dropped.values())

    def _is_kept(self, tensor: Tensor) -> bool:
        address = address_of(tensor)
        output = None if address is None else self._outputs.get(address)
        if output is not None:
            return output.has(tensor)
        return address in self._kept or isinstance(tensor, nn.Parameter)


class CheapOperations(TorchFunctionMode):
    """Notes the outputs of cheap operations as they run."""

    def __init__(self, passed: CheapPass) -> None:
        super().__init__()
        self._passed = passed

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        if func in CHEAP:
            self._passed.note(func, args, kwargs, value)
        return value


def _input(value: Any, outputs: Mapping[int, _Output]) -> Any:
    """Return an argument as it is kept: a tensor of a noted output as a view of that."""
    if not isinstance(value, Tensor):
        return value
    output = outputs.get(address_of(value) or 0)
    return value.detach() if output is None else _View(output, value)


def _again(value: Any) -> Any:
    return value.of(value.output.computed()) if isinstance(value, _View) else value
