"""What a task counts of its predictions, and the rows of numbers in which it travels.

The task says in ``evaluated`` what is counted under which name, and its method ``predictions``
gives the probabilities and the labels of a batch. A task without both is tested by its loss and its
metrics alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwater.common.errors import CorruptUpdate, TaskError
from headwater.common.evaluation.kinds import KINDS, Floats, Ints, Measure

EVALUATED, PREDICTIONS = "evaluated", "predictions"
"""What a task has: what is counted, and the probabilities and labels of a batch."""
REMEDY = "see docs/task.md, Tests on the devices"
ROUNDING = 1e-4
"""What a probability may be beyond 0..1: float32 rounds, bfloat16 by 2^-8 of a part."""


@dataclass(frozen=True)
class Measures:
    """What a task counts, in the order of the names."""

    of: Mapping[str, Measure]
    task: str = ""
    """The name of the task's class: another task counts something else."""

    @property
    def num_counts(self) -> int:
        """The length of the row of counts of all."""
        return sum(kind.num_counts for kind in self.of.values())

    @property
    def num_reals(self) -> int:
        """The length of the row of reals of all."""
        return sum(kind.num_reals for kind in self.of.values())

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the task's name and of what is counted, in hexadecimal.

        Both sides must have the same.
        """
        names = {kind: name for name, kind in KINDS.items()}
        plain = {name: [names[type(kind)], kind.fields()] for name, kind in self.of.items()}  # type: ignore[index]
        text = json.dumps([self.task, plain], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def add(self, task: Any, model: nn.Module, batch: Any, counts: Ints, reals: Floats) -> None:
        """Add the predictions of a batch to the two rows, in place.

        Raises:
            TaskError: ``predictions`` returned something else than probabilities and labels.
            Exception: the task's own.
        """
        with torch.no_grad():
            chances_NC, labels_N = _checked(task.predictions(model, batch))
        for name, kind, own_counts, own_reals in self._cut(counts, reals):
            try:
                if labels_N.numel() and int(labels_N.max()) >= chances_NC.shape[1]:
                    raise TaskError(
                        f"predictions gives the label {int(labels_N.max())}, and probabilities of "
                        f"{chances_NC.shape[1]} classes",
                        remedy="number the labels from 0; a negative one is left out",
                    )
                kind.add(chances_NC, labels_N, own_counts, own_reals)
            except TaskError as error:
                raise TaskError(f"{name}: {error.message}", remedy=error.remedy) from error

    def _cut(self, counts: Ints, reals: Floats) -> Iterator[tuple[str, Measure, Ints, Floats]]:
        at, to = 0, 0
        for name, kind in self.of.items():
            yield name, kind, counts[at:][: kind.num_counts], reals[to:][: kind.num_reals]
            at, to = at + kind.num_counts, to + kind.num_reals

    def check(self, counts: Ints, reals: Floats) -> None:
        """Check rows that were added up over all devices: a device may have sent anything.

        Raises:
            CorruptUpdate: no predictions have such sums; names what is wrong.
        """
        numbers = set()
        for name, kind, own_counts, own_reals in self._cut(counts, reals):
            numbers.add(kind.number(own_counts))
            is_negative = own_counts.min(initial=0) < 0
            if is_negative or len(numbers) > 1 or not kind.are_possible(own_counts, own_reals):
                raise CorruptUpdate(
                    f"the counts of {name}: no predictions have such sums, so a device sent "
                    "others than its own",
                    remedy="find the device by leaving some out, and begin again",
                )

    def found(self, counts: Ints, reals: Floats) -> dict[str, dict[str, Any]]:
        """Return what rows that were added up over all devices say, as plain data by name."""
        return {name: asdict(kind.found(c, r)) for name, kind, c, r in self._cut(counts, reals)}

    def empty(self) -> tuple[Ints, Floats]:
        """Return the two rows without any prediction."""
        return np.zeros(self.num_counts, np.int64), np.zeros(self.num_reals)


def measures_of(task: Any) -> Measures:
    """Return what a task counts of its predictions; nothing if it has none.

    Raises:
        TaskError: it has one of ``evaluated`` and ``predictions`` without the other, or says
            something else there than what to count.
    """
    evaluated, name = getattr(task, EVALUATED, None), type(task).__name__
    has_predictions = callable(getattr(task, PREDICTIONS, None))
    if evaluated is None:
        return Measures({}, name)
    if not has_predictions:
        raise TaskError(
            f"the task {name} says in {EVALUATED} what to count of its predictions, and gives none",
            remedy=f"add a method {PREDICTIONS}(model, batch) that returns probabilities and "
            f"labels, or leave out {EVALUATED}: the loss and the metrics need neither",
        )
    kinds = tuple(KINDS.values())
    is_named = isinstance(evaluated, Mapping) and all(isinstance(key, str) for key in evaluated)
    wrong = [key for key, one in evaluated.items() if type(one) not in kinds] if is_named else []
    if not is_named or wrong:
        raise TaskError(
            f"{name}.{EVALUATED} must have names, each with a headwater.ConfusionMatrix, "
            f"Calibration or RocHistogram{', not so: ' + ', '.join(wrong) if wrong else ''}",
            remedy=REMEDY,
        )
    return Measures({key: evaluated[key] for key in sorted(evaluated)}, name)


def _checked(found: object) -> tuple[Tensor, Tensor]:
    """Return probabilities [N, C] and labels [N], without those whose label is negative.

    Probabilities in the shape of the labels are those of class 1 of two.
    """
    if not (isinstance(found, tuple) and len(found) == 2) or not all(
        isinstance(one, Tensor) for one in found
    ):
        raise TaskError(
            "predictions must return two tensors, probabilities and labels", remedy=REMEDY
        )
    chances, labels = found[0].detach(), found[1].detach()
    if chances.shape == labels.shape:
        chances = torch.stack([1 - chances.double(), chances.double()], -1)
    if chances.shape[:-1] != labels.shape or chances.shape[-1] < 2:
        raise TaskError(
            f"predictions gives probabilities of shape {tuple(found[0].shape)} for labels of shape "
            f"{tuple(labels.shape)}: expected one more dimension, of the classes, or the same "
            "shape, of the probability of class 1",
            remedy=REMEDY,
        )
    if labels.is_floating_point() and not bool((labels == labels.round()).all()):
        raise TaskError("predictions gives labels that are no whole numbers", remedy=REMEDY)
    chances_NC, labels_N = chances.reshape(-1, chances.shape[-1]), labels.reshape(-1).long()
    chances_NC, labels_N = chances_NC[labels_N >= 0], labels_N[labels_N >= 0]
    if not bool(((chances_NC >= -ROUNDING) & (chances_NC <= 1 + ROUNDING)).all()):
        raise TaskError(
            "predictions gives a probability beyond 0..1",
            remedy="return logits.softmax(1), or logits.sigmoid() where there is one",
        )
    return chances_NC.clamp(0, 1), labels_N
