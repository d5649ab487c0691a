"""Builds a model without the values of its frozen weights, which the server sends.

A model may have no room as its task builds it, and some as the run stores it: seven billion weights
take 14 GB in bfloat16, and 4 GB in four bits. It is then built once more. Large tensors that wait
for their values become stand-ins (``common.model.layout.stand_in``), which take no memory; what is
written to one is left out. What is made in another way, such as a table of positions, is as the
task makes it.

Limitations: weights that are read from a file are not noticed before they are in memory. A device
that is to be sent them needs a folder without them (``examples.causal_lm``). That a task reads a
value is noticed where the weight is an operation's first argument.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from headwater.client.memory.model_room import LARGE_BYTES, TensorsWithin, has_own_way, is_plain
from headwater.client.memory.peak_model import resident_bytes
from headwater.client.memory.process_limits import MemoryLimit
from headwater.common.errors import OutOfMemory
from headwater.common.model.layout import is_stand_in, memory_of, named_tensors, stand_in
from headwater.common.system.heap import release_freed_memory
from headwater.common.wording import bytes_text

log = logging.getLogger(__name__)

# Another dtype or a copy of a stand-in is one too.
CONVERSIONS = {
    *(Tensor.to, Tensor.type, Tensor.float, Tensor.bfloat16, Tensor.half, Tensor.double),
    *(Tensor.clone, Tensor.contiguous, Tensor.cpu, torch.clone),
}
STORE_NARROW = (
    "give the device more memory, or store the frozen weights in four bits: --frozen-dtype nf4 on "
    "the server and every device"
)
OF_FLAGS = {"requires_grad_", "detach_", "share_memory_"}
VALUES = {"item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__array__"}


def built_without_values(
    limit: Callable[[], MemoryLimit],
    new_model: Callable[[], nn.Module],
    store: Callable[[nn.Module], None],
    why: OutOfMemory,
) -> nn.Module:
    """Return a model with stand-ins for its frozen weights.

    Raises:
        OutOfMemory: ``why``, if there is no room for what is stored either, if no large weight is
            frozen, or if the task takes the values of one while it builds the model.
    """
    gc.collect()  # the model that has no room
    release_freed_memory()
    with _StandIns(limit) as made:
        try:
            model = new_model()
        except Exception:
            raise why from None
    named = {id(tensor) for _, tensor in named_tensors(model)}
    gc.collect()  # what is made on the way is in no model
    are_kept = all(id(one) in named for one in made.stand_ins)
    trained = [one for one in model.parameters() if one.requires_grad]
    gradient = sum(4 * one.numel() for one in trained)
    missing = sum(one.nbytes for one in trained if is_stand_in(one))
    if made.exceeded or made.are_read or not are_kept or not _has_room(limit, gradient + missing):
        raise why
    for one in trained:
        if is_stand_in(one):
            one.data = torch.zeros(one.shape, dtype=one.dtype)
    store(model)
    stored = [memory_of(tensor) for _, tensor in named_tensors(model)]
    sent = [one for one in stored if is_stand_in(one)]
    frozen = sum(one.nbytes for one in sent)
    if not frozen:
        raise why
    if not _has_room(limit, gradient + frozen):
        is_narrow = any(not one.is_floating_point() for one in sent)
        raise OutOfMemory(why.message, remedy=None if is_narrow else STORE_NARROW)
    log.warning(
        "%s. The server sends its frozen part, %s as the run stores it, so the task's own values "
        "of it are left out here",
        why.message,
        bytes_text(frozen),
    )
    return model


def _has_room(limit: Callable[[], MemoryLimit], num_bytes: int) -> bool:
    release_freed_memory()
    return resident_bytes() + num_bytes <= limit().num_bytes


class _StandIns(TensorsWithin):
    """Makes stand-ins of large tensors that wait for their values, and writes none into them."""

    def __init__(self, limit: Callable[[], MemoryLimit]) -> None:
        super().__init__(limit)
        self._stand_ins: list[ReferenceType[Tensor]] = []
        self.are_read = False
        """Whether something was computed from a value that was yet to come."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty and not has_own_way(options):
            on_meta = func(*args, **{**options, "device": "meta"})
            if is_plain(on_meta) and on_meta.nbytes >= LARGE_BYTES:
                return self._noted(stand_in(on_meta.shape, on_meta.dtype))
        own = args[0] if args else options.get("tensor")
        if not isinstance(own, Tensor) or not is_plain(own) or not is_stand_in(own):
            return super().__torch_function__(func, types, args, options)
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or (name[-1:] == "_" != name[-2:-1] and name not in OF_FLAGS):
            return own
        if func in CONVERSIONS:
            converted = func(own[(0,) * own.ndim], *args[1:], **options)
            return self._noted(stand_in(own.shape, converted.dtype))
        found = super().__torch_function__(func, types, args, options)
        is_computed = isinstance(found, Tensor) and found.numel() and not is_stand_in(found)
        self.are_read |= is_computed or name in VALUES
        return found

    @property
    def stand_ins(self) -> list[Tensor]:
        """Those that something still holds."""
        return [one for found in self._stand_ins if (one := found()) is not None]

    def _noted(self, tensor: Tensor) -> Tensor:
        self._stand_ins.append(ref(tensor))
        return tensor
