"""Holds the examples of many devices as rows of shared tensors, so that one lookup gives a batch.

A device's examples are fetched and collated at their first use. If the rows exceed a limit, all are
dropped and fetched again when they are needed, so memory stays bounded for any number of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.client.trainer.client_examples import MAX_OPEN_DATASETS
from headwater.common.data.batches import BatchForm, UnsupportedBatch, batch_of
from headwater.common.task import Examples, Task

Rows = NDArray[np.int64]

LIMIT_BYTES = 128 << 20


class ExampleRows:
    """The examples of many devices, one row each; ``batch`` turns rows into the task's batches."""

    def __init__(
        self, task: Task, *, limit_bytes: int = LIMIT_BYTES, most_held: int = MAX_OPEN_DATASETS
    ) -> None:
        """Hold at most about ``limit_bytes`` of rows, of about ``most_held`` devices."""
        self._task = task
        self._limit_bytes = limit_bytes
        self._most_held = most_held
        self.starts: dict[int, int] = {}
        """The row of each device's first example; its example number i is i rows further."""
        self._columns: list[Tensor] = []
        self._num_rows = 0
        self._form: BatchForm | None = None

    def make_room(self, parts: Sequence[int]) -> None:
        """Drop all rows if a limit is exceeded and some device of ``parts`` has no rows yet."""
        held_bytes = sum(column.nbytes for column in self._columns)
        is_full = held_bytes > self._limit_bytes or len(self.starts) > self._most_held
        if is_full and not all(part in self.starts for part in parts):
            self.drop()

    def drop(self) -> None:
        """Drop all rows."""
        self.starts.clear()
        self._columns = [column[:0].clone() for column in self._columns]
        self._num_rows = 0

    def add(self, part: int, examples: Examples) -> int:
        """Fetch a device's examples, and return the row of the first.

        Raises:
            UnsupportedBatch: a batch is not one row of tensors for each example, or the rows have
                other shapes than those of another device.
        """
        batch = batch_of(self._task, examples, range(len(examples)))
        form = self._form or BatchForm.of(batch)
        rows = form.tensors(batch)
        if any(len(row) != len(examples) for row in rows):
            raise UnsupportedBatch("a batch of the task is not one row of tensors for each example")
        if self._form is None:
            self._check_rows(examples, rows, form)
            self._form = form
            self._columns = [row[:0].clone() for row in rows]
        if [_kind(row) for row in rows] != [_kind(column) for column in self._columns]:
            raise UnsupportedBatch("the examples of two devices are of different shapes")
        start, end = self._num_rows, self._num_rows + len(examples)
        for number, row in enumerate(rows):
            column = self._columns[number]
            if end > len(column):
                wider = column.new_empty((max(2 * len(column), end), *column.shape[1:]))
                wider[:start] = column[:start]
                self._columns[number] = column = wider
            column[start:end] = row
        self._num_rows = end
        self.starts[part] = start
        return start

    def _check_rows(self, examples: Examples, rows: Sequence[Tensor], form: BatchForm) -> None:
        """Check that the last example alone has the same row: no padding to the longest."""
        last = len(examples) - 1
        alone = form.tensors(batch_of(self._task, examples, (last,)))
        same = [_kind(one) == _kind(row) for one, row in zip(alone, rows, strict=True)]
        if not all(same) or not all(
            torch.equal(one[0], row[last]) for one, row in zip(alone, rows, strict=True)
        ):
            raise UnsupportedBatch("an example looks different alone than it does in a batch")

    def take(self, rows: Rows) -> list[Tensor]:
        """Return the tensors of these rows [*rows.shape, ...], as copies: a loss may change them.

        Of rows [N] that follow one another a copy is quicker.
        """
        if rows.ndim == 1 and len(rows) and bool(np.all(np.diff(rows) == 1)):
            return [column[int(rows[0]) : int(rows[-1]) + 1].clone() for column in self._columns]
        index = torch.from_numpy(rows.ravel())
        return [
            column.index_select(0, index).view(*rows.shape, *column.shape[1:])
            for column in self._columns
        ]

    def batch(self, tensors: Sequence[Tensor]) -> Any:
        """Return tensors in the form in which the task collates its batches."""
        assert self._form is not None  # something was taken
        return self._form.batch(tensors)


def _kind(rows: Tensor) -> tuple[torch.Size, torch.dtype]:
    return rows.shape[1:], rows.dtype
