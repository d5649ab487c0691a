"""Opens each client's examples: as the task itself splits them, or by a partition.

For a partition, the process opens the whole data set once, as part 0 of 1. A client's examples are
then a view of it (``common.data.batches.SubsetView``), which costs a few hundred bytes.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.common.data.batches import SubsetView
from headwater.common.data.partition_spec import PartitionRule
from headwater.common.errors import NoSuchPartition
from headwater.common.task import Examples, Task, open_train_examples

if TYPE_CHECKING:
    from headwater.common.data.partition import Column, Partition


class ClientDatasets:
    """The data sets of all clients of a process; caches the whole data set and one partition."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._whole = lru_cache(maxsize=1)(self._open_whole)
        self._partition = lru_cache(maxsize=1)(self._compute)

    def of(
        self, rule: PartitionRule | None, *, data: Path | None, part: int, num_parts: int
    ) -> Examples:
        """Return the examples of one client.

        Raises:
            EmptyDataset, MissingData: see ``open_train_examples``.
            MissingColumn, NoSuchPartition: see ``partition``.
        """
        if rule is None:
            return open_train_examples(self.task, data=data, part=part, num_parts=num_parts)
        partition = self.partition(rule, data=data, num_parts=num_parts)
        if not 0 <= part < num_parts:
            raise NoSuchPartition(
                f"part {part} of {num_parts}: parts count from 0", remedy="correct --part"
            )
        return SubsetView(self._whole(data), partition.positions(part))

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
