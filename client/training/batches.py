"""The batches of one window: those of a small data set in memory are fetched once and cut.

Where a batch is no more than rows of tensors, the rows of all micro-batches together are as good as
those of each, and cutting them is quicker than fetching. A batch is what ``common.data.batches.batch_of``
gives of its positions, to the bit, and begins in memory where that does: the sums of a matrix
product may depend on whether its rows begin at a multiple of ALIGNED_BYTES.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from headwater.common.data.batches import batch_of, dataset_tensors
from headwater.common.task import Examples, Task

# Fetched at once; far below what the guard of a device's memory takes for noise.
MAX_BYTES = 256 << 10
ALIGNED_BYTES = 64  # where torch lets its tensors begin


class Batches:
    """The batches of the window that a device is at."""

    def __init__(self, task: Task, examples: Examples) -> None:
        self._task = task
        self._examples = examples
        self._positions: Sequence[int] = ()
        self._whole: list[Tensor] | None = None
        self._is_fetched = True  # of no window
        self._every = 1
        self._at = 0

    def are_of(self, task: Task, examples: Examples) -> bool:
        """Tell whether these are the batches of a task and its examples."""
        return self._task is task and self._examples is examples

    def begin(self, positions: Sequence[int]) -> None:
        """Take note of the window's examples, in their order; the same again changes nothing."""
        if positions is not self._positions:
            self._positions, self._whole, self._is_fetched = positions, None, False
        self._at = 0

    def of(self, positions: Sequence[int]) -> Any:
        """Return the batch of these examples; quickest if they are those behind the last ones."""
        if not self._is_fetched:
            self.fetch()
        whole, start = self._whole, self._at
        if whole is not None:
            end = start + len(positions)
            if start % self._every == 0 and self._positions[start:end] == positions:
                self._at = end
                return [rows[start:end] for rows in whole]
        return batch_of(self._task, self._examples, positions)

    def fetch(self) -> None:
        """Fetch now what would be fetched with the first batch."""
        self._is_fetched = True
        tensors = dataset_tensors(self._task, self._examples)
        if tensors is None:
            return
        num_bytes = sum(tensor.nbytes // max(len(tensor), 1) for tensor in tensors)
        if num_bytes * len(self._positions) > MAX_BYTES:
            return
        self._whole = whole = batch_of(self._task, self._examples, self._positions)
        self._every = math.lcm(*map(_aligned_every, whole))


def _aligned_every(rows: Tensor) -> int:
    """Return of how many rows each begins where a tensor of its own would; of whole numbers any."""
    if not (rows.is_floating_point() or rows.is_complex()):
        return 1
    return ALIGNED_BYTES // math.gcd(rows.nbytes // len(rows), ALIGNED_BYTES)
