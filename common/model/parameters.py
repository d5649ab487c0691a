"""Stores a model in one block of memory, whose first part is the flat parameter vector.

All trainable parameters form one contiguous float32 vector [P], in the order of
``named_parameters``. After them, each at a multiple of eight bytes, come the frozen parameters and
the buffers, which belong to the server. Together they are the *image* that the server sends. The
model's tensors are views into the image, so loading, stepping and sending need no further copy.

Parameters that stay on the device (``local_parameters``) are views into a vector of their own [L],
outside of the image. The layout's digest covers them, as both sides must leave out the same ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from headwater.common.errors import BatchDependentLayer, ModelMismatch, UnsupportedModel
from headwater.common.model.group_norm import (
    GroupNormArguments,
    replace_batch_norm_by_group_norm,
)
from headwater.common.model.local_parameters import local_names
from headwater.common.model.mismatch import LOCAL, Row, to_text
from headwater.common.task import Task
from headwater.common.user_code import running

ALIGNMENT_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The position of one tensor in the image."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int
    num_elements: int


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """The names, shapes and offsets of a model's tensors; must be equal on client and server."""

    trainable: tuple[Slot, ...]
    constant: tuple[Slot, ...]
    num_bytes: int
    local: tuple[Slot, ...] = ()
    """The trained parameters that stay on the device; their offsets are in its own vector [L]."""

    @cached_property
    def num_parameters(self) -> int:
        """P, the length of the parameter vector and of every update."""
        return sum(slot.num_elements for slot in self.trainable)

    @cached_property
    def num_local(self) -> int:
        """L, the number of parameters that stay on the device."""
        return sum(slot.num_elements for slot in self.local)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the layout, in hexadecimal."""
        rows: list[list[object]] = [
            [slot.name, list(slot.shape), slot.dtype, slot.offset_bytes]
            for slot in (*self.trainable, *self.constant)
        ]
        rows += [[LOCAL, slot.name, list(slot.shape), slot.offset_bytes] for slot in self.local]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    @cached_property
    def rows(self) -> list[Row]:
        """The name, shape and dtype of each tensor, in the order of the image, then the local."""
        rows = [(slot.name, slot.shape, slot.dtype) for slot in (*self.trainable, *self.constant)]
        return rows + [(slot.name, slot.shape, LOCAL + slot.dtype) for slot in self.local]

    @cached_property
    def text(self) -> str:
        """The rows as text, from which the other side can name the first tensor that differs."""
        return to_text(self.rows)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The half-open range of coordinates of each trainable tensor in [P]."""
        return _spans(self.trainable)

    def local_tensors(self, values_L: Tensor) -> dict[str, Tensor]:
        """Return the parameters that stay on the device by name, as views of their vector [L]."""
        spans = zip(self.local, _spans(self.local), strict=True)
        return {slot.name: values_L[start:end].view(slot.shape) for slot, (start, end) in spans}

    def local_vector(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return them as a new vector [L]; the inverse of ``local_tensors``."""
        return torch.cat([tensors[slot.name].reshape(-1) for slot in self.local])


class ModelImage:
    """A model whose parameters and buffers are views into one block of memory."""

    def __init__(
        self,
        model: nn.Module,
        *,
        replaced_layers: Mapping[str, GroupNormArguments] | None = None,
        local_parameters: str | None = None,
    ) -> None:
        """Move the model's tensors into a new image.

        ``replaced_layers`` are those that are not as the task built them; ``local_parameters`` are
        the patterns of those that stay on the device.

        Raises:
            BatchDependentLayer: the model has a BatchNorm or a similar layer.
            UnsupportedModel: no trainable parameter, or one that is not float32.
            LocalParametersUnusable: see ``headwater.common.model.local_parameters``.
        """
        refuse_batch_dependent(model)
        self.model = model
        self.replaced_layers = replaced_layers or {}
        self.modules = tuple(model.modules())
        """The model and its submodules, listed once because ``Module.modules`` is slow."""
        self._named = tuple(model.named_modules())
        self.local_names = local_names(model, local_parameters)
        """All names of the tensors that stay on the device, buffers too."""
        self.layout = _layout_of(model, self.local_names)
        self.bytes_U8 = torch.zeros(self.layout.num_bytes, dtype=torch.uint8)
        self.values_P = self.bytes_U8[: 4 * self.layout.num_parameters].view(torch.float32)
        self.local_L = torch.zeros(self.layout.num_local)
        """The parameters that stay on the device."""
        views = self.layout.local_tensors(self.local_L)
        views |= {
            slot.name: self.view(slot) for slot in (*self.layout.trainable, *self.layout.constant)
        }
        for name, tensor in _named_tensors(model):
            if name in views:  # a buffer that stays on the device has no place of its own
                with torch.no_grad():
                    views[name].copy_(tensor)
                tensor.data = views[name]

    def view(self, slot: Slot) -> Tensor:
        """Return one tensor of the image, as a view."""
        dtype = getattr(torch, slot.dtype)
        end = slot.offset_bytes + slot.num_elements * dtype.itemsize
        return self.bytes_U8[slot.offset_bytes : end].view(dtype).view(slot.shape)

    def buffer(self) -> memoryview:
        """Return the image's memory, writable, without a copy."""
        return self.bytes_U8.numpy().data

    def load(self, image: bytes | bytearray | memoryview) -> None:
        """Overwrite the image with bytes of the same layout.

        Raises:
            ModelMismatch: the length differs.
        """
        if len(image) != self.layout.num_bytes:
            raise ModelMismatch(
                f"the received model has {len(image):,} bytes, this one has "
                f"{self.layout.num_bytes:,}"
            )
        self.buffer()[:] = image

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Return the model's current buffers, by name."""
        return [
            (f"{prefix}.{name}" if prefix else name, buffer)
            for prefix, module in self._named
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def trainable(self) -> list[nn.Parameter]:
        """Return the trainable parameters, in the order of the vector."""
        return self._trained(is_local=False)

    def local(self) -> list[nn.Parameter]:
        """Return the trained parameters that stay on the device, in the order of their vector."""
        return self._trained(is_local=True)

    def _trained(self, *, is_local: bool) -> list[nn.Parameter]:
        return [
            parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and (name in self.local_names) == is_local
        ]


def build_model(
    task: Task,
    *,
    seed: int,
    replace_batch_norm: bool = False,
    local_parameters: str | None = None,
) -> ModelImage:
    """Build the task's model under the run's seed and move it into an image.

    Raises:
        BatchDependentLayer, UnsupportedModel, LocalParametersUnusable: see ``ModelImage``.
        TaskFailed: ``new_model`` raised an exception.
    """
    torch.manual_seed(seed)
    with running("new_model"):
        model = task.new_model()
    replaced = replace_batch_norm_by_group_norm(model) if replace_batch_norm else None
    return ModelImage(model, replaced_layers=replaced, local_parameters=local_parameters)


def state_dict(image: ModelImage) -> dict[str, Tensor]:
    """Return the shared part of the model's state_dict; tensors that share memory are copied."""
    seen: set[int] = set()
    state: dict[str, Tensor] = {}
    for name, tensor in image.model.state_dict().items():
        if name in image.local_names:
            continue
        is_alias = tensor.numel() > 0 and tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        state[name] = tensor.clone() if is_alias else tensor.contiguous()
    return state


def _batch_dependent(module: nn.Module) -> bool:
    norms = nn.modules.batchnorm._BatchNorm
    return isinstance(module, norms) or (
        isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
    )


def refuse_batch_dependent(model: nn.Module) -> None:
    """Refuse a model with layers whose output depends on the rest of the batch.

    Raises:
        BatchDependentLayer: naming the layers.
    """
    layers = [
        f"{name} ({type(m).__name__})" for name, m in model.named_modules() if _batch_dependent(m)
    ]
    if layers:
        raise BatchDependentLayer(
            f"the model has {len(layers)} layer(s) that mix the examples of a batch: "
            f"{', '.join(layers[:5])}{', ...' if len(layers) > 5 else ''}"
        )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield trainable parameters first, then frozen parameters, then buffers."""
    parameters = list(model.named_parameters())
    yield from ((name, p) for name, p in parameters if p.requires_grad)
    yield from ((name, p) for name, p in parameters if not p.requires_grad)
    yield from model.named_buffers()


def _spans(slots: Sequence[Slot]) -> tuple[tuple[int, int], ...]:
    starts = [slot.offset_bytes // 4 for slot in slots]
    return tuple(
        (start, start + slot.num_elements) for start, slot in zip(starts, slots, strict=True)
    )


def _layout_of(model: nn.Module, local_names: Set[str]) -> ModelLayout:
    trainable: list[Slot] = []
    constant: list[Slot] = []
    local: list[Slot] = []
    offset = local_offset = 0
    for name, tensor in _named_tensors(model):
        is_trainable = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        dtype = str(tensor.dtype).removeprefix("torch.")
        if is_trainable and tensor.dtype != torch.float32:
            raise UnsupportedModel(f"the parameter {name} is {dtype}; updates are float32")
        is_local = name in local_names
        if is_local and not is_trainable:
            continue
        if not is_trainable:
            offset += -offset % ALIGNMENT_BYTES
        slot = Slot(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype,
            offset_bytes=local_offset if is_local else offset,
            num_elements=tensor.numel(),
        )
        (local if is_local else trainable if is_trainable else constant).append(slot)
        num_bytes = tensor.numel() * tensor.element_size()
        if is_local:
            local_offset += num_bytes
        else:
            offset += num_bytes
    if not sum(slot.num_elements for slot in trainable):
        raise UnsupportedModel("the model has no trainable parameter")
    return ModelLayout(
        trainable=tuple(trainable),
        constant=tuple(constant),
        num_bytes=offset,
        local=tuple(local),
    )
