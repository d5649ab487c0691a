"""Data sets as users have them: columns of arrays, and a data set for each client.

What cannot be meant in one way only is refused with what to write instead: a DataLoader's batches
are no examples, and a table does not say which column is the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

from headwater.common.errors import TaskError
from headwater.common.task import Examples


class DataOfClients(ConcatDataset[Any]):
    """A data set for each client: all examples together, and ``datasets`` one by one."""

    def of(self, part: int, num_parts: int) -> Examples:
        """Return a client's own data set; of a single client all examples.

        Raises:
            TaskError: there are more or fewer clients than data sets.
        """
        if num_parts == 1:
            return self
        if num_parts != len(self.datasets):
            raise TaskError(
                f"examples are {len(self.datasets)} data sets, and there are {num_parts} clients",
                remedy=f"leave clients= out, or set clients={len(self.datasets)}",
            )
        own: Examples = self.datasets[part]  # type: ignore[assignment] # they have a length
        return own


def data_set_of(given: Any, name: str) -> Any:
    """Return a map-style data set, or a function as it is.

    | given | returned |
    | --- | --- |
    | arrays or tensors of as many rows, as in (X, y) | a TensorDataset; float64 is float32 |
    | a list of torch's data sets | a ``DataOfClients``, one for each client |
    | a data set, or a function that opens one | the same |

    Raises:
        TaskError: it is none of these; the remedy says what to write.
    """
    if isinstance(given, DataLoader):
        raise TaskError(
            f"{name} is a DataLoader, whose batches would be taken for examples",
            remedy=f"{name}=loader.dataset; micro_batch_size=N sets what one pass holds",
        )
    members = given if isinstance(given, list | tuple) else [given]
    table = next((one for one in members if hasattr(one, "iloc")), None)
    if table is not None:
        raise TaskError(
            f"{name} takes arrays, and {'is' if table is given else 'has'} a "
            f"{type(table).__name__}",
            remedy=f"{name}=(table[INPUTS].to_numpy(), table[TARGET].to_numpy())",
        )
    if isinstance(given, int | float) and name == "test":
        raise TaskError(
            f"test is a {type(given).__name__}, and takes a data set",
            remedy=f"test_fraction={given} and evaluate_on_devices=True hold a share of each "
            "client's examples out; or split with torch.utils.data.random_split",
        )
    if isinstance(given, list | tuple) and not given:
        raise TaskError(f"{name} is empty", remedy=f"{name}=(inputs, targets), or a data set")
    if isinstance(given, list | tuple):
        if all(isinstance(one, Tensor | np.ndarray) and one.ndim for one in given):
            return _of_columns(given, name)
        if all(isinstance(one, Dataset) and isinstance(one, Examples) for one in given):
            return DataOfClients(given)
        if all(isinstance(one, DataLoader) for one in given):
            raise TaskError(
                f"{name} is a list of DataLoaders, whose batches would be taken for examples",
                remedy=f"{name}=[loader.dataset for loader in loaders]",
            )
    if isinstance(given, Mapping) and 0 not in given:
        raise TaskError(
            f"{name} is a dict",
            remedy="give a data set, or a list of data sets, one for each client",
        )
    if isinstance(given, Tensor | np.ndarray) or not (
        isinstance(given, Examples) or callable(given)
    ):
        raise TaskError(
            f"{name} is a {type(given).__name__}, without (input, target) pairs",
            remedy="give a map-style data set of (input, target) pairs, arrays as in (X, y), or a "
            "function of --data's path that opens one",
        )
    return given


def are_columns(given: Sequence[Any]) -> bool:
    """Return whether each is arrays of as many rows, as in (X, y), as a client's may be."""
    return all(
        isinstance(one, list | tuple)
        and len(one) > 1
        and all(isinstance(column, Tensor | np.ndarray) and column.ndim for column in one)
        and len({len(column) for column in one}) == 1
        for one in given
    )


def are_clients_columns(given: Any) -> bool:
    """Return whether a list is of each client's arrays: as examples they would not stack."""
    is_list = isinstance(given, list | tuple) and len(given) > 1
    return is_list and are_columns(given) and len({len(one[0]) for one in given}) > 1


CLIENTS_COLUMNS = (
    "if each is a client's, [TensorDataset(X, y) for X, y in pairs]; if each is an example, "
)


def _of_columns(columns: Sequence[Tensor | np.ndarray], name: str) -> TensorDataset:
    lengths = [len(one) for one in columns]
    if len(columns) < 2 or len({*lengths}) > 1:
        raise TaskError(
            f"{name} are arrays of {', '.join(map(str, lengths))} rows",
            remedy=f"give inputs and targets of as many rows: {name}=(X, y)",
        )
    try:
        tensors = [
            torch.as_tensor(np.ascontiguousarray(one) if isinstance(one, np.ndarray) else one)
            for one in columns
        ]
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"{name} has an array of another type than numbers: {error}",
            remedy="make numbers of its texts or objects first",
        ) from error
    return TensorDataset(*(one.float() if one.dtype == torch.float64 else one for one in tensors))
