"""Opens each client's examples: as the task itself splits them, or by a partition.

For a partition, the process opens the whole data set once, as part 0 of 1. A client's examples are
then a view of it (``common.data.batches.SubsetView``), which costs a few hundred bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from headwater.common.data.batches import SubsetView
from headwater.common.data.partition_spec import PartitionRule
from headwater.common.errors import NoSuchPartition
from headwater.common.task import Examples, Task, open_train_examples

if TYPE_CHECKING:
    from headwater.common.data.partition import Column, Partition


log = logging.getLogger(__name__)

_ABSENT = object()
MAX_COMPARED = 1000
"""Values of an attribute that are compared: more are a data set."""


class ClientDatasets:
    """The data sets of all clients of a process; caches the whole data set and one partition."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._whole = lru_cache(maxsize=1)(self._open_whole)
        self._partition = lru_cache(maxsize=1)(self._compute)
        self._kept: Mapping[str, Any] = {}
        """What the last opening has put on the task, of the client ``_kept_part``."""
        self._kept_part: int | None = None
        self._has_warned = False

    def of(
        self, rule: PartitionRule | None, *, data: Path | None, part: int, num_parts: int
    ) -> Examples:
        """Return the examples of one client.

        Raises:
            EmptyDataset, MissingData: see ``open_train_examples``.
            MissingColumn, NoSuchPartition: see ``partition``.
        """
        if rule is None:
            before = dict(getattr(self.task, "__dict__", {}))
            found = open_train_examples(self.task, data=data, part=part, num_parts=num_parts)
            self._compare(before, part)
            return found
        partition = self.partition(rule, data=data, num_parts=num_parts)
        if not 0 <= part < num_parts:
            raise NoSuchPartition(
                f"part {part} of {num_parts}: parts count from 0", remedy="correct --part"
            )
        return SubsetView(self._whole(data), partition.positions(part))

    def _compare(self, before: Mapping[str, Any], part: int) -> None:
        """Log once which attributes of the task are another client's from now on.

        All clients of a process have one task, so the last one that is opened decides for all.
        """
        now = getattr(self.task, "__dict__", {})
        kept = {name: one for name, one in now.items() if one is not before.get(name, _ABSENT)}
        other = self._kept if part != self._kept_part else {}
        names = [name for name, one in kept.items() if name in other and _differ(one, other[name])]
        self._kept, self._kept_part = kept, part
        if names and not self._has_warned:
            self._has_warned = True
            log.warning(
                "train_examples keeps %s on the task, which all simulated clients of a process "
                "share: the one that was opened last decides for all; return it with each example, "
                "or take --engine grpc, where each client has a process",
                ", ".join(names),
            )

    def partition(self, rule: PartitionRule, *, data: Path | None, num_parts: int) -> Partition:
        """Return the partition of all examples among ``num_parts`` clients.

        Raises:
            MissingColumn: the examples do not have the column that the rule needs.
            NoSuchPartition: there are too few examples, labels or values.
        """
        return self._partition(rule, data, num_parts)

    def column(self, name: str, *, data: Path | None) -> Column:
        """Return a column of all examples.

        Raises:
            MissingColumn: there is no column of this name.
        """
        from headwater.common.data.columns import column_of

        return column_of(self.task, self._whole(data), name)

    def _open_whole(self, data: Path | None) -> Examples:
        return open_train_examples(self.task, data=data, part=0, num_parts=1)

    def _compute(self, rule: PartitionRule, data: Path | None, num_parts: int) -> Partition:
        # Imported here: a device whose task splits its own data never needs it.
        from headwater.common.data.partition import partition_examples

        return partition_examples(
            rule,
            None if rule.column is None else self.column(rule.column, data=data),
            num_examples=len(self._whole(data)),
            num_devices=num_parts,
        )


def _differ(one: Any, other: Any) -> bool:
    """Return whether two values of an attribute are known to differ."""
    if type(one) is not type(other):
        return True
    if isinstance(one, Tensor | np.ndarray):
        if one.shape != other.shape:
            return True
        return max(one.shape, default=1) <= MAX_COMPARED and bool((one != other).any())
    if isinstance(one, int | float | str):
        return bool(one != other)
    if isinstance(one, dict | list | tuple | set) and len(one) <= MAX_COMPARED:
        values = [*one, *other, *(one.values() if isinstance(one, dict) else ())]
        return all(isinstance(value, int | float | str) for value in values) and one != other
    return False
