"""Who holds what: a line before a run whose data a partition deals out, and a table on request.

It is worked out before the first round, so a partition that cannot be is an error before anything
has begun.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from headwater.client.training.trainer import trainer_of
from headwater.common.data.columns import column_of
from headwater.common.data.partition import Column, DisjointPartition
from headwater.common.data.partition_spec import LABEL
from headwater.common.data.shares import ClientDatasets
from headwater.common.errors import MissingColumn, SettingsError
from headwater.common.settings.schema import Settings
from headwater.common.system.console import console
from headwater.common.task import load_task, open_train_examples

# Devices that the line speaks of; more would tell no more.
LOOKED_AT = 1000
ROWS, VALUES_IN_ROW = 20, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What one device holds: how many examples, and how many of each value that it has."""

    num_examples: int
    by_value: tuple[tuple[str, int], ...]
    """The most frequent value first; empty where the examples have no such column."""


def held_by_each(settings: Settings) -> Iterator[Held]:
    """Yield what each simulated device holds, from device 0 on.

    Raises:
        HeadwaterError: the task or its data are not there, or the partition cannot be.
    """
    rule = settings.partition.rule(seed=settings.seed)
    number = settings.simulation.clients
    if rule is None:
        task = load_task(_task(settings))
        for part in range(number):
            examples = open_train_examples(task, data=None, part=part, num_parts=number)
            everything = np.arange(len(examples))
            try:
                yield _held(column_of(task, examples, LABEL), everything)
            except MissingColumn:
                yield _held(None, everything)
        return
    shares = _shares(settings)
    dealing = shares.partition(rule, data=None, num_parts=number)
    try:
        column = shares.column(rule.column or LABEL, data=None)
    except MissingColumn:
        column = None
    for part in range(number):
        yield _held(column, dealing.positions(part))


def _held(column: Column | None, positions: NDArray[np.int64]) -> Held:
    if column is None:
        return Held(num_examples=len(positions), by_value=())
    codes, counts = np.unique(column.codes_E[positions], return_counts=True)
    named = zip(column.values_V[codes].tolist(), counts.tolist(), strict=True)
    by_value = sorted(((str(value), count) for value, count in named), key=lambda pair: -pair[1])
    return Held(num_examples=len(positions), by_value=tuple(by_value))


def line(settings: Settings) -> str:
    """Say in a line what the devices hold: the first thousand of them, if there are more.

    Raises:
        HeadwaterError: see ``held_by_each``.
    """
    number = settings.simulation.clients
    held = list(islice(held_by_each(settings), LOOKED_AT))
    sizes = sorted(one.num_examples for one in held)
    said = f"{_range(sizes)} examples a device, median {sizes[len(sizes) // 2]:,}"
    if number > len(held):
        said = f"of {number:,} devices the first {len(held):,} have {said}"
    rule = settings.partition.rule(seed=settings.seed)
    kinds = sorted(len(one.by_value) for one in held)
    if kinds[-1] > 0:
        said += f"; {_range(kinds)} values of {(rule and rule.column) or LABEL}"
    if rule is not None:
        dealing = _shares(settings).partition(rule, data=None, num_parts=number)
        if isinstance(dealing, DisjointPartition) and dealing.num_moved:
            said += f"; {dealing.num_moved:,} would have had none, and got one of the largest's"
    return said


def announce_partition(settings: Settings) -> None:
    """Print what the devices hold, in a line.

    Raises:
        HeadwaterError: see ``held_by_each``.
    """
    said = f"partition {settings.partition.kind}: {line(settings)}"
    console.print(said, soft_wrap=True, markup=False, emoji=False)


def show(settings: Settings) -> None:
    """Print what the first devices hold, one by one, and the line.

    Raises:
        HeadwaterError: see ``held_by_each``.
    """
    rule = settings.partition.rule(seed=settings.seed)
    table = Table(box=None, pad_edge=False)
    for title in ("device", "examples", (rule and rule.column) or LABEL):
        table.add_column(Text(title))
    for device, held in enumerate(islice(held_by_each(settings), ROWS)):
        shown = ", ".join(f"{value}: {count:,}" for value, count in held.by_value[:VALUES_IN_ROW])
        more = ", ..." if len(held.by_value) > VALUES_IN_ROW else ""
        table.add_row(str(device), f"{held.num_examples:,}", Text(shown + more))
    console.print(table)
    announce_partition(settings)


def _range(numbers: list[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _shares(settings: Settings) -> ClientDatasets:
    """Return the shares of this process' devices, if they are in this process."""
    if settings.simulation.engine == "in-process":
        trainer = trainer_of(
            _task(settings),
            replace_batch_norm=settings.model.replace_batch_norm,
            check_task=settings.check_task,
        )
        return trainer.datasets
    return ClientDatasets(load_task(_task(settings)))


def _task(settings: Settings) -> str:
    if settings.task is None:
        raise SettingsError("no task is set", remedy="name it with --task FILE.py:Class")
    return settings.task
