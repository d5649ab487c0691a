"""Memory that the simulator shares with its workers: the model, and a vector for each slot."""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
import torch
from torch import Tensor

from headwater.common.model.layout import ModelLayout
from headwater.simulation.fleet.position_columns import Ints

ALIGNMENT_BYTES = 64  # a cache line


class SharedVectors:
    """The model's image [bytes], its frozen part and ``num_slots`` float32 vectors [P], as views.

    ``begun`` [workers] has the number of the device that each worker is at.

    The memory is a file without a name, which goes with the last process that maps it. With
    ``memfd_create`` no limit of /dev/shm applies (a container has 64 MB), as it does to
    ``multiprocessing.shared_memory`` and torch's shared tensors. Where no descriptor can be passed
    to a new process, as on Windows, it is a temporary file with a name. Nothing is locked: the
    messages between the processes settle which of them may write.
    """

    def __init__(
        self, layout: ModelLayout, num_slots: int, num_workers: int, descriptor: int
    ) -> None:
        """Map the file of this descriptor, which is empty if it is new."""
        image_bytes, slot_bytes = _aligned(layout.num_bytes), _aligned(4 * layout.num_parameters)
        vectors_bytes = image_bytes + num_slots * slot_bytes
        begun_at = vectors_bytes + _aligned(layout.num_frozen_bytes)
        num_bytes = begun_at + 8 * num_workers
        if os.fstat(descriptor).st_size < num_bytes:
            os.ftruncate(descriptor, num_bytes)
        self._map = mmap.mmap(descriptor, num_bytes)
        self.image = memoryview(self._map)[: layout.num_bytes]
        self.slots: list[Tensor] = [
            torch.frombuffer(
                self._map,
                dtype=torch.float32,
                count=layout.num_parameters,
                offset=image_bytes + at * slot_bytes,
            )
            for at in range(num_slots)
        ]
        self.begun: Ints = np.frombuffer(self._map, np.int64, num_workers, begun_at)
        self._frozen_at, self._num_frozen_bytes = vectors_bytes, layout.num_frozen_bytes
        self._descriptor = descriptor

    def frozen(self, *, is_private: bool) -> Tensor:
        """Return the frozen part; what is written to a private one stays in this process."""
        memory = self._map
        if is_private:
            memory = mmap.mmap(self._descriptor, len(self._map), access=mmap.ACCESS_COPY)
        return torch.frombuffer(
            memory, dtype=torch.uint8, count=self._num_frozen_bytes, offset=self._frozen_at
        )


def unnamed_file() -> int:
    """Open a new file without a name; return its descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor: int = os.memfd_create("headwater")
        return descriptor
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % ALIGNMENT_BYTES
