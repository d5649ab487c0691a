"""Frozen weights that are stored in bfloat16, in a model that computes in float32.

A model fails where a weight meets values of another dtype. So a frozen weight in bfloat16 is a
``Bfloat16Weight``: an operation that it has part in, together with values of a wider dtype, widens
it for its own time. The model then computes as its float32 self would with rounded weights, and
loss, gradients and their sums keep float32's rounding. Under bfloat16 autocast a product takes the
weight as it is. A product's backward pass widens the weight again instead of keeping what the
forward pass widened, so that at most one weight exists in float32 at a time.

Biases and norms, of one dimension, stay as they are: they are about a thousandth of a model.

Limitation: ``torch.cat`` of weights, ``weight.detach()`` and the like return plain bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from headwater.common.errors import UnsupportedModel
from headwater.common.model.layout import is_stand_in, stand_in
from headwater.common.system.heap import ROOMS, release_freed_memory
from headwater.common.user_code.named_objects import part_of

STORED = torch.bfloat16
WIDER = (torch.float32, torch.float64)
RELEASED_BYTES = 16 << 20  # the memory that weights leave is released after so many bytes
# 256 MiB: a larger weight, such as a language model's head, gets a room of its own each time.
MAX_KEPT_NUMBERS = 1 << 26


def store_in_bfloat16(model: nn.Module) -> None:
    """Store the frozen weights of a model in bfloat16, one after another, in their own place.

    A parameter of two or more dimensions in float32 or float64 is rounded. One that is in bfloat16
    already is used in the same way from now on.

    Raises:
        UnsupportedModel: the model has no frozen weight.
    """
    if not round_weights(model.parameters()):
        raise UnsupportedModel(
            "--frozen-dtype bfloat16 is set, and no weight of the model is frozen",
            remedy="leave it out, or freeze weights with requires_grad_(False) in new_model; what "
            "trains is float32",
        )


def round_weights(parameters: Iterable[Tensor]) -> bool:
    """Store those of some parameters that are frozen weights; return whether there are some."""
    found, num_left = False, 0
    for parameter in parameters:
        if parameter.requires_grad:
            continue
        if parameter.ndim >= 2 and parameter.dtype in WIDER:
            num_left += parameter.nbytes
            parameter.data = (
                stand_in(parameter.shape, STORED)
                if is_stand_in(parameter)
                else parameter.data.to(STORED)
            )
        if parameter.dtype is STORED:
            found = True
            parameter._is_param = True
            parameter.__class__ = Bfloat16Weight  # tied ones stay one
        if num_left >= RELEASED_BYTES:
            num_left = 0
            release_freed_memory()
    return found


def store_frozen(model: nn.Module, dtype: str) -> None:
    """Store the frozen weights of a model as ``--frozen-dtype`` says.

    Raises:
        UnsupportedModel: the model has no frozen weight that may be stored so.
    """
    if dtype == "bfloat16":
        store_in_bfloat16(model)
    else:
        part_of(f"headwater.common.frozen.{dtype}_weights:store")(model)


@contextmanager
def stored_frozen(model: nn.Module, dtype: str) -> Iterator[None]:
    """Store the frozen weights for a while; then they are plain ones again, rounded.

    Raises:
        UnsupportedModel: see ``store_frozen``.
    """
    dtypes = [(one, one.dtype) for one in model.parameters() if not one.requires_grad]
    store_frozen(model, dtype)
    try:
        yield
    finally:
        for parameter, before in dtypes:
            value = plain(parameter.to(before))
            parameter.__class__ = nn.Parameter
            parameter.data = value


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor as a plain one of the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor) if isinstance(tensor, Bfloat16Weight) else tensor


class Bfloat16Weight(Tensor):
    """A weight that operations with values of a wider dtype widen, or a view of one."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carry out an operation; see the module."""
        if any(hasattr(one, "stored_kind") for one in types):
            return NotImplemented  # that one decodes its weights, and then it is the turn of these
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in PRODUCTS and torch.is_autocast_enabled("cpu"):
                return func(*args, **kwargs)
            wide = None if _writes(func) else _widest((*args, *kwargs.values()))
            if wide is None:
                found = func(*args, **kwargs)
                return _viewed(func, found)
            product = _product(func, args, kwargs)
            if product is not None:
                return product
            return func(*_widened(args, wide), **_widened(kwargs, wide))

    def __deepcopy__(self, memo: dict[int, Any]) -> Bfloat16Weight:
        """Return a copy that is a stored weight as well."""
        copied = plain(self).detach().clone().as_subclass(Bfloat16Weight)
        copied.__dict__.update(self.__dict__)
        memo[id(self)] = copied
        return copied


@contextmanager
def lent_room(num_values: int) -> Iterator[Tensor]:
    """Lend float32 memory for one weight until the block ends; its values are arbitrary.

    It is lent to one product after another, and freed with ``release_freed_memory``. The kernel
    would clear the pages of a new block for each weight, which takes longer than to decode it: of
    8,640 x 3,200 numbers in four bits 75 ms in new memory, and 22 in memory that stays.
    """
    try:
        room = ROOMS.pop()
    except IndexError:  # the first time, or another thread has it
        room = torch.empty(num_values, dtype=torch.float32)
    if room.numel() < num_values:
        del room  # before a larger one is allocated
        room = torch.empty(num_values, dtype=torch.float32)
    try:
        yield room[:num_values]
    finally:
        if not ROOMS and room.numel() <= MAX_KEPT_NUMBERS:
            ROOMS.append(room)


def may_be_lent(stored: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a stored weight may be widened in a lent room.

    In float32, where it is computed now: within no transform of ``torch.func``, and not to be
    compiled, exported or only foreseen.
    """
    is_plain = type(stored) is Tensor and stored.device.type == "cpu"
    is_transformed = torch._C._are_functorch_transforms_active() or is_compiling()
    return is_plain and dtype is torch.float32 and not is_transformed


class _Product(torch.autograd.Function):
    """``values @ weight``, which keeps the weight as it is stored for its backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, weight_IO: Tensor) -> Tensor:
        with _wide(weight_IO, values.dtype) as wide_IO:
            return values @ wide_IO

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (weight_IO,) = ctx.saved_tensors
        with _wide(weight_IO, grads[0].dtype) as wide_IO:
            return grads[0] @ wide_IO.t(), None


@contextmanager
def _wide(weight_IO: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Give a weight in a wider dtype, with the strides that it has, until the block ends."""
    if not may_be_lent(weight_IO, dtype):
        yield weight_IO.to(dtype)
        return
    is_turned = not weight_IO.is_contiguous()
    stored = weight_IO.t() if is_turned else weight_IO
    with lent_room(stored.numel()) as room:
        wide = room.view(stored.shape).copy_(stored)
        yield wide.t() if is_turned else wide


LINEAR = functional.linear
MATRIX_PRODUCTS = {
    torch.matmul,
    torch.mm,
    Tensor.matmul,
    Tensor.mm,
    Tensor.__matmul__,
}
ADDED_PRODUCTS = {torch.addmm, Tensor.addmm}
PRODUCTS = {LINEAR, *MATRIX_PRODUCTS, *ADDED_PRODUCTS}
# Their results are widened where they are no views.
ROWS = {functional.embedding, Tensor.__getitem__, torch.index_select, Tensor.index_select}
VIEWS = {
    *(getattr(Tensor, name).__get__ for name in ("T", "mT")),
    *(getattr(torch, name) for name in ("t", "transpose", "permute", "reshape", "unsqueeze")),
    *(getattr(torch, name) for name in ("squeeze", "chunk", "split", "flatten", "narrow")),
    *(getattr(Tensor, name) for name in ("t", "transpose", "permute", "reshape", "unsqueeze")),
    *(getattr(Tensor, name) for name in ("squeeze", "chunk", "split", "flatten", "narrow")),
    *(getattr(Tensor, name) for name in ("view", "expand", "__getitem__")),
}


def _product(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return a product of values and a stored matrix; None if it is another operation."""
    if func is LINEAR:
        values, weight, bias = (*args, kwargs.get("bias"))[:3] if len(args) >= 2 else (None,) * 3
        weight = weight.t() if isinstance(weight, Tensor) else weight
    elif func in MATRIX_PRODUCTS and len(args) == 2:
        (values, weight), bias = args, None
    elif func in ADDED_PRODUCTS and len(args) == 3 and not kwargs:
        bias, values, weight = args
    else:
        return None
    if not isinstance(weight, Tensor) or weight.dtype is not STORED or weight.ndim != 2:
        return None
    if not isinstance(values, Tensor) or values.dtype not in WIDER:
        return None
    found: Tensor = _Product.apply(values, plain(weight))  # type: ignore[no-untyped-call]
    return found if bias is None else found + bias


def _writes(func: Callable[..., Any]) -> bool:
    """Return whether an operation writes to its first argument, such as ``copy_``."""
    name = getattr(func, "__name__", "")
    return name == "__set__" or (name.endswith("_") and not name.endswith("__"))


def _widest(values: Iterable[Any]) -> torch.dtype | None:
    """Return the widest dtype among tensors that are wider than the stored ones; None if none."""
    found: torch.dtype | None = None
    for value in values:
        if isinstance(value, (tuple, list)):
            dtype = _widest(value)
        else:
            dtype = value.dtype if isinstance(value, Tensor) else None
        if dtype in WIDER and (found is None or dtype is torch.float64):
            found = dtype
    return found


def _widened(values: Any, dtype: torch.dtype) -> Any:
    if isinstance(values, Mapping):
        return {key: _widened(value, dtype) for key, value in values.items()}
    if isinstance(values, (tuple, list)):
        return type(values)(_widened(value, dtype) for value in values)
    is_stored = isinstance(values, Bfloat16Weight) and values.dtype is STORED
    return values.to(dtype) if is_stored else values


def _viewed(func: Callable[..., Any], found: Any) -> Any:
    """Return the result of an operation without wider values: views stay stored weights."""
    if func not in VIEWS and func not in ROWS:
        return found
    if isinstance(found, (tuple, list)):
        return type(found)(_viewed(func, one) for one in found)
    if not isinstance(found, Tensor) or found.dtype is not STORED:
        return found
    if found._is_view():
        return found.as_subclass(Bfloat16Weight)
    return found.float() if func in ROWS else found
