"""Finds a column of a data set, such as its labels, authors or regions, for a partition.

A task names its columns in a method ``columns``; the labels of common data sets are found without
it. No example is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from headwater.common.data.partition import Column
from headwater.common.data.partition_spec import LABEL
from headwater.common.errors import MissingColumn
from headwater.common.task import Examples, Task
from headwater.common.user_code.failures import described

# The names that data sets give their labels; torchvision's use targets.
LABEL_ATTRIBUTES = ("label", "labels", "targets")
INTEGER_KINDS, TEXT_KINDS = "biu", "US"


def column_of(task: Task, examples: Examples, name: str) -> Column:
    """Return a column of the examples; its sorted values are numbered from 0.

    Searched in this order: ``task.columns(examples)[name]``; for ``label``, the second tensor of a
    ``TensorDataset`` if it holds one integer per example; ``examples[name]`` if the data set lists
    it in ``column_names``, as Hugging Face's do; an attribute ``name`` of the data set, for
    ``label`` also ``labels`` or ``targets``. For a ``Subset``, its data set is searched.

    Raises:
        MissingColumn: there is no such column, or it has not one integer or text for each example.
    """
    kind = type(task).__name__
    named = _task_columns(task, examples)
    values = named[name] if named is not None and name in named else _own_column(examples, name)
    if values is None:
        others = f"; there are {', '.join(map(str, named))}" if named else ""
        raise MissingColumn(f"the examples of {kind} have no column {name!r}{others}")
    return _numbered(values, len(examples), where=f"the column {name!r} of {kind}")


def _task_columns(task: Task, examples: Examples) -> Mapping[str, Any] | None:
    """Return the columns that the task's own method gives; None if it has no such method."""
    columns = getattr(task, "columns", None)
    if columns is None:
        return None
    kind = type(task).__name__
    try:
        named = columns(examples)
    except Exception as error:
        raise MissingColumn(f"{kind}.columns: {described(error)}") from error
    if not isinstance(named, Mapping):
        raise MissingColumn(
            f"{kind}.columns must return a dict by name, found {type(named).__name__}"
        )
    return named


def _own_column(examples: Examples, name: str) -> Any:
    """Return the data set's own column; None if it has none of this name."""
    if isinstance(examples, Subset):
        values = _own_column(cast(Examples, examples.dataset), name)
        return None if values is None else _array(values)[np.asarray(examples.indices, np.int64)]
    if isinstance(examples, ConcatDataset):
        parts = [_own_column(cast(Examples, one), name) for one in examples.datasets]
        return None if any(one is None for one in parts) else np.concatenate([*map(_array, parts)])
    if isinstance(examples, TensorDataset) and name == LABEL and len(examples.tensors) > 1:
        second = examples.tensors[1]
        is_label = second.ndim == 1 and not second.is_floating_point()
        return second if is_label else None
    if name in (getattr(examples, "column_names", None) or ()):
        return cast(Any, examples)[name]
    for attribute in LABEL_ATTRIBUTES if name == LABEL else (name,):
        values = getattr(examples, attribute, None)
        if hasattr(values, "__len__") and hasattr(values, "__getitem__"):
            return values
    return None


def _numbered(values: Any, num_examples: int, *, where: str) -> Column:
    array = _array(values)
    if array.size != num_examples or array.ndim not in (1, 2):
        raise MissingColumn(
            f"{where} must have one value for each of {num_examples:,} examples, found "
            f"{' x '.join(map(str, array.shape)) or 'one value'}"
        )
    if array.dtype.kind not in INTEGER_KINDS + TEXT_KINDS:
        odd = [one for one in array.reshape(-1) if not isinstance(one, int | str | np.integer)]
        example = f": {odd[0]!r}" if odd else ""
        raise MissingColumn(
            f"{where} must hold integers or texts, found {array.dtype}{example}",
            remedy="let the task's columns(examples) return its classes, see docs/data.md",
        )
    distinct, codes = np.unique(array.reshape(-1), return_inverse=True)
    return Column(codes_E=codes.reshape(-1).astype(np.int64), values_V=distinct)


def _array(values: Any) -> np.ndarray[Any, Any]:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    is_plain = isinstance(values, np.ndarray) and values.dtype.kind != "O"
    return np.asarray(values if is_plain else list(values))  # objects, as pandas keeps texts
