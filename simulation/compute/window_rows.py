"""Looks up the rows of several devices' windows at once, where examples are rows of tensors.

For a small model, one lookup for each device takes a tenth of the device's time. Every batch equals
the device's own to the bit; see ``client.training.batch_fetch``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwater.client.training.batch_fetch import aligned_rows
from headwater.common.data.batches import SubsetView, dataset_tensors
from headwater.simulation.fleet.devices import ClientPlan, Devices
from headwater.simulation.fleet.position_columns import starts_of
from headwater.simulation.vectorised.round_columns import Ints

# The rows of a block, and the rows that its devices own for each one that is used: more would take
# longer to join than one lookup for each device.
MAX_BYTES, MAX_OWNED_SHARE = 1 << 20, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """The tensors whose rows are a device's examples, and where; None: all rows, in order."""

    tensors: Sequence[Tensor]
    places: Ints | None

    @property
    def kinds(self) -> list[tuple[torch.Size, torch.dtype]]:
        return [(tensor.shape[1:], tensor.dtype) for tensor in self.tensors]


class BlockRows:
    """The rows of a block's windows, one device after another."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self._rows = rows
        self._alignment = math.lcm(*map(aligned_rows, rows))

    def batches(self, start: int, sizes: Sequence[int]) -> Iterator[list[Tensor]]:
        """Yield a window's batches, each with the memory alignment of a new tensor."""
        for size in sizes:
            batch = [rows[start : start + size] for rows in self._rows]
            yield [rows.clone() for rows in batch] if start % self._alignment else batch
            start += size


class WindowRows:
    """Finds the rows of devices' windows; it holds views of the data, and no copy."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._sources: dict[int, _Source | None] = {}

    def of_block(
        self, clients: Sequence[ClientPlan], positions: Ints, counts: Ints
    ) -> BlockRows | None:
        """Return the rows of ``positions``, of which each device has ``counts`` [D].

        None if examples are not rows of tensors, or are too many.

        Raises:
            Exception: a device's examples cannot be opened.
        """
        sources = [self._source(client) for client in clients]
        first = sources[0]
        if first is None:
            return None
        known = [one for one in sources if one is not None]
        row_bytes = sum(tensor.nbytes // max(len(tensor), 1) for tensor in first.tensors)
        if len(known) < len(sources) or row_bytes * len(positions) > MAX_BYTES:
            return None
        if any(one.places is not None for one in known):
            ends = np.cumsum(counts)[:-1]
            parts = np.split(positions, ends)
            positions = np.concatenate(
                [
                    part if one.places is None else one.places[part]
                    for one, part in zip(known, parts, strict=True)
                ]
            )
        columns = first.tensors
        if any(one.tensors is not columns for one in known):
            num_owned = np.array([len(one.tensors[0]) for one in known])
            is_alike = all(one.kinds == first.kinds for one in known)
            if not is_alike or num_owned.sum() > MAX_OWNED_SHARE * len(positions):
                return None
            positions = positions + np.repeat(starts_of(num_owned), counts)
            columns = [
                torch.cat(some) for some in zip(*(one.tensors for one in known), strict=True)
            ]
        index = torch.from_numpy(positions)
        return BlockRows([column.index_select(0, index) for column in columns])

    def _source(self, client: ClientPlan) -> _Source | None:
        if client.part in self._sources:
            return self._sources[client.part]
        if len(self._sources) >= self._devices.cache_size:
            self._sources.clear()
        examples = self._devices.training_examples(client.part, client.plan)
        tensors = dataset_tensors(self._devices.trainer.task, examples)
        places: Ints | None = None
        while isinstance(examples, SubsetView):
            places = examples.positions if places is None else examples.positions[places]
            examples = examples.whole
        found = None if not tensors else _Source(tensors=tensors, places=places)
        self._sources[client.part] = found
        return found
