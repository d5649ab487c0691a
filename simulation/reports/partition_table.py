"""Describes the partition of the data: a line before a run, and a table with ``--show-partition``.

The partition is computed before the first round, so an impossible one fails before the run starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from headwater.client.trainer.run_trainer import run_trainer
from headwater.common.data.client_datasets import ClientDatasets
from headwater.common.data.columns import column_of
from headwater.common.data.partition import Column, DisjointPartition
from headwater.common.data.partition_spec import LABEL
from headwater.common.errors import EmptyDataset, HeadwaterError, MissingColumn, SettingsError
from headwater.common.settings.schema import Settings
from headwater.common.system.console import console, print_text
from headwater.common.system.printable import printable
from headwater.common.task import load_task
from headwater.common.wording import counted
from headwater.simulation.fleet.identities import identities_of

# The line describes the first devices; more would take longer and change little.
MAX_DEVICES_IN_LINE = 1000
MAX_ROWS, MAX_VALUES_IN_ROW = 20, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceExamples:
    """The number of one device's examples, and of those with each value of a column."""

    num_examples: int
    by_value: tuple[tuple[str, int], ...]
    """The most frequent value first; empty if the examples have no such column."""
    error: HeadwaterError | None = None
    """Why the device cannot open its data, and is left out."""


def examples_of_devices(settings: Settings) -> Iterator[DeviceExamples]:
    """Yield the examples of each simulated device, from device 0 on.

    Raises:
        HeadwaterError: the task does not exist, or the partition is impossible.
    """
    rule = settings.partition.rule(seed=settings.seed)
    number = settings.simulation.clients
    if rule is None:
        datasets, identities = _datasets(settings), identities_of(settings)
        for part in range(number):
            one = identities.of(part)
            try:
                examples = datasets.of(None, data=one.data, part=one.part, num_parts=one.num_parts)
            except HeadwaterError as error:
                yield DeviceExamples(num_examples=0, by_value=(), error=error)
                continue
            positions = np.arange(len(examples))
            try:
                yield _count_values(column_of(datasets.task, examples, LABEL), positions)
            except MissingColumn:
                yield _count_values(None, positions)
        return
    datasets, data = _datasets(settings), identities_of(settings).of(0).data
    partition = datasets.partition(rule, data=data, num_parts=number)
    try:
        column = datasets.column(rule.column or LABEL, data=data)
    except MissingColumn:
        column = None
    for part in range(number):
        yield _count_values(column, partition.positions(part))


def _count_values(column: Column | None, positions: NDArray[np.int64]) -> DeviceExamples:
    if column is None:
        return DeviceExamples(num_examples=len(positions), by_value=())
    codes, counts = np.unique(column.codes_E[positions], return_counts=True)
    named = zip(column.values_V[codes].tolist(), counts.tolist(), strict=True)
    by_value = sorted(((str(value), count) for value, count in named), key=lambda pair: -pair[1])
    return DeviceExamples(num_examples=len(positions), by_value=tuple(by_value))


def partition_line(settings: Settings) -> str:
    """Return a line about the devices' examples: the first thousand devices, if there are more.

    Raises:
        HeadwaterError: see ``examples_of_devices``; or no device can open its data.
    """
    number = settings.simulation.clients
    tried = list(islice(examples_of_devices(settings), MAX_DEVICES_IN_LINE))
    errors = [one.error for one in tried if one.error is not None]
    devices = [one for one in tried if one.error is None]
    if errors and not devices:
        raise errors[0]
    sizes = sorted(one.num_examples for one in devices)
    text = f"{_range(sizes, 'example')} a device, median {sizes[len(sizes) // 2]:,}"
    if number > len(tried):
        text = f"of {counted(number, 'device')} the first {len(tried):,} have {text}"
    rule = settings.partition.rule(seed=settings.seed)
    kinds = sorted(len(one.by_value) for one in devices)
    if kinds[-1] > 0:
        text += f"; {_range(kinds, 'value')} of {(rule and rule.column) or LABEL}"
    if rule is not None:
        data = identities_of(settings).of(0).data
        partition = _datasets(settings).partition(rule, data=data, num_parts=number)
        if isinstance(partition, DisjointPartition) and partition.num_moved:
            moved = counted(partition.num_moved, "empty device")
            text += f"; {moved} got an example of the largest"
    num_empty = sum(isinstance(error, EmptyDataset) for error in errors)
    if num_empty:
        text += f"; no example in the data of {counted(num_empty, 'device')}"
    if len(errors) > num_empty:
        text += f"; {counted(len(errors) - num_empty, 'device')} cannot open the data"
    return text


def announce_partition(settings: Settings) -> None:
    """Print a line about the devices' examples.

    Raises:
        HeadwaterError: see ``examples_of_devices``.
    """
    title = (
        "data" if identities_of(settings).has_own_data else f"partition {settings.partition.kind}"
    )
    text = f"{title}: {partition_line(settings)}"
    print_text(text)


def show_partition(settings: Settings) -> None:
    """Print a table of the first devices' examples, and the line.

    Raises:
        HeadwaterError: see ``examples_of_devices``.
    """
    rule = settings.partition.rule(seed=settings.seed)
    table = Table(box=None, pad_edge=False)
    for title in ("device", "examples", (rule and rule.column) or LABEL):
        table.add_column(Text(printable(title)), overflow="fold")
    name_of = identities_of(settings).name
    for device, one in enumerate(islice(examples_of_devices(settings), MAX_ROWS)):
        shown = ", ".join(
            f"{value}: {count:,}" for value, count in one.by_value[:MAX_VALUES_IN_ROW]
        )
        more = ", ..." if len(one.by_value) > MAX_VALUES_IN_ROW else ""
        if one.error is not None:
            shown = f"left out: {one.error.code}: {' '.join(one.error.message.split())}"
        table.add_row(name_of(device), f"{one.num_examples:,}", Text(printable(shown + more)))
    console.print(table)
    announce_partition(settings)


def _range(numbers: list[int], noun: str) -> str:
    first, last = numbers[0], numbers[-1]
    return f"{'' if first == last else f'{first:,} to '}{counted(last, noun)}"


def _datasets(settings: Settings) -> ClientDatasets:
    """Return the data sets of the devices: those in use, if the devices are in this process."""
    if settings.simulation.engine in ("in-process", "ray"):
        return run_trainer(settings).datasets
    return ClientDatasets(load_task(_task(settings)))


def _task(settings: Settings) -> str:
    if settings.task is None:
        raise SettingsError("no task is set", remedy="name it with --task FILE.py:Class")
    return settings.task
