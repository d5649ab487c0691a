"""Batches of one window; those of a small in-memory data set are fetched once and sliced.

If a batch consists of rows of tensors only, the rows of all micro-batches can be fetched together,
and slicing them is faster than fetching each. Every batch equals that of ``batch_of``
(``headwater.common.data.batches``) to the bit, and starts at the same memory alignment: the sums of
a matrix product may depend on whether its rows start at a multiple of ALIGNED_BYTES.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headwater.common.data.batches import batch_of, dataset_tensors
from headwater.common.task import Examples, Task

# Fetched at once; far below NOISE_BYTES of the memory model (client/memory/peak_model.py).
MAX_BYTES = 256 << 10
ALIGNED_BYTES = 64  # torch aligns its tensors to this


class Batches:
    """The batches of the window that a client is training on."""

    def __init__(self, task: Task, examples: Examples) -> None:
        self._task = task
        self._examples = examples
        self._positions: Sequence[int] = ()
        self._window_rows: list[Tensor] | None = None
        self._is_fetched = True  # there is no window yet
        self._alignment = 1
        self._next = 0

    def belong_to(self, task: Task, examples: Examples) -> bool:
        """Return whether these are batches of this task and these examples."""
        return self._task is task and self._examples is examples

    def begin(self, positions: Sequence[int]) -> None:
        """Begin a window with these examples, in their order; the same object again keeps rows."""
        if positions is not self._positions:
            self._positions, self._window_rows, self._is_fetched = positions, None, False
        self._next = 0

    def of(self, positions: Sequence[int]) -> Any:
        """Return the batch of these examples; fastest if they follow the previous batch."""
        if not self._is_fetched:
            self.fetch()
        window_rows, start = self._window_rows, self._next
        if window_rows is not None:
            end = start + len(positions)
            if start % self._alignment == 0 and self._positions[start:end] == positions:
                self._next = end
                return [rows[start:end] for rows in window_rows]
        return batch_of(self._task, self._examples, positions)

    def fetch(self) -> None:
        """Fetch the window's rows now instead of with its first batch."""
        self._is_fetched = True
        self._window_rows = rows = _rows_of(self._task, self._examples, self._positions)
        if rows is not None:
            self._alignment = math.lcm(*map(aligned_rows, rows))


def batches_of(
    task: Task,
    examples: Examples,
    positions: Sequence[int] | NDArray[np.int64],
    sizes: Sequence[int],
) -> Iterator[Any]:
    """Yield the batches of a whole window, of these sizes, as ``Batches`` gives them."""
    rows = _rows_of(task, examples, positions)
    if rows is None:
        for start, end in pairwise(accumulate(sizes, initial=0)):
            yield batch_of(task, examples, positions[start:end])
        return
    alignment, start = math.lcm(*map(aligned_rows, rows)), 0
    for size in sizes:
        end = start + size
        if start % alignment:
            yield batch_of(task, examples, positions[start:end])
        else:
            yield [row[start:end] for row in rows]
        start = end


def _rows_of(
    task: Task, examples: Examples, positions: Sequence[int] | NDArray[np.int64]
) -> list[Tensor] | None:
    """Return the rows of a window if a batch consists of rows of tensors, and they are few."""
    tensors = dataset_tensors(task, examples)
    if tensors is None:
        return None
    num_bytes = sum(tensor.nbytes // max(len(tensor), 1) for tensor in tensors)
    if num_bytes * len(positions) > MAX_BYTES:
        return None
    rows: list[Tensor] = batch_of(task, examples, positions)
    return rows


def aligned_rows(rows: Tensor) -> int:
    """Return n such that every n-th row is aligned as a new tensor's; 1 for integers."""
    if not (rows.is_floating_point() or rows.is_complex()):
        return 1
    return ALIGNED_BYTES // math.gcd(rows.nbytes // len(rows), ALIGNED_BYTES)
