"""Stores a model in one block of memory, whose first part is the flat parameter vector.

All trainable parameters form one contiguous float32 vector [P], in the order of
``named_parameters``. After them, each at a multiple of eight bytes, come the frozen parameters and
the buffers, which belong to the server. Together they are the *image* that the server sends. The
model's tensors are views into the image, so loading, stepping and sending need no further copy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from headwater.common.errors import BatchDependentLayer, ModelMismatch, UnsupportedModel
from headwater.common.model.group_norm import (
    GroupNormArguments,
    replace_batch_norm_by_group_norm,
)
from headwater.common.model.mismatch import Row, to_text
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

    @cached_property
    def num_parameters(self) -> int:
        """P, the length of the parameter vector and of every update."""
        return sum(slot.num_elements for slot in self.trainable)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the layout, in hexadecimal."""
        rows = [
            [slot.name, list(slot.shape), slot.dtype, slot.offset_bytes]
            for slot in (*self.trainable, *self.constant)
        ]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    @cached_property
    def rows(self) -> list[Row]:
        """The name, shape and dtype of each tensor, in the order of the image."""
        return [(slot.name, slot.shape, slot.dtype) for slot in (*self.trainable, *self.constant)]

    @cached_property
    def text(self) -> str:
        """The rows as text, from which the other side can name the first tensor that differs."""
        return to_text(self.rows)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The half-open range of coordinates of each trainable tensor in [P]."""
        starts = [slot.offset_bytes // 4 for slot in self.trainable]
        return tuple(
            (start, start + slot.num_elements)
            for start, slot in zip(starts, self.trainable, strict=True)
        )


class ModelImage:
    """A model whose parameters and buffers are views into one block of memory."""

    def __init__(
        self, model: nn.Module, *, replaced_layers: Mapping[str, GroupNormArguments] | None = None
    ) -> None:
        """Move the model's tensors into a new image.

        ``replaced_layers`` are those that are not as the task built them.

        Raises:
            BatchDependentLayer: the model has a BatchNorm or a similar layer.
            UnsupportedModel: no trainable parameter, or one that is not float32.
        """
        refuse_batch_dependent(model)
        self.model = model
        self.replaced_layers = replaced_layers or {}
        self.modules = tuple(model.modules())
        """The model and its submodules, listed once because ``Module.modules`` is slow."""
        self._named = tuple(model.named_modules())
        self.layout = _layout_of(model)
        self.bytes_U8 = torch.zeros(self.layout.num_bytes, dtype=torch.uint8)
        self.values_P = self.bytes_U8[: 4 * self.layout.num_parameters].view(torch.float32)
        by_name = {slot.name: slot for slot in (*self.layout.trainable, *self.layout.constant)}
        for name, tensor in _named_tensors(model):
            view = self.view(by_name[name])
            with torch.no_grad():
                view.copy_(tensor)
            tensor.data = view

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
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


def build_model(task: Task, *, seed: int, replace_batch_norm: bool = False) -> ModelImage:
    """Build the task's model under the run's seed and move it into an image.

    Raises:
        BatchDependentLayer, UnsupportedModel: see ``ModelImage``.
        TaskFailed: ``new_model`` raised an exception.
    """
    torch.manual_seed(seed)
    with running("new_model"):
        model = task.new_model()
    replaced = replace_batch_norm_by_group_norm(model) if replace_batch_norm else None
    return ModelImage(model, replaced_layers=replaced)


def state_dict(image: ModelImage) -> dict[str, Tensor]:
    """Return the model's state_dict; tensors that share memory are copied."""
    seen: set[int] = set()
    state: dict[str, Tensor] = {}
    for name, tensor in image.model.state_dict().items():
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


def _layout_of(model: nn.Module) -> ModelLayout:
    trainable: list[Slot] = []
    constant: list[Slot] = []
    offset = 0
    for name, tensor in _named_tensors(model):
        is_trainable = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        dtype = str(tensor.dtype).removeprefix("torch.")
        if is_trainable and tensor.dtype != torch.float32:
            raise UnsupportedModel(f"the parameter {name} is {dtype}; updates are float32")
        if not is_trainable:
            offset += -offset % ALIGNMENT_BYTES
        slot = Slot(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype,
            offset_bytes=offset,
            num_elements=tensor.numel(),
        )
        (trainable if is_trainable else constant).append(slot)
        offset += tensor.numel() * tensor.element_size()
    if not sum(slot.num_elements for slot in trainable):
        raise UnsupportedModel("the model has no trainable parameter")
    return ModelLayout(trainable=tuple(trainable), constant=tuple(constant), num_bytes=offset)
