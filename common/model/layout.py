"""The layout of a model: which tensors train, which are frozen, and where each one stands.

All trainable parameters form one contiguous float32 vector [P], in the order of
``named_parameters``. The frozen part is a block of its own: the parameters that do not train, and
the buffers, those with wider elements first and then by name. That is the order of a safetensors
file (``common.model.tensor_file``), so that each tensor is aligned and the block is the content of
such a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from headwater.common.errors import BuffersChanged, TaskError, UnsupportedModel
from headwater.common.model.mismatch import FROZEN, LOCAL, Row, to_text
from headwater.common.model.tensor_file import DTYPE_NAMES

ON_META = (
    "a meta tensor has no values: build the model on the CPU in new_model, or call "
    "model.to_empty(device='cpu') there and then load or initialise its weights"
)
# The vectors of the power iteration, in torch's new and old spectral_norm.
SPECTRAL_BUFFERS = (".0._u", ".0._v", "weight_u", "weight_v")
NO_SPECTRAL_NORM = (
    "spectral_norm iterates in each forward pass in training; take weight_norm or orthogonal "
    "(torch.nn.utils.parametrizations), which keep no state, or divide the weight by "
    "torch.linalg.matrix_norm(weight, 2) in a parametrization of your own"
)
HOLD_REAL = (
    "keep its real and imaginary part: nn.Parameter(torch.view_as_real(w)), and in forward "
    "torch.view_as_complex(self.w); torch's optimizers take the same steps on both"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The position of one tensor in its block."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int
    num_elements: int

    @property
    def num_bytes(self) -> int:
        """The tensor's bytes."""
        return self.num_elements * self._dtype.itemsize

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def view_of(self, block_U8: Tensor) -> Tensor:
        """Return the tensor as a view of the block that it belongs to."""
        end = self.offset_bytes + self.num_bytes
        return block_U8[self.offset_bytes : end].view(self._dtype).view(self.shape)


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """The names, shapes and offsets of a model's tensors; must be equal on client and server."""

    trainable: tuple[Slot, ...]
    frozen: tuple[Slot, ...] = ()
    """The parameters that do not train, and the buffers; their offsets are in the frozen part."""
    local: tuple[Slot, ...] = ()
    """The trained parameters that stay on the device; their offsets are in its own vector [L]."""

    @cached_property
    def num_parameters(self) -> int:
        """P, the length of the parameter vector and of every update."""
        return sum(slot.num_elements for slot in self.trainable)

    @property
    def num_bytes(self) -> int:
        """The bytes of the vector, which the server sends in every round."""
        return 4 * self.num_parameters

    @cached_property
    def num_frozen_bytes(self) -> int:
        """The bytes of the frozen part, which the server sends at most once to a device."""
        return sum(slot.num_bytes for slot in self.frozen)

    @cached_property
    def num_local(self) -> int:
        """L, the number of parameters that stay on the device."""
        return sum(slot.num_elements for slot in self.local)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the layout, in hexadecimal."""
        rows: list[list[object]] = [_row_with_offset(slot) for slot in self.trainable]
        rows += [["frozen", *_row_with_offset(slot)] for slot in self.frozen]
        rows += [[LOCAL, slot.name, list(slot.shape), slot.offset_bytes] for slot in self.local]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    @cached_property
    def rows(self) -> list[Row]:
        """The name, shape and dtype of each tensor: the vector's, the frozen, then the local."""
        rows = [(slot.name, slot.shape, slot.dtype) for slot in self.trainable]
        rows += [(slot.name, slot.shape, FROZEN + slot.dtype) for slot in self.frozen]
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


def layout_of(model: nn.Module, local_names: Set[str] = frozenset()) -> ModelLayout:
    """Return a model's layout; ``local_names`` are those of the tensors that stay on the device.

    Raises:
        UnsupportedModel: no trainable parameter, one that is not float32, or one without shape; a
            tensor that is not on the CPU, or that no file of a model can hold; a trained parameter
            in the memory of another tensor.
    """
    trainable: list[tuple[str, Tensor]] = []
    frozen: list[tuple[str, Tensor]] = []
    local: list[tuple[str, Tensor]] = []
    for name, tensor in named_tensors(model):
        is_trainable = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        tensor = memory_of(tensor)
        _check_memory(name, tensor)
        if is_trainable and tensor.dtype != torch.float32:
            raise UnsupportedModel(
                f"the parameter {name} is {_name(tensor)}; updates are float32",
                remedy=HOLD_REAL if tensor.is_complex() else None,
            )
        if name not in local_names:
            (trainable if is_trainable else frozen).append((name, tensor))
        elif is_trainable:  # a buffer that stays on the device has no place of its own
            local.append((name, tensor))
    if not sum(tensor.numel() for _, tensor in trainable):
        raise UnsupportedModel(
            "the model has no trainable parameter",
            remedy="return a model from new_model in which requires_grad is on for what should "
            "train (peft: inference_mode=False)",
        )
    _check_memory_is_own([*trainable, *local], frozen)
    frozen.sort(key=lambda item: (-item[1].element_size(), item[0]))
    return ModelLayout(trainable=_slots(trainable), frozen=_slots(frozen), local=_slots(local))


def _check_memory(name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise UnsupportedModel(
            f"{name} is on the device {tensor.device}, and training is on the CPU",
            remedy=ON_META if tensor.is_meta else "return model.cpu() from new_model",
        )
    if tensor.dtype not in DTYPE_NAMES:
        raise UnsupportedModel(
            f"{name} is {_name(tensor)}, which no file of a model can hold (safetensors)",
            remedy="store it in another dtype: a complex128 tensor as torch.view_as_real(it)",
        )


def _check_memory_is_own(
    trained: Sequence[tuple[str, Tensor]], frozen: Sequence[tuple[str, Tensor]]
) -> None:
    """Check that no other tensor lies in the memory of a trained one.

    Each tensor moves to a place of its own, and what was one value would become two. Slices that
    lie between each other's elements (columns of a matrix) share none.
    """
    spans = sorted(
        (one.data_ptr(), one.data_ptr() + _known_bytes(one), name, number < len(trained))
        for number, (name, one) in enumerate((*trained, *frozen))
        if one.numel() and one.layout is torch.strided
    )
    last_end, last_name, last_trains = 0, "", False
    for start, end, name, trains in spans:
        if start < last_end and (trains or last_trains):
            raise UnsupportedModel(
                f"{last_name} and {name} are two tensors in the same memory, as after b.data = "
                "a.data: PyTorch changes both at once, and here each would have its own values",
                remedy="tie them as one parameter, b.weight = a.weight, or copy the values: "
                "b.weight.data = a.weight.data.clone()",
            )
        if end > last_end:
            last_end, last_name, last_trains = end, name, trains


def _known_bytes(tensor: Tensor) -> int:
    """Return the bytes from a tensor's start that are all its own elements."""
    return tensor.nbytes if tensor.is_contiguous() else tensor.element_size()


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter, then each buffer, under its first name.

    Raises:
        UnsupportedModel: one has no shape yet.
    """
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise UnsupportedModel(
                f"{name} has no shape yet, as its layer is lazy",
                remedy="call the model on an example's inputs at the end of new_model",
            )
        yield name, tensor


def memory_of(tensor: Tensor) -> Tensor:
    """Return a tensor as its memory has it: a weight that is stored in codes, as the codes."""
    found: Tensor = getattr(tensor, "stored_memory", tensor)
    return found


_STAND_INS: dict[torch.dtype, Tensor] = {}
"""The number of each dtype that all stand-ins of it are."""


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return one zero that is seen as a whole tensor: a weight whose values are yet to come."""
    if dtype not in _STAND_INS:
        _STAND_INS[dtype] = torch.zeros((), dtype=dtype)
    return _STAND_INS[dtype].expand(tuple(shape))


def is_stand_in(tensor: Tensor) -> bool:
    """Return whether a tensor, or what a weight is stored as, has no values of its own yet."""
    zero = _STAND_INS.get(tensor.dtype)
    return zero is not None and _is_dense(tensor) and tensor.data_ptr() == zero.data_ptr()


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def changed(tensor: Tensor, name: str, by: str = "training") -> BuffersChanged:
    """Return the error for a tensor that ``by`` may not write to."""
    if not isinstance(tensor, nn.Parameter):
        is_spectral = name.endswith(SPECTRAL_BUFFERS)
        return BuffersChanged(
            f"{by} changed the buffer {name}", remedy=NO_SPECTRAL_NORM if is_spectral else None
        )
    if not tensor.requires_grad:
        return BuffersChanged(f"{by} changed the frozen parameter {name}")
    return BuffersChanged(
        f"{by} changed the parameter {name}, apart from its gradient",
        remedy="let the optimizer alone write to parameters: no max_norm in an embedding, no "
        "clamp_ or normalisation of a weight in place; a parametrization computes one instead",
    )


def moved(name: str, by: str = "training") -> BuffersChanged:
    """Return the error for a parameter whose values ``by`` changed through ``.data``."""
    return BuffersChanged(
        f"{by} changed {name} through .data: the server's values no longer reach it",
        remedy="leave .data alone: compute the weight that a layer uses in forward, as in "
        "functional.linear(x, torch.renorm(self.weight, 2, 0, 1.0)), or register a parametrization",
    )


def unfrozen(name: str) -> TaskError:
    """Return the error for a pass that turned ``requires_grad`` on for a frozen parameter."""
    return TaskError(
        f"{name} was frozen when the model was built, and a pass turned its requires_grad on: its "
        "gradient has no place in the update, and was lost",
        remedy="turn requires_grad on in new_model for all that ever trains; a pass may turn it "
        "off, and the parameter then stays as it is in that pass",
    )


def _slots(tensors: Sequence[tuple[str, Tensor]]) -> tuple[Slot, ...]:
    slots, offset = [], 0
    for name, tensor in tensors:
        slot = Slot(
            name=name,
            shape=tuple(tensor.shape),
            dtype=_name(tensor),
            offset_bytes=offset,
            num_elements=tensor.numel(),
        )
        slots.append(slot)
        offset += slot.num_bytes
    return tuple(slots)


def _spans(slots: Sequence[Slot]) -> tuple[tuple[int, int], ...]:
    starts = [slot.offset_bytes // 4 for slot in slots]
    return tuple(
        (start, start + slot.num_elements) for start, slot in zip(starts, slots, strict=True)
    )


def _row_with_offset(slot: Slot) -> list[object]:
    return [slot.name, list(slot.shape), slot.dtype, slot.offset_bytes]


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
