"""What a task may return as its examples: a map-style data set, or a stream that is read once.

A client takes its examples in a new order each epoch, goes on after a restart where it was, and
holds some out. A stream allows none of that, so its first examples are read into memory. A task may
write to an example or a batch: what is used twice is copied.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from headwater.common.errors import TaskError
from headwater.common.wording import bytes_text

log = logging.getLogger(__name__)

MAX_EXAMPLES, MAX_BYTES = 10_000, 256 << 20
MAX_COLUMNS = 4  # of a tuple such as (inputs, targets); more tensors are examples
OBJECT_BYTES = 64  # of a number or another small object


def as_examples(found: Any, what: str) -> Any:
    """Return what ``what`` returned as a map-style data set.

    Of an ``IterableDataset``, an iterator or a generator the first ``MAX_EXAMPLES`` examples are
    read, or fewer that take ``MAX_BYTES``; the log says so.

    Raises:
        TaskError: a DataLoader, columns instead of examples, or nothing that holds examples.
    """
    if isinstance(found, DataLoader):
        raise TaskError(
            f"{what} returned a DataLoader, which gives batches in an order of its own",
            remedy="return its data set: micro-batches and their order are the plan's",
        )
    columns = _columns_in(found)
    if columns is not None:
        raise TaskError(
            f"{what} returned {columns}: [0] is a column of them, and not the first example",
            remedy="return torch.utils.data.TensorDataset(inputs, targets), or a list with one "
            "entry for each example, as list(zip(inputs, targets)) is",
        )
    is_stream = isinstance(found, IterableDataset) or not hasattr(found, "__getitem__")
    if is_stream and isinstance(found, Iterable):
        return _read(found, what)
    if is_stream or not hasattr(found, "__len__"):
        raise TaskError(
            f"{what} returned {type(found).__name__}, which has no len() and no [position]",
            remedy="return a data set, a list of examples, or a stream of them (docs/task.md)",
        )
    if _reads_by_inherited(type(found)):
        _log_unread(type(found).__name__)
    return found


def _reads_by_inherited(kind: type) -> bool:
    """Return whether a class's own ``__getitem__`` is not called.

    A class that inherits ``__getitems__``, as from torch's ``StackDataset``, is read by that, as
    torch's DataLoader reads it, too.
    """
    own = [vars(one) for one in kind.__mro__]
    one = next((at for at, names in enumerate(own) if "__getitem__" in names), len(own))
    many = next((at for at, names in enumerate(own) if "__getitems__" in names), -1)
    return one < many


@functools.cache
def _log_unread(name: str) -> None:
    log.warning(
        "%s.__getitem__ is not called: the class inherits __getitems__, by which torch's "
        "DataLoader reads it, too; override both, or set __getitems__ = None",
        name,
    )


def _columns_in(found: Any) -> str | None:
    """Return what holds one entry for each column, such as (inputs, targets); None for examples."""
    if hasattr(found, "iloc") and getattr(found, "ndim", 1) == 2:
        return "a table"
    if isinstance(found, Mapping):
        return None if 0 in found or not found else f"a dict of {len(found)} entries by name"
    if not isinstance(found, list | tuple) or not 2 <= len(found) <= MAX_COLUMNS:
        return None
    if not all(isinstance(one, Tensor | np.ndarray) and one.ndim > 0 for one in found):
        return None
    kinds = {(one.ndim, str(one.dtype).removeprefix("torch.")) for one in found}
    num_rows = {len(one) for one in found}
    # A list of few texts of one length holds examples.
    if (
        len(num_rows) > 1
        or max(num_rows) <= len(found)
        or (len(kinds) == 1 and type(found) is list)
    ):
        return None
    return f"{len(found)} columns of {max(num_rows):,} rows each"


class KeptExamples(Dataset[Any]):
    """Examples of a stream; each read gives a copy, as the stream would give a new one."""

    def __init__(self, examples: list[Any]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, position: int) -> Any:
        return copied(self._examples[position])


def _read(stream: Iterable[Any], what: str) -> KeptExamples:
    examples: list[Any] = []
    num_bytes, is_whole = 0, True
    for example in stream:
        if len(examples) >= MAX_EXAMPLES or num_bytes >= MAX_BYTES:
            is_whole = False
            break
        examples.append(example)
        num_bytes += _bytes_of(example)
    _log_stream(what, len(examples), num_bytes, is_whole)
    return KeptExamples(examples)


@functools.cache
def _log_stream(what: str, num_examples: int, num_bytes: int, is_whole: bool) -> None:
    """Log, once in a process for each size, what was read."""
    log.warning(
        "%s returned a stream: its %s%s examples are read into memory (%s) and used in every "
        "epoch%s",
        what,
        "" if is_whole else "first ",
        f"{num_examples:,}",
        bytes_text(num_bytes),
        "" if is_whole else "; the rest of the stream is not used",
    )


def _bytes_of(example: Any) -> int:
    if isinstance(example, Tensor | np.ndarray):
        return example.nbytes
    if isinstance(example, str | bytes | bytearray):
        return len(example)
    if isinstance(example, Mapping):
        return sum(map(_bytes_of, example.values()))
    if isinstance(example, list | tuple):
        return sum(map(_bytes_of, example))
    return OBJECT_BYTES


def copied(value: Any) -> Any:
    """Copy the tensors and arrays of an example or a batch, and the dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    if type(value) is list:
        return [copied(item) for item in value]
    if type(value) is tuple:
        return tuple(copied(item) for item in value)
    return value
