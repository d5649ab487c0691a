"""The lengths of examples where a batch is padded, and micro-batches of examples of like length.

A padded batch takes the memory and the time of its number of examples x its longest length: its
tokens, with padding. So where lengths differ, a micro-batch's size is counted in examples of the
*usual* length, the one nearest to the mean: four texts of 300 tokens, where 100 are usual, have
size 12. Examples of one length have the size that is their number.

A task may tell its lengths (``lengths(examples)``). Otherwise an example's length is the number of
elements of its largest tensor, or the characters of a text. Only a task with a ``collate`` of its
own can have ragged examples: torch's ``default_collate`` stacks tensors of one shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from headwater.common.data.example_faults import own_position, whole_of
from headwater.common.data.nested_values import parts_by_name, stored_tensors
from headwater.common.errors import TaskError
from headwater.common.task import Examples, Task
from headwater.common.user_code.failures import running

NUM_SAMPLED = 256  # examples whose lengths give the usual one

Positions = tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class LengthRecord:
    """The lengths of one data set, as far as they are known, and what an example costs by them."""

    whole: Examples
    known: dict[int, int] = field(default_factory=dict)
    cost: LengthCost | None = None
    """Bytes by length; None until they were counted."""


def length_record(task: Task, examples: Examples) -> LengthRecord | None:
    """Return a new record; None if the task's examples cannot differ in length.

    Raises:
        TaskError: the task's ``lengths`` are not a whole number of at least 0 for each example.
        TaskFailed: it raised an exception.
    """
    whole = whole_of(examples)
    record = LengthRecord(whole=whole)
    if hasattr(task, "lengths"):
        with running("lengths"):
            told = np.asarray(task.lengths(whole))
        is_right = told.shape == (len(whole),) and told.dtype.kind in "iu" and (told >= 0).all()
        if not is_right:
            raise TaskError(
                f"lengths must return a whole number of at least 0 for each of {len(whole)} "
                f"examples, found {told.dtype} {told.shape}"
            )
        record.known = dict(enumerate(told.tolist()))
    elif not hasattr(task, "collate"):
        return None
    return record


class ExampleLengths:
    """The lengths of one client's examples; each is read once."""

    def __init__(self, examples: Examples, record: LengthRecord) -> None:
        self.record = record
        self._examples = examples

    def __getitem__(self, position: int) -> int:
        """Return an example's length, at least 1; 1 for an example that cannot be read."""
        known, own = self.record.known, own_position(self._examples, position)
        if own not in known:
            try:
                known[own] = length_of(self.record.whole[own])
            except Exception:  # the micro-batch with it fails too, and names it
                known[own] = 1
        return max(known[own], 1)

    @cached_property
    def sample(self) -> list[int]:
        """Up to ``NUM_SAMPLED`` positions spread over the data, the nearest to the mean first."""
        num_examples = len(self._examples)
        number = min(num_examples, NUM_SAMPLED)
        positions = [n * num_examples // number for n in range(number)]
        mean = sum(map(self.__getitem__, positions)) / max(number, 1)
        return sorted(positions, key=lambda position: abs(self[position] - mean))

    @cached_property
    def usual(self) -> int:
        """The length of the sampled example that is nearest to the mean."""
        return self[self.sample[0]]

    def tokens(self, positions: Iterable[int]) -> int:
        """Return the tokens of a batch with its padding: its examples x the longest length."""
        lengths = [self[position] for position in positions]
        return len(lengths) * max(lengths, default=0)

    def size(self, positions: Sequence[int]) -> float:
        """Return a batch's size, in examples of the usual length."""
        return self.tokens(positions) / self.usual

    def load(self, positions: Sequence[int]) -> float:
        """Return a batch's memory, in examples of the usual length; a text's may be quadratic."""
        longest = max(self[position] for position in positions)
        cost = self.record.cost
        each = longest / self.usual if cost is None else cost.at(longest) / cost.at(self.usual)
        return len(positions) * each

    def cut(
        self, positions: Sequence[int], size: float, *, max_tokens: int | None = None
    ) -> list[Positions]:
        """Cut examples into micro-batches of like lengths, none larger than size and tokens.

        An example that alone is larger is alone. The micro-batches come in the order of the first
        example in each, so what is left undone at an early end is no matter of length. Examples of
        one length are cut in their order.
        """
        most = size * self.usual if max_tokens is None else min(size * self.usual, max_tokens)
        places = sorted(range(len(positions)), key=lambda place: -self[positions[place]])
        groups = []
        while places:
            number = max(int(most / self[positions[places[0]]]), 1)
            groups.append(sorted(places[:number]))
            del places[:number]
        return [tuple(positions[place] for place in group) for group in sorted(groups)]


def length_of(example: Any) -> int:
    """Return the number of elements of an example's largest part.

    Those of a text are its characters, those of a sparse tensor the elements that it lists.
    """
    if isinstance(example, Tensor):
        return example.numel() if example.is_nested else stored_tensors(example)[-1].numel()
    if isinstance(example, np.ndarray):
        return int(example.size)
    if isinstance(example, str | bytes):
        return len(example)
    parts = list(example.values()) if isinstance(example, Mapping) else example
    if not isinstance(parts, list | tuple):
        parts = list(parts_by_name(example).values())
    if not parts:
        return 1
    if all(isinstance(part, int | float | np.generic) for part in parts):
        return len(parts)
    return max(map(length_of, parts))


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthCost:
    """What an example takes by its length T: ``fixed + each T + square T^2``, none below zero.

    Beyond ``longest``, the longest length that was measured, an example takes as much as if all of
    it were quadratic if ``is_guess``: fewer than two lengths say nothing of the square.
    """

    fixed: float
    each: float
    square: float
    longest: float
    is_guess: bool = False

    @classmethod
    def through(cls, points: Mapping[int, float]) -> LengthCost:
        """Return a curve through the costs of one to three lengths.

        ======== ==========================================================
        lengths  curve
        ======== ==========================================================
        1        proportional; beyond the length the square of it
        2        each and square; fixed and each where the square is negative
        3        all three; where one is negative, that of the outer two
        ======== ==========================================================
        """
        (first, low), *more = sorted(points.items())
        if not more:
            return cls(fixed=0.0, each=low / first, square=0.0, longest=first, is_guess=True)
        last, high = more[-1]
        if len(more) == 2:
            square, each, fixed = np.polyfit(list(points), list(points.values()), 2).tolist()
            tiny = 1e-9 * high / last  # a line is found but for its rounding
            square = 0.0 if abs(square) * last < tiny else square
            fixed = 0.0 if abs(fixed) < tiny * last else fixed
            if min(fixed, each, square) >= 0:
                return cls(fixed=fixed, each=each, square=square, longest=last)
        square = (high / last - low / first) / (last - first)
        if square >= 0:
            each = max(low / first - square * first, 0.0)
            square = (high - each * last) / last**2
            return cls(fixed=0.0, each=each, square=square, longest=last)
        each = max((high - low) / (last - first), 0.0)
        return cls(fixed=high - each * last, each=each, square=0.0, longest=last)

    def at(self, length: float) -> float:
        """Return the cost of an example of this length."""
        cost = self.fixed + self.each * length + self.square * length**2
        return cost * max(length / self.longest, 1.0) if self.is_guess else cost
