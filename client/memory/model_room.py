"""Room for a task's model and its gradient: looked for while the task builds the model.

The kernel kills a process that exceeds its limit, and nothing can be caught. So each large tensor
that the task makes is compared with what is left before it is allocated. From the first that does
not fit on they are made on torch's ``meta`` device, which takes no memory: the error then names the
bytes of the whole model.

Limitation: tensors that are made without torch's factory functions, such as those that are read
from a file, are noticed only with the next large tensor, or when the model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwater.client.memory.peak_model import resident_bytes
from headwater.client.memory.process_limits import MemoryLimit
from headwater.common.errors import OutOfMemory
from headwater.common.model.layout import named_tensors
from headwater.common.system.heap import keep_mmap_threshold, release_freed_memory
from headwater.common.wording import bytes_text

# Functions that allocate a tensor of a size which their arguments give.
FACTORIES = frozenset(
    (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.randint)
)

OWN_WAY = {"device", "out", "layout"}
# Smaller tensors are counted, and compared with the limit together with the next large one.
LARGE_BYTES = 1 << 20
# The tensors of a model beyond this are mapped, one by one. From the heap they would leave it for
# the image and its holes stay mapped: 440 MB for 1.1 billion parameters, which a bound counts.
LARGE_MODEL_BYTES = 64 << 20


def built_within(limit: Callable[[], MemoryLimit], new_model: Callable[[], nn.Module]) -> nn.Module:
    """Return a new model, if the limit has room for it and for the gradient of what it trains.

    From ``LARGE_MODEL_BYTES`` on tensors are mapped one by one, until the caller, with the model in
    its place, calls ``restore_mmap_threshold``.

    Raises:
        OutOfMemory: it has not; not more was allocated than what fits.
    """
    release_freed_memory()
    before = resident_bytes()
    with TensorsWithin(limit) as made:
        try:
            model = new_model()
        except Exception:
            if made.exceeded is None:
                raise
            text = f"at least {bytes_text(made.num_bytes)}"
            raise _error(text, made.num_bytes, before, made.exceeded) from None
    num_bytes = sum(tensor.nbytes for _, tensor in named_tensors(model))
    gradient = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    exceeded = made.exceeded
    if exceeded is None and resident_bytes() + gradient > limit().num_bytes:
        exceeded = limit()
    if exceeded is not None:
        text = f"{bytes_text(num_bytes)}, and its gradient {bytes_text(gradient)} more,"
        raise _error(text, num_bytes + gradient, before, exceeded)
    return model


class TensorsWithin(TorchFunctionMode):
    """Notes the bytes of new tensors; those beyond the limit are made on the ``meta`` device."""

    def __init__(self, limit: Callable[[], MemoryLimit]) -> None:
        super().__init__()
        self.num_bytes = 0
        self.exceeded: MemoryLimit | None = None
        self._limit = limit
        self._unwritten_bytes = 0  # pages are resident from their first write on

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func in FACTORIES and not has_own_way(options):
            on_meta = func(*args, **{**options, "device": "meta"})
            is_kept = is_plain(on_meta) and self._exceeds(on_meta)
            return on_meta if is_kept else func(*args, **options)
        if func is Tensor.clone and args[0].device.type == "cpu" and is_plain(args[0]):
            on_meta = torch.empty_like(args[0], device="meta")
            return on_meta if self._exceeds(on_meta) else func(*args, **options)
        name = getattr(func, "__name__", "")
        written = args[0] if args else options.get("tensor")  # as torch.nn.init names it
        if name.endswith("_") and not name.endswith("__") and isinstance(written, Tensor):
            is_real = written.device.type == "cpu" and is_plain(written)
            num_bytes = written.nbytes if is_real else 0
            self._unwritten_bytes = max(self._unwritten_bytes - num_bytes, 0)
        return func(*args, **options)

    def _exceeds(self, tensor: Tensor) -> bool:
        """Return whether this tensor, or one before it, has no room."""
        self.num_bytes += tensor.nbytes
        self._unwritten_bytes += tensor.nbytes
        if self.num_bytes >= LARGE_MODEL_BYTES:
            keep_mmap_threshold()
        if self.exceeded is None and tensor.nbytes >= LARGE_BYTES:
            limit = self._limit()
            if resident_bytes() + self._unwritten_bytes > limit.num_bytes:
                self.exceeded = limit
        return self.exceeded is not None


def has_own_way(options: Mapping[str, Any]) -> bool:
    """Return whether a factory function's arguments say where or how its tensor lies."""
    return any(options.get(name) is not None for name in OWN_WAY)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has one block of memory: it is not sparse, nested, or of a tracer."""
    is_of_tracer = type(tensor) not in (Tensor, nn.Parameter, nn.Buffer)
    return not is_of_tracer and tensor.layout is torch.strided and not tensor.is_nested


def _error(text: str, num_bytes: int, before: int, limit: MemoryLimit) -> OutOfMemory:
    missing = max(before + num_bytes - limit.num_bytes, 0)
    return OutOfMemory(
        f"the model takes {text} beside {bytes_text(before)} that the process holds, and the limit "
        f"is {bytes_text(limit.num_bytes)} ({limit.origin}): {bytes_text(missing)} are missing"
    )
