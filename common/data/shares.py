"""Each device's examples: as the task splits them, or as a partition deals them out.

For a partition the task is opened whole, once a process, as part 0 of 1. A device's share is then a
view of that (``common.data.rows``), so it costs next to nothing, however many devices there are.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.common.data.batches import SubsetView
from headwater.common.data.partition_spec import Rule
from headwater.common.errors import NoSuchPartition
from headwater.common.task import Examples, Task, open_train_examples

if TYPE_CHECKING:
    from headwater.common.data.partition import Column, Dealing


class ClientDatasets:
    """The shares of all devices of a process; what was dealt out last is kept."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._whole = lru_cache(maxsize=1)(self._open_whole)
        self._dealt = lru_cache(maxsize=1)(self._deal)

    def of(self, rule: Rule | None, *, data: Path | None, part: int, num_parts: int) -> Examples:
        """Return the examples of a device.

        Raises:
            EmptyDataset, MissingData: see ``open_train_examples``.
            MissingColumn, NoSuchPartition: see ``dealt``.
        """
        if rule is None:
            return open_train_examples(self._task, data=data, part=part, num_parts=num_parts)
        dealing = self.dealt(rule, data=data, num_parts=num_parts)
        if not 0 <= part < num_parts:
            raise NoSuchPartition(
                f"part {part} of {num_parts}: parts count from 0", remedy="correct --part"
            )
        return SubsetView(self._whole(data), dealing.positions(part))

    def dealt(self, rule: Rule, *, data: Path | None, num_parts: int) -> Dealing:
        """Return who has which examples.

        Raises:
            MissingColumn: the examples do not tell the column that the rule goes by.
            NoSuchPartition: there are too few examples, labels or values.
        """
        return self._dealt(rule, data, num_parts)

    def column(self, name: str, *, data: Path | None) -> Column:
        """Return a column of all examples.

        Raises:
            MissingColumn: there is none of this name.
        """
        from headwater.common.data.columns import column_of

        return column_of(self._task, self._whole(data), name)

    def _open_whole(self, data: Path | None) -> Examples:
        return open_train_examples(self._task, data=data, part=0, num_parts=1)

    def _deal(self, rule: Rule, data: Path | None, num_parts: int) -> Dealing:
        # Loaded here, as a device whose task splits its own data has no use for it.
        from headwater.common.data.partition import deal

        return deal(
            rule,
            None if rule.column is None else self.column(rule.column, data=data),
            num_examples=len(self._whole(data)),
            num_devices=num_parts,
        )
