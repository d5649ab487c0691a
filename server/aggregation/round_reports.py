"""A round's sums: the reports of its updates as columns, and the result of adding them up."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.common.estimates.gradient_noise import NoiseSums
from headwater.common.messages import UpdateReport
from headwater.common.model.vectors import CHUNK
from headwater.common.task import MAX_METRICS
from headwater.server.planning.vitals_columns import VitalsColumns

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MOST_SUMMED = 2**62
"""Of a client's summed weight in a column; what counts of it is far below."""
ALONE = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundSum:
    """A round's sums over its updates, in plain text or unmasked, and the mean gradient.

    ``mean_P`` is divided once, by ``weight``, which the updates sent. ``summed_weight`` is what
    their losses were summed over; it differs from ``weight`` only with dataset weighting. ``names``
    are the clients whose updates are included. ``num_refused`` counts the examples that these
    clients left out. ``num_clipped`` counts the values that a fixed-point range cut off; None
    without masking. ``bit_sum`` is the sum of the clients' bits on the clip norm with its noise;
    None if the clip norm does not follow them. ``unused`` are the places of the trained tensors
    that no client's loss used: their gradient is None in a plain loop, and not zero. ``sums`` are
    those beside the model's, in float64, by name.
    """

    names: tuple[str, ...]
    mean_P: Tensor = field(repr=False)
    weight: int
    num_examples: float
    summed_weight: float
    loss_sum: float
    metric_sums: Mapping[str, float]
    noise: NoiseSums | None
    num_refused: float = 0
    num_clipped: int | None = None
    bit_sum: float | None = None
    unused: tuple[int, ...] = ()
    sums: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def loss(self) -> float:
        """The mean loss per unit of weight."""
        return self.loss_sum / self.weight


def in_all(sets: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the numbers that are in each of these sets, rising; none of no set."""
    first = sets[0] if sets else ()
    if all(one == first for one in sets):
        return tuple(first)
    return tuple(sorted(frozenset(first).intersection(*sets)))


def added_sums(sums: Sequence[RoundSum], times: Sequence[int]) -> RoundSum:
    """Add the sums of disjoint clients; each counts so many times in the mean, and once elsewhere.

    The mean is sum(times x weight x mean) / sum(times x weight), taken in float64 and rounded once
    to float32, in the memory of the first. A single sum is returned as it is: its factor cancels.
    """
    first, *others = sums
    if not others:
        return first
    weights = [number * one.weight for number, one in zip(times, sums, strict=True)]
    parts = [torch.split(one.mean_P, CHUNK) for one in sums]
    for chunks in zip(*parts, strict=True):
        total = sum(weight * chunk.double() for weight, chunk in zip(weights, chunks, strict=True))
        chunks[0].copy_(total / sum(weights))
    return replace(
        first,
        names=tuple(chain.from_iterable(one.names for one in sums)),
        weight=sum(one.weight for one in sums),
        num_examples=sum(one.num_examples for one in sums),
        summed_weight=sum(one.summed_weight for one in sums),
        loss_sum=math.fsum(one.loss_sum for one in sums),
        metric_sums={
            name: math.fsum(one.metric_sums.get(name, 0.0) for one in sums)
            for name in first.metric_sums
        },
        noise=None,
        num_refused=sum(one.num_refused for one in sums),
        num_clipped=sum(one.num_clipped or 0 for one in sums),
        unused=in_all([one.unused for one in sums]),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportColumns:
    """The reports of several updates as columns, with an entry for each client.

    A metric's column has NaN for a client that does not report it. ``sent_weight`` is the weight
    of an update, ``summed_weight`` the weight that its steps summed the loss over; they differ only
    with dataset weighting.
    """

    round: int
    names: Sequence[str]
    num_examples: Ints
    num_refused: Sequence[int]
    num_steps: Ints
    sent_weight: Ints
    summed_weight: Ints
    loss_sum: Floats
    metric_sums: Mapping[str, Floats]
    seconds: Floats
    vitals: VitalsColumns

    @staticmethod
    def of(*reports: UpdateReport) -> ReportColumns:
        """Return the columns of reports of one round; at least one report."""
        metrics = {name for report in reports for name in report.metric_sums}
        summed = [min(report.summed_weight, MOST_SUMMED) for report in reports]
        return ReportColumns(
            round=reports[0].round,
            names=[report.name for report in reports],
            num_examples=_ints([report.num_examples for report in reports]),
            num_refused=[report.num_refused for report in reports],
            num_steps=_ints([report.num_steps for report in reports]),
            sent_weight=_ints([report.weight for report in reports]),
            summed_weight=_ints(summed),
            loss_sum=_floats([report.loss_sum for report in reports]),
            metric_sums={
                name: _floats([one.metric_sums.get(name, math.nan) for one in reports])
                for name in sorted(metrics)
            },
            seconds=_floats([report.seconds for report in reports]),
            vitals=VitalsColumns.of(report.vitals for report in reports),
        )


class ReportBatch(Sequence[UpdateReport], ABC):
    """The reports of a block of updates: a sequence, and the same data as columns."""

    are_summed: bool
    """Whether the updates' vectors come as one sum."""

    @property
    @abstractmethod
    def columns(self) -> ReportColumns:
        """The reports as columns."""

    @abstractmethod
    def figures(self) -> dict[str, Sequence[Any] | NDArray[Any]]:
        """Return each figure of the updates' rows, numbers as arrays; see ``figures_of``."""

    @abstractmethod
    def noise(self, owned: Mapping[str, int]) -> Sequence[NoiseSums]:
        """Return parts of the round's noise sums, for clients that own so many examples."""

    @property
    def unused(self) -> tuple[int, ...]:
        """The places of the trained tensors that none of the updates' losses used."""
        return ()

    @property
    @abstractmethod
    def timing(self) -> tuple[Ints, Ints, Floats]:
        """How many steps each update has; the examples and seconds of all, one after another."""

    @property
    def norms_per_weight(self) -> Sequence[float] | None:
        """The norms of the updates per unit of weight; None if they were not computed."""
        return None

    @property
    def plain_steps(self) -> tuple[Ints, Floats, Floats] | None:
        """How many steps each update has, and the seconds and losses of all, one after another.

        None where steps have norms too: the reports themselves tell them.
        """
        return None


class AcceptedReports(Mapping[str, UpdateReport]):
    """A round's accepted reports by name; that of a client in a block is made when it is read."""

    def __init__(self) -> None:
        self.blocks: list[ReportBatch] = []
        """Those that came as columns."""
        self._firsts: list[int] = []
        """The number of reports in the blocks before each of them."""
        self._alone: dict[str, UpdateReport] = {}
        self._row_of: dict[str, int] = {}
        """Each client's row in the blocks, one behind the other; ALONE if it came alone."""

    def add(self, *reports: UpdateReport) -> None:
        """Add reports that came alone."""
        self._alone |= {report.name: report for report in reports}
        self._row_of |= dict.fromkeys((report.name for report in reports), ALONE)

    def add_block(self, block: ReportBatch) -> None:
        """Add reports that came as columns."""
        first = self._firsts[-1] + len(self.blocks[-1]) if self.blocks else 0
        self.blocks.append(block)
        self._firsts.append(first)
        self._row_of |= zip(block.columns.names, count(first), strict=False)

    def has_none(self, names: Iterable[str]) -> bool:
        """Whether none of these clients is among them."""
        return self._row_of.keys().isdisjoint(names)

    @property
    def single(self) -> list[UpdateReport]:
        """Those that came alone."""
        return [*self._alone.values()]

    def figures(self, names: Sequence[str]) -> Mapping[str, Sequence[Any] | NDArray[Any]]:
        """Return each figure of these clients' rows; see ``figures_of``."""
        rows = self._rows(names)
        if rows is None:
            return figures_of([self[name] for name in names])
        parts = [block.figures() for block in self.blocks]
        order = rows.tolist()
        found: dict[str, Sequence[Any] | NDArray[Any]] = {}
        for name, first in parts[0].items():
            columns = [part[name] for part in parts]
            if isinstance(first, np.ndarray):
                found[name] = np.concatenate(columns)[rows]
            else:
                joined = list(chain.from_iterable(columns))
                found[name] = list(map(joined.__getitem__, order))
        return found

    def plain_steps(self, names: Sequence[str]) -> tuple[Ints, Floats, Floats] | None:
        """Return what the blocks tell of these clients' steps; see ``ReportBatch.plain_steps``.

        None if some came alone, or have more to tell.
        """
        rows, told = self._rows(names), [block.plain_steps for block in self.blocks]
        if rows is None or None in told:
            return None
        numbers, seconds, losses = map(
            np.concatenate, zip(*(one for one in told if one), strict=True)
        )
        counts, starts = numbers[rows], (np.cumsum(numbers) - numbers)[rows]
        steps = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        return counts, seconds[steps], losses[steps]

    def _rows(self, names: Sequence[str]) -> Ints | None:
        """Return where these clients are in the blocks, one behind the other; None: not all are."""
        rows = np.fromiter(map(self._row_of.__getitem__, names), np.int64, len(names))
        return rows if len(rows) and rows.min() > ALONE else None

    def copy(self) -> AcceptedReports:
        """Return those of now, while another thread adds some."""
        other = AcceptedReports()
        other._row_of, other._alone = self._row_of.copy(), self._alone
        other.blocks, other._firsts = self.blocks, self._firsts
        return other

    def __len__(self) -> int:
        return len(self._row_of)

    def __iter__(self) -> Iterator[str]:
        return iter(self._row_of)

    def __contains__(self, name: object) -> bool:
        return name in self._row_of

    def __getitem__(self, name: str) -> UpdateReport:
        row = self._row_of[name]
        if row == ALONE:
            return self._alone[name]
        at = bisect_right(self._firsts, row) - 1
        return self.blocks[at][row - self._firsts[at]]


def mean_loss(loss_sum: float, weight: int) -> float:
    """Return an update's loss per unit of weight; NaN if all that it is made of weighs 0."""
    return loss_sum / weight if weight else math.nan


def mean_losses(loss_sum: Floats, weight: Ints) -> Floats:
    """Return the ``mean_loss`` of each of some updates."""
    unknown = np.full(len(weight), np.nan)
    means: Floats = np.divide(loss_sum, weight, out=unknown, where=weight != 0)
    return means


def figures_of(reports: Sequence[UpdateReport]) -> dict[str, Sequence[Any]]:
    """Return each figure of some clients' rows but those of their plans and their steps."""
    return {
        "name": [one.name for one in reports],
        "accumulation_steps": [one.num_steps for one in reports],
        "micro_batch_size": [one.micro_batch_size for one in reports],
        "num_examples": [one.num_examples for one in reports],
        "num_refused": [one.num_refused for one in reports],
        "weight": [one.weight for one in reports],
        "seconds": [one.seconds for one in reports],
        "loss": [mean_loss(one.loss_sum, one.weight) for one in reports],
        "peak_bytes": [one.peak_bytes for one in reports],
        "reason": [one.reason for one in reports],
        "num_joined": [one.num_joined for one in reports],
        "num_left": [one.num_left for one in reports],
    }


def plain_sum(
    columns: Sequence[ReportColumns],
    *,
    names: tuple[str, ...],
    mean_P: Tensor,
    weight: int,
    max_weight_per_example: int,
    noise: NoiseSums | None,
) -> RoundSum:
    """Return the result of a round in plain text."""
    return RoundSum(
        names=names,
        mean_P=mean_P,
        weight=weight,
        num_examples=sum(int(part.num_examples.sum()) for part in columns),
        num_refused=sum(chain.from_iterable(part.num_refused for part in columns)),
        summed_weight=total_summed_weight(columns, max_weight_per_example=max_weight_per_example),
        loss_sum=total_loss(columns),
        metric_sums=total_metrics(columns),
        noise=noise,
    )


def total_loss(parts: Iterable[ReportColumns]) -> float:
    """Add up the losses, rounded once, so that the result does not depend on their order."""
    return math.fsum(chain.from_iterable(part.loss_sum.tolist() for part in parts))


def total_metrics(parts: Sequence[ReportColumns]) -> dict[str, float]:
    """Add up each metric, rounded once."""
    numbers = Counter[str]()
    for part in parts:
        numbers.update({name: len(_told(sums)) for name, sums in part.metric_sums.items()})
    names = most_reported(numbers)
    return {
        name: math.fsum(
            chain.from_iterable(
                _told(part.metric_sums[name]) for part in parts if name in part.metric_sums
            )
        )
        for name in names
    }


def _told(sums: Floats) -> Sequence[float]:
    """Return a metric's sums without those of clients that do not report it."""
    told: list[float] = sums[~np.isnan(sums)].tolist()
    return told


def most_reported(numbers: Mapping[str, int]) -> list[str]:
    """Return the names of metrics, sorted, given how many clients report each.

    Of more than ``MAX_METRICS`` names, those that the fewest clients report are left out: they are
    no metrics of the task.
    """
    return sorted(sorted(numbers, key=lambda name: (-numbers[name], name))[:MAX_METRICS])


def total_summed_weight(parts: Iterable[ReportColumns], *, max_weight_per_example: int) -> int:
    """Add up the weights that the losses were summed over.

    A client's claim counts up to the task's bound for its number of examples. Where its steps have
    no weight, the weight that it sent counts.
    """
    each = (
        np.minimum(
            np.where(part.summed_weight > 0, part.summed_weight, part.sent_weight),
            part.num_examples * max_weight_per_example,
        )
        for part in parts
    )
    return sum(int(one.sum()) for one in each)


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _floats(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64)
