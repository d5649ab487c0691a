"""Frozen weights of linear layers in four bits, which compute as the decoded float32 weight.

An ``Nf4Weight`` looks like the float32 weight [O, I] that it decodes to, and its memory is a vector
of codes (``common.frozen.nf4_codes``). A linear layer decodes it for its forward pass and again for
its backward pass, so at most one weight exists in float32 at a time.

Limitation: an operation other than those of a linear layer or a slice of rows decodes the whole
weight, and autograd keeps that until the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headwater.common.errors import UnsupportedModel
from headwater.common.frozen.nf4_codes import (
    STORED,
    decoded,
    encoded,
    num_decoded,
    num_words,
)
from headwater.common.model.bfloat16_weights import (
    RELEASED_BYTES,
    lent_room,
    may_be_lent,
    round_weights,
)
from headwater.common.model.layout import is_stand_in, stand_in
from headwater.common.model.vectors import all_finite
from headwater.common.system.heap import release_freed_memory

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def store(model: nn.Module) -> None:
    """Store the frozen weights of linear layers in four bits, and other frozen ones in bfloat16.

    A weight that is an embedding's as well counts as an embedding's: its rows are looked up.

    Raises:
        UnsupportedModel: no linear layer is frozen, or a weight of one is not in floating point,
            or not finite.
    """
    weights = _weights_of(model)
    if not weights:
        raise UnsupportedModel(
            "--frozen-dtype nf4 is set, and no linear layer of the model has a frozen weight",
            remedy="leave it out, or freeze linear layers with requires_grad_(False) in new_model; "
            "what trains is float32, and embeddings and convolutions go in bfloat16",
        )
    num_left = 0
    for name, weight in weights.items():
        _check(name, weight)
        num_left += weight.nbytes
        shape = tuple(weight.shape)
        weight.data = (
            stand_in((num_words(weight.numel()),), STORED)
            if is_stand_in(weight)
            else encoded(weight.data)
        )
        weight._is_param, weight._shape = True, shape  # type: ignore[attr-defined]
        weight.__class__ = Nf4Weight  # type: ignore[assignment]  # tied ones stay one
        if num_left >= RELEASED_BYTES:
            num_left = 0
            release_freed_memory()
    stored = {id(weight) for weight in weights.values()}
    round_weights(one for one in model.parameters() if id(one) not in stored)


def _check(name: str, weight: Tensor) -> None:
    if weight.dtype not in FLOATS:
        raise UnsupportedModel(
            f"--frozen-dtype nf4 is set, and the frozen weight {name} is "
            f"{str(weight.dtype).removeprefix('torch.')}",
            remedy="give the task weights in floating point, which no other library has quantized",
        )
    if not is_stand_in(weight) and not all_finite(weight.detach().float()):
        raise UnsupportedModel(
            f"--frozen-dtype nf4 is set, and the frozen weight {name} has a number that is not "
            "finite: its block has no scale",
            remedy="give the task finite weights",
        )


def _weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the frozen weights that only linear layers have, each under its first name."""
    owners: dict[int, list[bool]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(name == "weight" and _is_linear(module))
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and parameter.ndim == 2 and all(owners[id(parameter)])
    }


def _is_linear(module: nn.Module) -> bool:
    # GPT-2's linear layer is transformers' Conv1D, whose weight is [I, O].
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


class Nf4Weight(Tensor):
    """A frozen weight in four bits; every operation sees it as float32 of its shape."""

    stored_kind = "nf4"
    _shape: tuple[int, int]

    @property
    def stored_memory(self) -> Tensor:
        """The codes and scales, as a plain tensor of the same memory."""
        return _raw(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carry out an operation; see the module."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            own = args[0] if args and _is_stored(args[0]) else None
            if own is not None and func in OF_MEMORY:
                return func(*args, **kwargs)
            if own is not None and func in OF_SHAPE:
                return func(
                    torch.empty(own._shape, dtype=torch.float32, device="meta"), *args[1:], **kwargs
                )
            if own is not None and func in NEW:
                return func(torch.empty(0, dtype=torch.float32), *args[1:], **kwargs)
            if own is not None and func in SAME:
                return _sharing(own)
            if own is not None and _writes(func):
                return _written(func, own, args)
            if own is not None and func is Tensor.__getitem__ and _are_rows(args[1]):
                return decoded(_raw(own), own._shape, args[1])
            product = _product(func, args, kwargs)
            if product is not None:
                return product
            args, kwargs = _plain(args), _plain(kwargs)
        return func(*args, **kwargs)  # a weight in bfloat16 may be among the arguments

    def __deepcopy__(self, memo: dict[int, Any]) -> Nf4Weight:
        """Return a copy that is stored in the same way."""
        with torch._C.DisableTorchFunctionSubclass():
            copied = _raw(self).clone().as_subclass(Nf4Weight)
        copied.__dict__.update(self.__dict__)
        memo[id(self)] = copied
        return copied


class _Product(torch.autograd.Function):
    """A linear layer [.., I] to [.., O] that keeps its weight in four bits for the backward pass.

    ``is_turned`` is whether the weight is [I, O].
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        values: Tensor,
        bias_O: Tensor | None,
        memory: Tensor,
        shape: tuple[int, int],
        is_turned: bool,
    ) -> Tensor:
        with _wide(memory, shape, values.dtype) as weight:
            if is_turned:
                return torch.addmm(bias_O, values, weight)  # type: ignore[arg-type]
            outputs = functional.linear(values, weight, bias_O)
        # Of more than two dimensions torch computes it as a view, which no operation after a
        # Function may change in place.
        found: Tensor = torch.ops.aten._unsafe_view(outputs, outputs.shape)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, _, memory, ctx.shape, ctx.is_turned = inputs
        ctx.save_for_backward(memory)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (memory,) = grads, ctx.saved_tensors
        has_values, has_bias = ctx.needs_input_grad[:2]
        of_values = of_bias = None
        if has_values:
            with _wide(memory, ctx.shape, grad.dtype) as weight:
                of_values = grad @ (weight.t() if ctx.is_turned else weight)
        if has_bias:
            of_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return of_values, of_bias, None, None, None


@contextmanager
def _wide(memory: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Tensor]:
    """Give a decoded weight in a dtype until the block ends."""
    if may_be_lent(memory, dtype):
        with lent_room(num_decoded(shape)) as room:
            yield decoded(memory, shape, room=room)
    else:
        yield decoded(memory, shape).to(dtype)


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


OF_SHAPE = {
    *_getters("shape", "dtype", "ndim", "itemsize", "layout"),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.stride),
    *(Tensor.is_floating_point, torch.is_floating_point, torch.numel, Tensor.__len__),
    *(Tensor.is_complex, torch.is_complex, Tensor.is_contiguous),
}
OF_MEMORY = {
    *_getters("nbytes", "device", "requires_grad", "grad", "grad_fn", "is_leaf", "_version"),
    *_getters("is_meta", "is_sparse", "is_quantized", "is_nested"),
    *(getattr(Tensor, name).__set__ for name in ("data", "requires_grad", "grad")),
    *(Tensor.data_ptr, Tensor.untyped_storage, Tensor.requires_grad_, Tensor.storage_offset),
}
NEW = {Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor}
# What returns the weight itself where nothing is to be changed.
SAME = {Tensor.detach, torch.detach, Tensor.contiguous, *_getters("data")}


def _product(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return a linear layer's product with a stored weight; None if it is another operation."""
    if func is functional.linear and len(args) >= 2:
        values, weight, bias = (*args, kwargs.get("bias"))[:3]
    elif func in (torch.addmm, Tensor.addmm) and len(args) == 3 and not kwargs:
        bias, values, weight = args
    else:
        return None
    if not _is_stored(weight) or _is_stored(values):
        return None
    if bias is not None and bias.dtype != values.dtype:
        bias = bias.to(values.dtype)  # one in bfloat16 widens, as its weight does
    is_turned = func is not functional.linear
    found: Tensor = _Product.apply(values, bias, _raw(weight), weight._shape, is_turned)  # type: ignore[no-untyped-call]
    return found


def _written(func: Callable[..., Any], own: Nf4Weight, args: tuple[Any, ...]) -> Nf4Weight:
    """Encode what is copied to a stored weight.

    Raises:
        UnsupportedModel: another operation changes a part of it.
    """
    if func is not Tensor.copy_:
        raise UnsupportedModel(
            f"{getattr(func, '__name__', func)} would change a frozen weight that is stored in nf4",
            remedy="leave frozen weights as they are, or leave --frozen-dtype nf4 out",
        )
    _raw(own).copy_(encoded(_plain(args[1]).expand(own._shape)))
    return own


def _writes(func: Callable[..., Any]) -> bool:
    """Return whether an operation writes to its first argument, such as ``copy_``."""
    name = getattr(func, "__name__", "")
    return name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))


def _are_rows(index: Any) -> bool:
    return isinstance(index, slice) and index.step in (None, 1)


def _raw(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor).detach()


def _is_stored(value: Any) -> bool:
    """Return whether a value is a weight in four bits; ``model.double()`` makes it another one."""
    return isinstance(value, Nf4Weight) and _raw(value).dtype is STORED


def _sharing(weight: Nf4Weight) -> Nf4Weight:
    found = _raw(weight).as_subclass(Nf4Weight)
    found._shape = weight._shape
    return found


def _plain(value: Any) -> Any:
    """Return a value with all stored weights in it decoded."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_plain(one) for one in value)
    if _is_stored(value):
        return decoded(_raw(value), value._shape)
    return _raw(value) if isinstance(value, Nf4Weight) else value
