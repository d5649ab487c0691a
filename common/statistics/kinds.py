"""What a task may measure of a value of each example: ``Moments``, ``Histogram`` and ``Counts``.

Each is a row of sums of a length that is known beforehand: *counts*, which are whole numbers, and
*moments*, sums of values that lie in 0..1. So its bounds must be known before any data are: a value
beyond them is cut to them and counted, and a NaN is counted and left out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.common.errors import TaskError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NUM_BINS = 16
ROUNDING = 2.0**-22
"""What float32 leaves open of a variance, in squares of the bounds' width."""
RESOLUTION = 2.0**-8
SURE = 4.0
"""Standard deviations of noise above which a bin is taken to hold a value."""
MAX_LABELS = 10_000


class Kind(Protocol):
    """One way to measure a value of each example."""

    @property
    def num_counts(self) -> int:
        """The length of its row of counts."""

    @property
    def num_moments(self) -> int:
        """The length of its row of moments."""

    def fields(self) -> dict[str, Any]:
        """Return what it was made with, as plain data: both sides must have the same."""

    def add(self, values: Sequence[Any], counts_C: Ints, moments_M: Floats) -> None:
        """Add the values of some examples to the two rows, in place.

        Raises:
            TaskError: a value is none that it can measure.
        """

    def are_possible(self, counts_C: Ints, moments_M: Floats) -> bool:
        """Whether some examples have such rows; none of the counts is negative."""

    @property
    def squared_bound(self) -> int:
        """The square of the L2 norm of what an example with one value adds to the two rows."""

    def found(self, counts_C: Ints, moments_M: Floats, noise: float = 0.0) -> Any:
        """Return the result of the rows, added up over all devices.

        ``noise`` is the standard deviation of the noise in each number; what is 0 is exact.
        """


class Moments:
    """Number, mean, variance, least and largest value of a number, or of each of a vector."""

    def __init__(
        self,
        low: float | Sequence[float],
        high: float | Sequence[float],
        *,
        size: int = 1,
        num_bins: int = NUM_BINS,
    ) -> None:
        """Measure vectors of ``size`` numbers within ``low`` and ``high``, both inclusive.

        The bounds are those of all numbers, or one for each. ``num_bins`` parts of equal width say
        where the least and the largest value lie.

        Raises:
            TaskError: a bound is not finite, ``low`` is not below ``high``, or the lengths differ.
        """
        try:
            self.low_V = np.broadcast_to(np.asarray(low, np.float64), (size,))
            self.high_V = np.broadcast_to(np.asarray(high, np.float64), (size,))
        except (TypeError, ValueError) as error:
            raise TaskError(
                f"Moments: low and high must be numbers, or {size} of them each: {error}"
            ) from error
        with np.errstate(over="ignore", invalid="ignore"):
            is_finite = np.isfinite(self.high_V - self.low_V).all()
        is_whole = isinstance(size, int) and isinstance(num_bins, int)
        if not is_whole or size < 1 or num_bins < 1:
            raise TaskError(f"Moments: size and num_bins are whole numbers from 1, not {num_bins}")
        if not is_finite or not (self.low_V < self.high_V).all():
            raise TaskError(
                f"Moments: low must be below high, and both finite, found {low} and {high}",
                remedy="take bounds that hold for each example, as an age lies between 0 and 120",
            )
        self.size, self.num_bins = size, num_bins

    @property
    def num_counts(self) -> int:
        return (4 + self.num_bins) * self.size

    @property
    def num_moments(self) -> int:
        return 2 * self.size

    def fields(self) -> dict[str, Any]:
        return {
            "low": self.low_V.tolist(),
            "high": self.high_V.tolist(),
            "size": self.size,
            "num_bins": self.num_bins,
        }

    def add(self, values: Sequence[Any], counts_C: Ints, moments_M: Floats) -> None:
        values_NV = np.stack([self._row(value) for value in values])
        counts = counts_C.reshape(4 + self.num_bins, self.size)
        is_known = ~np.isnan(values_NV)
        counts[0] += is_known.sum(0)
        counts[1] += (~is_known).sum(0)
        counts[2] += (values_NV < self.low_V).sum(0)
        counts[3] += (values_NV > self.high_V).sum(0)
        cut_NV = np.clip(values_NV, self.low_V, self.high_V)
        parts_NV = (cut_NV - self.low_V) / (self.high_V - self.low_V)
        bins_NV = np.minimum(np.nan_to_num(parts_NV) * self.num_bins, self.num_bins - 1)
        for number in range(self.num_bins):
            counts[4 + number] += ((bins_NV.astype(np.int64) == number) & is_known).sum(0)
        moments = moments_M.reshape(2, self.size)
        moments[0] += np.nansum(parts_NV, axis=0)
        moments[1] += np.nansum(parts_NV * parts_NV, axis=0)

    def _row(self, value: Any) -> Floats:
        row = numbers_of(value)
        if len(row) != self.size:
            raise TaskError(
                f"statistics returned {len(row)} numbers, and its Moments has size={self.size}",
                remedy="set size in measured to the length of the vector",
            )
        return row

    def are_possible(self, counts_C: Ints, moments_M: Floats) -> bool:
        counts = counts_C.reshape(4 + self.num_bins, self.size)
        first_V, second_V = moments_M.reshape(2, self.size)
        room_V = counts[0] * ROUNDING
        is_within = (second_V >= -room_V) & (second_V <= first_V + room_V)
        is_within &= first_V <= counts[0] + room_V
        is_within &= second_V * counts[0] >= first_V * first_V - room_V * counts[0]
        return bool(is_within.all() and (counts[4:].sum(0) == counts[0]).all())

    @property
    def squared_bound(self) -> int:
        return 5 * self.size  # there, beyond the bounds, its bin, and two moments of at most 1

    def found(self, counts_C: Ints, moments_M: Floats, noise: float = 0.0) -> FoundMoments:
        counts = counts_C.reshape(4 + self.num_bins, self.size)
        moments = moments_M.reshape(2, self.size)
        width_V, num_V = self.high_V - self.low_V, np.maximum(counts[0], 1)
        mean_V = moments[0] / num_V
        second_V = moments[1] / num_V
        if noise:  # which may lead beyond what values within the bounds can have
            mean_V, second_V = np.minimum(mean_V, 1), np.minimum(second_V, 1)
        variance_V = second_V - mean_V * mean_V
        variance_V = np.where(variance_V > ROUNDING, variance_V, 0.0)  # else it is of rounding
        edges = np.arange(self.num_bins + 1)[:, None] / self.num_bins
        edges = self.low_V + edges * width_V
        is_there = counts[4:] > SURE * noise
        lowest_V = np.take_along_axis(edges, is_there.argmax(0)[None], 0)[0]
        last_V = self.num_bins - is_there[::-1].argmax(0)
        highest_V = np.take_along_axis(edges, last_V[None], 0)[0]

        def known(values_V: Floats) -> list[float]:
            return [*map(float, np.where(counts[0] > 0, values_V, np.nan))]

        return FoundMoments(
            num=counts[0].tolist(),
            num_missing=counts[1].tolist(),
            num_below=counts[2].tolist(),
            num_above=counts[3].tolist(),
            means=known(self.low_V + width_V * mean_V),
            variances=known(variance_V * width_V * width_V),
            lowest=known(lowest_V),
            highest=known(highest_V),
            resolution=(width_V * RESOLUTION).tolist(),
            noise=noise,
        )


@dataclass(frozen=True, kw_only=True)
class FoundMoments:
    """What was found of numbers [V]; NaN where no example has a value."""

    num: list[int]
    """The examples that have a value; those beyond the bounds count as at the bound."""
    num_missing: list[int]
    num_below: list[int]
    num_above: list[int]
    means: list[float]
    variances: list[float]
    """The mean squared distance from the mean, of all values: divided by their number."""
    lowest: list[float]
    """The lower edge of the part in which the least value lies; ``highest``: the upper edge of that
    of the largest."""
    resolution: list[float]
    """A 256th of the bounds' width: of a smaller spread the variance is off by a hundredth or more,
    and below a 2,048th it is 0."""
    highest: list[float]
    noise: float = 0.0
    """The standard deviation of the noise in each count; 0: they are exact."""

    @cached_property
    def mean(self) -> Tensor:
        """The means, float32 [V]."""
        return torch.tensor(self.means)

    @cached_property
    def std(self) -> Tensor:
        """The standard deviations, float32 [V]."""
        return torch.tensor([math.sqrt(one) for one in self.variances])

    def scaled(self, values: Tensor) -> Tensor:
        """Return (values - mean) / std for values [..., V], in their dtype.

        A number that is the same in all examples, or in none, becomes 0.
        """
        is_used = self.std > 0
        std_V = torch.where(is_used, self.std, torch.ones(()))
        mean_V = torch.where(is_used, self.mean, torch.zeros(()))
        found = torch.where(is_used, (values - mean_V) / std_V, torch.zeros(()))
        return found.to(values.dtype)


class Histogram:
    """How many numbers lie between edges; a value is a number, or many of which each counts."""

    def __init__(self, edges: Sequence[float]) -> None:
        """Count from each edge (inclusive) to the next (exclusive; of the last bin inclusive).

        Raises:
            TaskError: they are fewer than two, not finite, or do not rise.
        """
        try:
            self.edges_E = np.asarray(edges, np.float64).reshape(-1)
        except (TypeError, ValueError):
            self.edges_E = np.zeros(0)
        is_finite = np.isfinite(self.edges_E).all()
        if len(self.edges_E) < 2 or not is_finite or not (np.diff(self.edges_E) > 0).all():
            raise TaskError(
                f"Histogram: expected two or more rising edges, found {edges}",
                remedy="give the edges as numbers from low to high, such as [0, 1, 10, 100]",
            )

    @property
    def num_counts(self) -> int:
        return len(self.edges_E) + 2

    @property
    def num_moments(self) -> int:
        return 0

    def fields(self) -> dict[str, Any]:
        return {"edges": self.edges_E.tolist()}

    def add(self, values: Sequence[Any], counts_C: Ints, moments_M: Floats) -> None:
        numbers = np.concatenate([numbers_of(value) for value in values])
        is_known = ~np.isnan(numbers)
        counts_C[0] += (~is_known).sum()
        counts_C[1] += (numbers < self.edges_E[0]).sum()
        counts_C[2] += (numbers > self.edges_E[-1]).sum()
        counts_C[3:] += np.histogram(numbers[is_known], bins=self.edges_E)[0]

    def are_possible(self, counts_C: Ints, moments_M: Floats) -> bool:
        return True

    @property
    def squared_bound(self) -> int:
        return 1

    def found(self, counts_C: Ints, moments_M: Floats, noise: float = 0.0) -> FoundHistogram:
        missing, below, above, *counts = counts_C.tolist()
        return FoundHistogram(
            edges=self.edges_E.tolist(),
            counts=counts,
            num_missing=missing,
            num_below=below,
            num_above=above,
            noise=noise,
        )


@dataclass(frozen=True, kw_only=True)
class FoundHistogram:
    """How many numbers lie between edges, and how many beyond them or nowhere."""

    edges: list[float]
    counts: list[int]
    num_missing: int
    num_below: int
    num_above: int
    noise: float = 0.0
    """The standard deviation of the noise in each count; 0: they are exact."""


class Counts:
    """How often each label occurs: a class, or words of a vocabulary."""

    def __init__(self, labels: int | Sequence[Hashable]) -> None:
        """Count the labels 0 to ``labels`` - 1, or those that are listed.

        Raises:
            TaskError: there are none, two are the same, or one is neither a number nor a text.
        """
        self.labels: list[Any]
        if isinstance(labels, Sequence) and not isinstance(labels, str):
            self.labels = [*labels]
        else:
            try:
                self.labels = [*range(operator.index(labels))]  # type: ignore[arg-type]
            except TypeError:
                self.labels = []
        is_plain = all(isinstance(one, int | str) for one in self.labels)
        num_unlike = len(set(self.labels)) if is_plain else 0
        if not 0 < len(self.labels) == num_unlike <= MAX_LABELS:
            raise TaskError(
                f"Counts: expected 1 to {MAX_LABELS:,} unlike labels, whole numbers or texts",
                remedy='write Counts(10) for the classes 0 to 9, or Counts(["cat", "dog"])',
            )
        self._at = {label: at for at, label in enumerate(self.labels)}

    @property
    def num_counts(self) -> int:
        return len(self.labels) + 1

    @property
    def num_moments(self) -> int:
        return 0

    def fields(self) -> dict[str, Any]:
        return {"labels": self.labels}

    def add(self, values: Sequence[Any], counts_C: Ints, moments_M: Floats) -> None:
        other = len(self.labels)
        places = [self._at.get(label, other) for one in values for label in labels_of(one)]
        counts_C += np.bincount(np.array(places, np.int64), minlength=other + 1)

    def are_possible(self, counts_C: Ints, moments_M: Floats) -> bool:
        return True

    @property
    def squared_bound(self) -> int:
        return 1

    def found(self, counts_C: Ints, moments_M: Floats, noise: float = 0.0) -> FoundCounts:
        *counts, other = counts_C.tolist()
        return FoundCounts(labels=self.labels, counts=counts, num_other=other, noise=noise)


@dataclass(frozen=True, kw_only=True)
class FoundCounts:
    """How often each label occurs in all examples."""

    labels: list[Any]
    counts: list[int]
    num_other: int
    """Labels that are none of these."""
    noise: float = 0.0
    """The standard deviation of the noise in each count; 0: they are exact."""

    @cached_property
    def weights(self) -> Tensor:
        """Return a weight for each label, float32 [L], with which all labels weigh alike together.

        They are total / (number of labels that occur x count), so that the mean weight of the
        counted labels is 1; a label that does not occur has 0. As ``weight`` of a cross entropy.
        """
        num_there = sum(count > 0 for count in self.counts)
        total = sum(self.counts)
        return torch.tensor([total / (num_there * n) if n else 0.0 for n in self.counts])


def numbers_of(value: Any) -> Floats:
    """Return a number, or all numbers of a tensor, an array or a list, as float64 [V].

    Raises:
        TaskError: they are no numbers.
    """
    try:
        plain = value.detach().cpu().double().numpy() if isinstance(value, Tensor) else value
        return np.asarray(plain, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"statistics returned {type(value).__name__}, expected a number or numbers: {error}",
            remedy="return None in no place: a missing number is float('nan')",
        ) from error


def labels_of(value: Any) -> Sequence[Any]:
    """Return a label, or all labels of a tensor, an array or a list.

    Raises:
        TaskError: one is neither a whole number nor a text.
    """
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    labels = value if isinstance(value, list | tuple | set) else [value]
    for label in labels:
        if not isinstance(label, int | str):
            raise TaskError(
                f"statistics returned a label of type {type(label).__name__}, expected a whole "
                "number or a text",
                remedy="return int(label) or str(label)",
            )
    return [*labels]


KINDS: Mapping[str, Callable[..., Kind]] = {
    "moments": Moments,
    "histogram": Histogram,
    "counts": Counts,
}
