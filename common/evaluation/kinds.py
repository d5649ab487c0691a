"""What a task may count of its predictions: confusions, calibration, and scores for a ROC curve.

Each is a row of *counts*, whole numbers, and a row of *reals*, both of a length that is known
beforehand, so that devices add them up and the server too. All take the same two tensors: the
probabilities [N, C] of C classes, and the labels [N].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.common.errors import TaskError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MAX_CLASSES, MAX_BINS = 1000, 10_000
ROUNDING = 2.0**-20
"""Of a sum of probabilities, as a part of it: they are sent in float32."""


class Measure(Protocol):
    """One way to count predictions."""

    @property
    def num_counts(self) -> int:
        """The length of its row of counts."""

    @property
    def num_reals(self) -> int:
        """The length of its row of reals."""

    def fields(self) -> dict[str, Any]:
        """Return what it was made with, as plain data: both sides must have the same."""

    def add(self, chances_NC: Tensor, labels_N: Tensor, counts: Ints, reals: Floats) -> None:
        """Add predictions to the two rows, in place.

        Raises:
            TaskError: they are of other classes.
        """

    def number(self, counts: Ints) -> int:
        """Return how many predictions a row of counts is of; -1 if of no number."""

    def are_possible(self, counts: Ints, reals: Floats) -> bool:
        """Whether some predictions have such rows; none of the counts is negative."""

    def found(self, counts: Ints, reals: Floats) -> Any:
        """Return the result of rows that were added up over all devices."""


@dataclass(frozen=True, kw_only=True)
class FoundConfusion:
    """How often each class was predicted for each label."""

    matrix: list[list[int]]
    """By label, then by predicted class."""
    accuracy: float | None
    recall: list[float | None]
    """By label: the part of its examples that were predicted as it; None without any."""
    precision: list[float | None]
    """By class: the part of its predictions that were right."""
    f1: list[float | None]


class ConfusionMatrix:
    """How often each of ``num_classes`` was predicted for each label."""

    def __init__(self, num_classes: int) -> None:
        """Count labels 0 to ``num_classes`` - 1.

        Raises:
            TaskError: it is no whole number from 2 to 1,000.
        """
        self.num_classes = _whole(num_classes, "ConfusionMatrix: num_classes", 2, MAX_CLASSES)

    @property
    def num_counts(self) -> int:
        return self.num_classes**2

    @property
    def num_reals(self) -> int:
        return 0

    def fields(self) -> dict[str, Any]:
        return {"num_classes": self.num_classes}

    def add(self, chances_NC: Tensor, labels_N: Tensor, counts: Ints, reals: Floats) -> None:
        _check_classes(chances_NC, self.num_classes, "ConfusionMatrix")
        pairs_N = labels_N * self.num_classes + chances_NC.argmax(1)
        counts += torch.bincount(pairs_N, minlength=self.num_counts).numpy()

    def number(self, counts: Ints) -> int:
        return int(counts.sum())

    def are_possible(self, counts: Ints, reals: Floats) -> bool:
        return True

    def found(self, counts: Ints, reals: Floats) -> FoundConfusion:
        matrix = counts.reshape(self.num_classes, self.num_classes)
        right, of_label, of_class = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
        return FoundConfusion(
            matrix=matrix.tolist(),
            accuracy=_parts([right.sum()], [matrix.sum()])[0],
            recall=_parts(right, of_label),
            precision=_parts(right, of_class),
            f1=_parts(2 * right, of_label + of_class),
        )


@dataclass(frozen=True, kw_only=True)
class FoundCalibration:
    """Whether predictions of a probability p are right in a part p of the cases."""

    edges: list[float]
    counts: list[int]
    """Predictions whose largest probability lies in each bin, its upper edge included."""
    accuracy: list[float | None]
    confidence: list[float | None]
    """The mean of these probabilities."""
    error: float | None
    """The expected calibration error, the mean distance between the two (Guo et al. 2017)."""


class Calibration:
    """How often predictions are right, by their probability, in ``num_bins`` of equal width."""

    def __init__(self, num_bins: int = 15) -> None:
        """Divide 0..1 into so many bins.

        Raises:
            TaskError: it is no whole number from 1 to 10,000.
        """
        self.num_bins = _whole(num_bins, "Calibration: num_bins", 1, MAX_BINS)

    @property
    def num_counts(self) -> int:
        return 2 * self.num_bins

    @property
    def num_reals(self) -> int:
        return self.num_bins

    def fields(self) -> dict[str, Any]:
        return {"num_bins": self.num_bins}

    def add(self, chances_NC: Tensor, labels_N: Tensor, counts: Ints, reals: Floats) -> None:
        largest_N, predicted_N = chances_NC.max(1)
        bins_N = (torch.ceil(largest_N.double() * self.num_bins).long() - 1).clamp(min=0)
        right_N = bins_N[predicted_N == labels_N]
        counts[: self.num_bins] += torch.bincount(bins_N, minlength=self.num_bins).numpy()
        counts[self.num_bins :] += torch.bincount(right_N, minlength=self.num_bins).numpy()
        reals += torch.bincount(bins_N, largest_N.double(), minlength=self.num_bins).numpy()

    def number(self, counts: Ints) -> int:
        return int(counts[: self.num_bins].sum())

    def are_possible(self, counts: Ints, reals: Floats) -> bool:
        of_bin, right = counts.reshape(2, self.num_bins)
        upper = of_bin * np.linspace(0, 1, self.num_bins + 1)[1:] * (1 + ROUNDING) + ROUNDING
        return bool((right <= of_bin).all() and (reals >= 0).all() and (reals <= upper).all())

    def found(self, counts: Ints, reals: Floats) -> FoundCalibration:
        of_bin, right = counts.reshape(2, self.num_bins)
        total = int(of_bin.sum())
        return FoundCalibration(
            edges=np.linspace(0, 1, self.num_bins + 1).tolist(),
            counts=of_bin.tolist(),
            accuracy=_parts(right, of_bin),
            confidence=_parts(reals, of_bin),
            error=float(np.abs(right - reals).sum() / total) if total else None,
        )


@dataclass(frozen=True, kw_only=True)
class FoundRoc:
    """How well the probabilities of a class tell its examples from the others."""

    classes: list[int]
    """The classes that are each held against all others; of two classes, 1 alone."""
    auc: list[float | None]
    """By class: the area under the ROC curve; scores of one bin count as equal."""
    positives: list[list[int]]
    """By class: its examples, by the bin of their probability of it."""
    negatives: list[list[int]]
    """By class: all others."""


class RocHistogram:
    """The probabilities of each class, of its examples and of the others, in ``num_bins``.

    ROC curve and area follow from them, with scores of one bin taken as equal.
    """

    def __init__(self, num_bins: int = 100, *, num_classes: int = 2) -> None:
        """Divide 0..1 into so many bins.

        Raises:
            TaskError: one of the two is no whole number in its range.
        """
        self.num_bins = _whole(num_bins, "RocHistogram: num_bins", 2, MAX_BINS)
        self.num_classes = _whole(num_classes, "RocHistogram: num_classes", 2, MAX_CLASSES)

    @property
    def _classes(self) -> Sequence[int]:
        return (1,) if self.num_classes == 2 else range(self.num_classes)

    @property
    def num_counts(self) -> int:
        return 2 * self.num_bins * len(self._classes)

    @property
    def num_reals(self) -> int:
        return 0

    def fields(self) -> dict[str, Any]:
        return {"num_bins": self.num_bins, "num_classes": self.num_classes}

    def add(self, chances_NC: Tensor, labels_N: Tensor, counts: Ints, reals: Floats) -> None:
        _check_classes(chances_NC, self.num_classes, "RocHistogram")
        rows = counts.reshape(len(self._classes), 2, self.num_bins)
        bins_NC = (chances_NC.double() * self.num_bins).long().clamp(max=self.num_bins - 1)
        for row, label in zip(rows, self._classes, strict=True):
            is_of_label_N = labels_N == label
            for at, chosen_N in enumerate((is_of_label_N, ~is_of_label_N)):
                bins_M = bins_NC[chosen_N, label]
                row[at] += torch.bincount(bins_M, minlength=self.num_bins).numpy()

    def number(self, counts: Ints) -> int:
        numbers = counts.reshape(len(self._classes), -1).sum(1)
        return int(numbers[0]) if (numbers == numbers[0]).all() else -1

    def are_possible(self, counts: Ints, reals: Floats) -> bool:
        return True

    def found(self, counts: Ints, reals: Floats) -> FoundRoc:
        rows = counts.reshape(len(self._classes), 2, self.num_bins)
        return FoundRoc(
            classes=[*self._classes],
            auc=[_area(row[0], row[1]) for row in rows],
            positives=rows[:, 0].tolist(),
            negatives=rows[:, 1].tolist(),
        )


KINDS: dict[str, type[ConfusionMatrix] | type[Calibration] | type[RocHistogram]] = {
    "confusion": ConfusionMatrix,
    "calibration": Calibration,
    "roc": RocHistogram,
}


def _area(positives: Ints, negatives: Ints) -> float | None:
    """Return in which part of pairs the positive example scores higher; equal ones count 1/2."""
    num_pairs = int(positives.sum()) * int(negatives.sum())
    if not num_pairs:
        return None
    below = np.cumsum(negatives) - negatives
    rows = zip(positives.tolist(), below.tolist(), negatives.tolist(), strict=True)
    twice: int = sum(positive * (2 * lower + equal) for positive, lower, equal in rows)
    return twice / (2 * num_pairs)


def _parts(some: Any, of: Any) -> list[float | None]:
    return [float(one / all_of) if all_of else None for one, all_of in zip(some, of, strict=True)]


def _check_classes(chances_NC: Tensor, num_classes: int, name: str) -> None:
    if chances_NC.shape[1] != num_classes:
        raise TaskError(
            f"predictions gives probabilities of {chances_NC.shape[1]} classes, and {name} is of "
            f"{num_classes}",
            remedy="set num_classes to the number of classes that the model has",
        )


def _whole(number: object, name: str, least: int, most: int) -> int:
    if type(number) is not int or not least <= number <= most:
        raise TaskError(f"{name} must be a whole number from {least} to {most:,}, not {number!r}")
    return number
