"""What a data set says of its examples beside what the model sees: a label, an author, a region.

A partition goes by one such column. A task names its columns itself, in a method ``columns``; what
the usual data sets call their labels is found without it. No example is opened for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from headwater.common.data.partition import Column
from headwater.common.data.partition_spec import LABEL
from headwater.common.errors import MissingColumn
from headwater.common.task import Examples, Task

# What data sets call their labels: torchvision's say targets.
LABEL_ATTRIBUTES = ("label", "labels", "targets")
WHOLE_NUMBERS, TEXTS = "biu", "US"


def column_of(task: Task, examples: Examples, name: str) -> Column:
    """Return a column of the examples, its values numbered in their own order from 0.

    Looked for, in this order: ``task.columns(examples)[name]``; the second of a ``TensorDataset``'s
    tensors, if it holds one whole number an example, as ``label``; ``examples[name]`` if it is one
    of the data set's ``column_names``, as Hugging Face's have them; an attribute ``name`` of the
    data set, for ``label`` also ``labels`` or ``targets``. Of a ``Subset`` that of its data set.

    Raises:
        MissingColumn: it is nowhere, or has not one whole number or text for each example.
    """
    kind = type(task).__name__
    told = _told(task, examples)
    values = told[name] if told is not None and name in told else _found(examples, name)
    if values is None:
        others = f"; there are {', '.join(map(str, told))}" if told else ""
        raise MissingColumn(f"the examples of {kind} have no column {name!r}{others}")
    return _numbered(values, len(examples), where=f"the column {name!r} of {kind}")


def _told(task: Task, examples: Examples) -> Mapping[str, Any] | None:
    """Return what the task itself says, if it has a method for it."""
    columns = getattr(task, "columns", None)
    if columns is None:
        return None
    kind = type(task).__name__
    try:
        told = columns(examples)
    except Exception as error:
        raise MissingColumn(f"{kind}.columns: {type(error).__name__}: {error}") from error
    if not isinstance(told, Mapping):
        raise MissingColumn(
            f"{kind}.columns must return a dict by name, found {type(told).__name__}"
        )
    return told


def _found(examples: Examples, name: str) -> Any:
    """Return a column that the data set itself has; None if it has none of this name."""
    if isinstance(examples, Subset):
        values = _found(cast(Examples, examples.dataset), name)
        return None if values is None else _array(values)[np.asarray(examples.indices, np.int64)]
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
    if array.dtype.kind not in WHOLE_NUMBERS + TEXTS:
        raise MissingColumn(
            f"{where} must hold whole numbers or texts, found {array.dtype}",
            remedy="let the task's columns(examples) return classes of it, see docs/data.md",
        )
    found, codes = np.unique(array.reshape(-1), return_inverse=True)
    return Column(codes_E=codes.reshape(-1).astype(np.int64), values_V=found)


def _array(values: Any) -> np.ndarray[Any, Any]:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    return np.asarray(values if isinstance(values, np.ndarray) else list(values))
