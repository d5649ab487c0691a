"""Turns a task's examples into batches.

A client's examples may be a subset of a data set that the process holds once (``SubsetView``). A
batch of a plain ``TensorDataset`` is taken from its tensors by one indexing operation each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from headwater.common.example_streams import copied
from headwater.common.task import Examples, Task

READS = ("__getitem__", "__getitems__")
"""The methods by which a data set's examples are read."""


class SubsetView:
    """One client's subset of a data set that the process holds once; a view.

    ``torch.utils.data.Subset`` does the same with a list of Python integers. Here the positions are
    an array, which may be a view of one array for all clients. A client then costs a few hundred
    bytes, and ``batch_of`` indexes a ``TensorDataset`` once for a whole micro-batch.
    """

    def __init__(self, whole: Examples, positions: NDArray[np.int64]) -> None:
        self.whole = whole
        self.positions = positions

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, position: int) -> Any:
        return self.whole[int(self.positions[position])]

    def __getitems__(self, positions: Sequence[int]) -> Sequence[Any]:
        chosen: list[int] = self.in_whole(positions).tolist()
        fetch_all = getattr(self.whole, "__getitems__", None)
        if fetch_all is not None:
            return list(fetch_all(chosen))
        return [self.whole[position] for position in chosen]

    def in_whole(self, positions: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of these examples in the whole data set, as a new array."""
        return self.positions[np.asarray(positions, dtype=np.int64)]


def dataset_tensors(task: Task, examples: Examples) -> Sequence[Tensor] | None:
    """Return the tensors whose indexed rows are exactly the batches.

    None unless the data set is a ``TensorDataset`` (or views of one) that reads its examples as
    torch's does, and the task does not collate.
    """
    while isinstance(examples, SubsetView):
        examples = examples.whole
    kind = type(examples)
    if not issubclass(kind, TensorDataset) or hasattr(task, "collate"):
        return None
    if any(getattr(kind, one, None) is not getattr(TensorDataset, one, None) for one in READS):
        return None
    tensors: Sequence[Tensor] | None = getattr(examples, "tensors", None)
    return tensors


def batch_of(task: Task, examples: Examples, positions: Sequence[int] | NDArray[np.int64]) -> Any:
    """Fetch and collate the examples at ``positions``, in that order."""
    tensors = dataset_tensors(task, examples)
    rows = np.array(positions, dtype=np.int64)
    while isinstance(examples, SubsetView):
        rows, examples = examples.in_whole(rows), examples.whole
    if tensors is not None:
        index = torch.from_numpy(rows)
        return [tensor.index_select(0, index) for tensor in tensors]
    collate = getattr(task, "collate", torch.utils.data.default_collate)
    fetch_all = getattr(examples, "__getitems__", None)
    if fetch_all is not None:
        return collate([_own(one) for one in fetch_all(rows.tolist())])
    return collate([_own(one) for one in _read(examples, rows.tolist())])


def _read(examples: Examples, positions: Sequence[int]) -> list[Any]:
    """Read the examples of a batch; copies of those of a data set that fills one memory each time.

    A video's decoder does that: all examples of a batch would be its last one.
    """
    found: list[Any] = []
    versions: list[tuple[Tensor, int]] = []
    for position in positions:
        found.append(examples[position])
        if len(found) == 1:
            versions = [(one, one._version) for one in _parts(found[0]) if _has_version(one)]
        elif len(found) == 2 and (
            any(tensor._version != version for tensor, version in versions)
            or any(one is other for one in _arrays(found[0]) for other in _arrays(found[1]))
        ):
            return [copied(examples[position]) for position in positions]
    return found


def _parts(example: Any) -> Iterable[Any]:
    if isinstance(example, Mapping):
        return example.values()
    return example if isinstance(example, list | tuple) else (example,)


def _has_version(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()


def _arrays(example: Any) -> list[Any]:
    return [one for one in _parts(example) if isinstance(one, np.ndarray)]


def _own(example: Any) -> Any:
    """Return a copy of a dict or list: a ``collate`` may pop from it what the data set keeps."""
    return example.copy() if type(example) in (dict, list) else example


class UnsupportedBatch(Exception):
    """The examples of several clients cannot be computed in one batch; the message says why."""


@dataclass(frozen=True, slots=True)
class BatchForm:
    """How a task's batches hold their tensors: one alone, a list or tuple, or a dict by name."""

    kind: type
    names: tuple[Any, ...] = ()

    @staticmethod
    def of(batch: Any) -> BatchForm:
        """Return a batch's form.

        Raises:
            UnsupportedBatch: it holds something else, a sparse tensor, or one without a first axis.
        """
        kind = type(batch)
        is_dict = kind is dict
        values = list(batch.values()) if is_dict else list(batch) if kind in (list, tuple) else []
        if _has_rows(batch):
            return BatchForm(Tensor)
        if not values or not all(map(_has_rows, values)):
            raise UnsupportedBatch(f"a batch of the task is {kind.__name__}, not rows of tensors")
        return BatchForm(kind, tuple(batch) if is_dict else ())

    def tensors(self, batch: Any) -> list[Tensor]:
        """Return the tensors of a batch of this form; those of a dict by name, in any order.

        Raises:
            UnsupportedBatch: it has another form.
        """
        other = BatchForm.of(batch)
        if other.kind is not self.kind or set(other.names) != set(self.names):
            raise UnsupportedBatch("the batches of two devices have different forms")
        if self.kind is Tensor:
            return [batch]
        return [batch[name] for name in self.names] if self.names else list(batch)

    def batch(self, tensors: Sequence[Tensor]) -> Any:
        """Return a batch of this form that holds other tensors."""
        if self.kind is Tensor:
            return tensors[0]
        return dict(zip(self.names, tensors, strict=True)) if self.names else self.kind(tensors)


def _has_rows(value: Any) -> bool:
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    return is_dense and value.ndim > 0
