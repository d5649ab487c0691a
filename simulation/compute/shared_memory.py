"""Memory that processes share: the model's image, and slots for the vectors of updates.

It is a file without a name, in RAM where the system has such files (``memfd_create``; no limit of
/dev/shm applies to it), and is gone with the last process that maps it. Nothing in it is locked:
who may write what, and when, is settled by the messages between the processes
(``headwater.simulation.compute.modes.worker_pool``).
"""

from __future__ import annotations

import mmap
import os
import tempfile

import torch
from torch import Tensor

from headwater.common.model.parameters import ModelLayout

ALIGNMENT_BYTES = 64  # a cache line


class Shared:
    """The image [bytes] and ``num_slots`` vectors [P], float32, as views of shared memory."""

    def __init__(self, descriptor: int, layout: ModelLayout, num_slots: int) -> None:
        """Map the file of this descriptor, which may be closed behind this."""
        vector_bytes = _aligned(4 * layout.num_parameters)
        self._map = mmap.mmap(descriptor, _aligned(layout.num_bytes) + num_slots * vector_bytes)
        self.image = memoryview(self._map)[: layout.num_bytes]
        self.slots: list[Tensor] = [
            torch.frombuffer(
                self._map,
                dtype=torch.float32,
                count=layout.num_parameters,
                offset=_aligned(layout.num_bytes) + at * vector_bytes,
            )
            for at in range(num_slots)
        ]


def new_file(layout: ModelLayout, num_slots: int) -> int:
    """Return the descriptor of a new file of the size that ``Shared`` maps, full of zeros."""
    num_bytes = _aligned(layout.num_bytes) + num_slots * _aligned(4 * layout.num_parameters)
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("headwater")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % ALIGNMENT_BYTES
