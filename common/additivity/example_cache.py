"""Examples that are fetched once, so that a data set with random augmentation can be checked.

A data set may answer differently each time: crops, flips, noise. Sums over a batch and over its
examples can be compared only if both see the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.common.data.batches import BatchForm, UnsupportedBatch, batch_of, dataset_tensors
from headwater.common.data.nested_values import parts_by_name, stored_tensors
from headwater.common.example_streams import copied
from headwater.common.task import Examples, Task


class ExampleCache:
    """Makes batches of examples, and fetches each example once.

    A collate that draws random numbers is called once, by ``freeze``; later batches are its rows.
    """

    def __init__(self, task: Task, examples: Examples) -> None:
        self.examples = examples
        self._task = task
        self._fetched: dict[int, Any] = {}
        self._is_plain = dataset_tensors(task, examples) is not None
        self._frozen: Any = None
        self._rows: dict[int, int] = {}

    def batch(self, positions: Sequence[int]) -> Any:
        """Return a batch of these examples; the caller may change it."""
        if self._frozen is not None and all(p in self._rows for p in positions):
            form = BatchForm.of(self._frozen)
            index = torch.tensor([self._rows[p] for p in positions])
            rows = [tensor.index_select(0, index) for tensor in form.tensors(self._frozen)]
            return form.batch(rows)
        if self._is_plain:
            return batch_of(self._task, self.examples, positions)
        for position in positions:
            if position not in self._fetched:
                self._fetched[position] = _fetch(self.examples, position)
        collate = getattr(self._task, "collate", torch.utils.data.default_collate)
        # A collate may take the labels out of an example's dict, a loss may write to what it gets.
        return collate([copied(self._fetched[position]) for position in positions])

    def freeze(self, positions: Sequence[int]) -> bool:
        """Collate these examples once, if collate draws random numbers.

        Return False if such a batch is not rows of tensors, and cannot be split.
        """
        if not hasattr(self._task, "collate"):
            return True
        first = self.batch(positions)
        if same(first, self.batch(positions)):
            return True
        try:
            tensors = BatchForm.of(first).tensors(first)
        except UnsupportedBatch:
            return False
        if any(len(tensor) != len(positions) for tensor in tensors):
            return False
        self._frozen, self._rows = first, {p: row for row, p in enumerate(positions)}
        return True

    @property
    def is_frozen(self) -> bool:
        """Whether collate draws random numbers."""
        return self._frozen is not None

    def is_fixed(self, position: int) -> bool:
        """Return whether an example is the same each time it is fetched."""
        if not self._is_plain and position not in self._fetched:
            self._fetched[position] = _fetch(self.examples, position)
        return not self.differs_each_time(position)

    def differs_each_time(self, position: int) -> bool:
        """Return whether an example differs from what it was when it was fetched first."""
        if self._is_plain or position not in self._fetched:
            return False
        return not same(self._fetched[position], _fetch(self.examples, position))


def same(one: Any, other: Any) -> bool:
    """Return whether two examples or batches have equal values; a NaN equals a NaN.

    Objects whose ``==`` gives no answer, as that of a dataclass of tensors, are equal if what they
    hold is equal; so are those of a class without an ``==`` of its own.
    """
    return _same(one, other, frozenset())


def _same(one: Any, other: Any, outer: frozenset[tuple[int, int]]) -> bool:
    """Compare within the pairs of objects ``outer``, which may hold each other."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _same_tensors(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.dtype.kind != "O":
            is_number = one.dtype.kind in "fc" and one.dtype == other.dtype
            return np.array_equal(one, other, equal_nan=is_number)
        return one.shape == other.shape and _same([*one.flat], [*other.flat], outer)
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (one != one and other != other)
    pair = id(one), id(other)
    if pair in outer:
        return True
    outer |= {pair}
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[k], other[k], outer) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_same(a, b, outer) for a, b in pairs)
    held = parts_by_name(one)
    is_compared = not is_dataclass(one) and getattr(type(one), "__eq__", None) is not object.__eq__
    if is_compared or not held:
        try:
            return bool(one == other)
        except Exception:  # it compares tensors or arrays: it has no answer
            if not held:
                raise
    return type(one) is type(other) and _same(held, parts_by_name(other), outer)


def _same_tensors(one: Tensor, other: Tensor) -> bool:
    # A nested tensor has no shape, or one that names its ragged axis, another one each time.
    kinds = [(t.is_nested or t.shape, t.dtype, t.layout) for t in (one, other)]
    if one.layout is torch.strided and not one.is_nested and not other.is_nested:
        equal = kinds[0] == kinds[1] and (one == other) | ((one != one) & (other != other))
        return bool(equal is not False and equal.all())
    parts = stored_tensors(one), stored_tensors(other)
    return (
        kinds[0] == kinds[1] and len(parts[0]) == len(parts[1]) and all(map(_same_tensors, *parts))
    )


def _fetch(examples: Examples, position: int) -> Any:
    fetch_all = getattr(examples, "__getitems__", None)
    return examples[position] if fetch_all is None else fetch_all([position])[0]
