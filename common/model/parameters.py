"""Stores a model in two blocks of memory: the vector that trains, and the frozen part.

All trainable parameters form one contiguous float32 vector [P]: the *image* that the server sends
in every round. The frozen parameters and the buffers form a block of their own, which belongs to
the server as well, and which a device is sent at most once (``common.model.frozen_part``). The
model's tensors are views into the blocks, so loading, stepping and sending need no further copy.

Parameters that stay on the device (``local_parameters``) are views into a vector of their own [L].
The layout's digest covers them, as both sides must leave out the same ones.
"""

from __future__ import annotations

import copy
import hashlib
import mmap
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from headwater.common.errors import ModelMismatch, TaskError
from headwater.common.model import frozen_part
from headwater.common.model.batch_norm import (
    GroupNormArguments,
    freeze_statistics,
    refuse_batch_dependent,
    replace_batch_norm_by_group_norm,
)
from headwater.common.model.bfloat16_weights import store_frozen
from headwater.common.model.frozen_part import Fingerprint
from headwater.common.model.layout import (
    changed,
    is_stand_in,
    layout_of,
    memory_of,
    moved,
    named_tensors,
    unfrozen,
)
from headwater.common.model.local_parameters import local_names
from headwater.common.model.tensor_file import tensors_of, without_wrappers
from headwater.common.model.vectors import bit_sum
from headwater.common.system.heap import release_freed_memory
from headwater.common.task import Task, built_model

# While a model moves into its image, the memory that it leaves is released after so many bytes.
RELEASED_BYTES = 16 << 20
# The parameters of images, by their ids: a module is one image's alone.
_HELD: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()

# torch's generator is the whole process's: a server and clients may begin in threads of one.
RANDOM_NUMBERS = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let a model draw the same numbers wherever it is built: of torch, of numpy and of Python.

    Those of numpy and of Python are set back at the end.
    """
    with RANDOM_NUMBERS:
        states = random.getstate(), np.random.get_state()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


Build = Callable[[Callable[[], nn.Module], Callable[[nn.Module], None]], nn.Module]
"""Calls a function that builds a model, and one that stores its frozen weights; returns it."""


class ModelImage:
    """A model whose parameters and buffers are views into blocks of memory."""

    def __init__(
        self,
        model: nn.Module,
        *,
        replaced_layers: Mapping[str, GroupNormArguments] | None = None,
        local_parameters: str | None = None,
    ) -> None:
        """Move the model's tensors into new blocks.

        ``replaced_layers`` are those that are not as the task built them; ``local_parameters`` are
        the patterns of those that stay on the device.

        Raises:
            BatchDependentLayer: the model has a BatchNorm or a similar layer.
            UnsupportedModel: see ``headwater.common.model.layout.layout_of``.
            LocalParametersUnusable: see ``headwater.common.model.local_parameters``.
        """
        refuse_batch_dependent(model)
        self.model = model
        self.local_parameters = local_parameters
        self.replaced_layers = replaced_layers or {}
        self.modules = tuple(model.modules())
        """The model and its submodules, listed once because ``Module.modules`` is slow."""
        self._named = tuple(model.named_modules())
        self.local_names = local_names(model, local_parameters)
        """All names of the tensors that stay on the device, buffers too."""
        self.layout = layout_of(model, self.local_names)
        # Not zeros: a page is there from its first write, when its tensor moves in and leaves one.
        self.bytes_U8 = torch.empty(self.layout.num_bytes, dtype=torch.uint8)
        self.values_P = self.bytes_U8.view(torch.float32)
        self.local_L = torch.zeros(self.layout.num_local)
        """The parameters that stay on the device."""
        is_sent = any(is_stand_in(memory_of(one)) for one in model.parameters())
        self.frozen_U8 = _frozen_block(self.layout.num_frozen_bytes, is_sent=is_sent)
        """The frozen parameters and the buffers."""
        self.frozen_file_bytes = self.layout.num_frozen_bytes if is_sent else 0
        """Of the frozen part, what is or will be pages of a file: each pass reads them, although
        the kernel may drop them."""
        self.fingerprint: Fingerprint | None = None
        """Of the frozen part; None if it was not computed since the memory was written."""
        self.recorded: dict[str, Any] = {}
        """What the record of the model's file has of features, by its fields."""
        views = self.layout.local_tensors(self.local_L)
        views |= {slot.name: slot.view_of(self.bytes_U8) for slot in self.layout.trainable}
        views |= {slot.name: slot.view_of(self.frozen_U8) for slot in self.layout.frozen}
        tensors = dict(named_tensors(model))
        self._frozen = [(name, tensors[name]) for name in (s.name for s in self.layout.frozen)]
        trained = (slot.name for slot in (*self.layout.trainable, *self.layout.local))
        self.trained = [(name, tensors[name]) for name in trained]
        """The parameters that train, by name; an exact sum leaves them as they are."""
        num_moved = 0
        for name in tuple(tensors):
            if name in views:  # a buffer that stays on the device has no place of its own
                tensor = tensors.pop(name)
                if not is_stand_in(memory_of(tensor)):
                    with torch.no_grad():
                        views[name].copy_(memory_of(tensor))
                tensor.data = views[name]
                num_moved += tensor.nbytes
                if num_moved >= RELEASED_BYTES:  # or else the process holds the model twice
                    num_moved = 0
                    release_freed_memory()

    def buffer(self) -> memoryview:
        """Return the memory of the trainable parameters, writable, without a copy."""
        return self.bytes_U8.numpy().data

    def difference_from(self, held_id: str) -> None:
        """Return None: it is sent whole, unlike ``server.compression.broadcast_model``."""

    def frozen_buffer(self) -> memoryview:
        """Return the frozen part's memory, to be overwritten, without a copy."""
        self.fingerprint = None
        release_freed_memory()  # what passes have left, before these pages are there
        return self.frozen_U8.numpy().data

    @property
    def frozen_digest(self) -> str:
        """The SHA-256 of the frozen part, in hexadecimal; empty if the model has none.

        It is computed once: the frozen part does not change.
        """
        if self.fingerprint is None:
            self.fingerprint = frozen_part.fingerprint_of(self.layout, self.frozen_U8)
        return self.fingerprint.digest

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the vector and of the frozen part's digest: of the model as a whole."""
        sha = hashlib.sha256(self.buffer())
        sha.update(bytes.fromhex(self.frozen_digest))
        return sha.digest()

    def adopt_frozen(
        self, frozen_U8: Tensor, fingerprint: Fingerprint, *, is_file: bool = False
    ) -> None:
        """Use another block as the frozen part: shared memory, or a file that is mapped."""
        self.frozen_file_bytes = frozen_U8.nbytes if is_file else 0
        for slot, (_, tensor) in zip(self.layout.frozen, self._frozen, strict=True):
            tensor.data = slot.view_of(frozen_U8)
        self.frozen_U8, self.fingerprint = frozen_U8, fingerprint

    def check_frozen(self) -> None:
        """Check that the frozen part is as it was when its digest was computed.

        Raises:
            BuffersChanged: it is not; names the first tensor that changed.
        """
        if self.fingerprint is None:
            return
        name = frozen_part.first_change(self.layout, self.frozen_U8, self.fingerprint)
        if name is not None:
            self.fingerprint = None
            tensor = dict(self._frozen)[name]
            raise changed(tensor, name)

    def constants(self) -> list[tuple[str, Tensor]]:
        """Return what training must not change: frozen parameters and current buffers, by name."""
        frozen = [(name, one) for name, one in self._frozen if isinstance(one, nn.Parameter)]
        return frozen + self.buffers()

    def places(self) -> tuple[list[int], int]:
        """Return where the trained parameters lie, and a sum over the bits of the shared ones."""
        return [tensor.data_ptr() for _, tensor in self.trained], bit_sum(self.values_P)

    def check_places(self, before: tuple[list[int], int], by: str = "training") -> None:
        """Check that the parameters lie where they lay, and hold the same values.

        Raises:
            BuffersChanged: they do not; names the first that lies elsewhere.
        """
        addresses, bits = before
        for (name, tensor), address in zip(self.trained, addresses, strict=True):
            if tensor.data_ptr() != address:
                raise moved(f"the parameter {name}", by)
        if bit_sum(self.values_P) != bits:
            raise moved("a parameter", by)

    def take_back(self) -> None:
        """Copy the values of parameters that lie elsewhere to their places, and put them there.

        An optimizer of the user's may assign ``p.data``.
        """
        slots = {slot.name: slot for slot in self.layout.trainable}
        for name, tensor in self.trained:
            if name in slots:
                view = slots[name].view_of(self.bytes_U8)
                if tensor.data_ptr() != view.data_ptr() or tensor.stride() != view.stride():
                    view.copy_(tensor.detach())
                    tensor.data = view

    def check_still_frozen(self) -> None:
        """Check that no pass has turned ``requires_grad`` on for a frozen parameter.

        Raises:
            TaskError: one has; its gradient has no place in the update.
        """
        for name, tensor in self._frozen:
            if tensor.requires_grad:
                raise unfrozen(name)

    def load(self, image: bytes | bytearray | memoryview) -> None:
        """Overwrite the trainable parameters with bytes of the same layout.

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
        """Return the trainable parameters, in the order of the vector.

        A pass may turn ``requires_grad`` off, as gradual unfreezing does: the parameter then has no
        gradient, and still its place.
        """
        return self._trained_parameters[: len(self.layout.trainable)]

    def local(self) -> list[nn.Parameter]:
        """Return the trained parameters that stay on the device, in the order of their vector."""
        return self._trained_parameters[len(self.layout.trainable) :]

    @property
    def _trained_parameters(self) -> list[nn.Parameter]:
        return [one for _, one in self.trained if isinstance(one, nn.Parameter)]


def _frozen_block(num_bytes: int, *, is_sent: bool) -> Tensor:
    """Return memory for the frozen part; of zeros that take none, if it is yet to come."""
    if not is_sent:
        return torch.empty(num_bytes, dtype=torch.uint8)
    if sys.platform == "win32":
        pages = mmap.mmap(-1, num_bytes)
    else:  # of shared pages also those that are only read would be there
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def built(new_model: Callable[[], nn.Module], store: Callable[[nn.Module], None]) -> nn.Module:
    """Return a new model whose frozen weights are stored."""
    model = new_model()
    store(model)
    return model


def build_model(
    task: Task,
    *,
    seed: int,
    batch_norm: str | None = None,
    local_parameters: str | None = None,
    frozen_dtype: str | None = None,
    within: Build = built,
) -> ModelImage:
    """Build the task's model under the run's seed and move it into blocks.

    ``batch_norm`` and ``frozen_dtype`` are those of the settings: "frozen" leaves the layers with
    their running statistics, "group" puts GroupNorm in their place; frozen weights
    are stored in ``frozen_dtype``. ``within`` builds the model and stores its frozen weights, or
    raises.

    Raises:
        BatchDependentLayer, UnsupportedModel, LocalParametersUnusable: see ``ModelImage``.
        TaskFailed, TaskError: ``new_model`` raised an exception, or returned no module.
    """
    replaced: dict[str, GroupNormArguments] = {}

    def store(model: nn.Module) -> None:
        if batch_norm == "group":
            replaced.update(replace_batch_norm_by_group_norm(model))
        if batch_norm == "frozen":
            freeze_statistics(model)
        if frozen_dtype is not None:
            store_frozen(model, frozen_dtype)

    with seeded(seed):
        model = within(lambda: _own(built_model(task)), store)
    return ModelImage(model, replaced_layers=replaced, local_parameters=local_parameters)


def _own(model: nn.Module) -> nn.Module:
    """Return the model, or a copy if an image holds a parameter of it already.

    A task may return a module that it made once, so that server and clients of one process would
    share it: each would move its parameters out of the other's memory.

    Raises:
        TaskError: it cannot be copied.
    """
    parameters = [*model.parameters()]
    if any(_HELD.get(id(one)) is one for one in parameters):
        try:
            model = copy.deepcopy(model)
        except Exception as error:
            raise TaskError(
                "new_model returned a module that it had returned before, and it cannot be copied: "
                f"{type(error).__name__}: {error}",
                remedy="build the module in new_model, each time anew",
            ) from error
        parameters = [*model.parameters()]
    _HELD.update((id(one), one) for one in parameters)
    return model


def state_dict(image: ModelImage) -> dict[str, Tensor]:
    """Return the shared part of the model's tensors by their names in a file.

    Tensors that share memory are copied.
    """
    seen: set[int] = set()
    state: dict[str, Tensor] = {}
    tensors = tensors_of(image.model)
    names = without_wrappers(image.model, tensors)
    for name, tensor in tensors.items():
        if name in image.local_names:
            continue
        is_alias = tensor.numel() > 0 and tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        state[names[name]] = tensor.clone() if is_alias else tensor.contiguous()
    return state
