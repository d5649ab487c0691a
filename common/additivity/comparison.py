"""Compares a batch of a few examples with its parts: what a task returns must be a sum.

It finds the most common mistakes (a mean is returned, batch statistics, padding is counted, a wrong
broadcast) and names them with the two numbers that should be equal.

The check needs no second vector: the gradients of the single examples are added into the
parameters' ``grad``, that of all together is subtracted there, and the rest must be zero.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from headwater.common.additivity.exact_model import TOLERANCE as EXACT_TOLERANCE
from headwater.common.additivity.exact_model import ExactModel
from headwater.common.additivity.example_cache import ExampleCache
from headwater.common.additivity.hidden_state import changed_attributes
from headwater.common.additivity.single_examples import SCALE, MayTrainOn, SingleExamples
from headwater.common.additivity.sums import (
    MIXED,
    PADDING,
    PENALTY,
    TOLERANCE,
    BroadcastWatch,
    Cause,
    Sums,
    compare,
    compare_draws,
    compare_gradients,
)
from headwater.common.errors import HeadwaterError, HiddenState, TaskFailed, TaskNotAdditive
from headwater.common.task import loss_sum_alone, rounds_weights
from headwater.common.user_code.failures import described, is_allocation_failure

# A loss that draws random numbers in evaluation mode too is compared on means of so many draws.
NUM_DRAWS = 16

RAGGED_REMEDY = (
    "if the examples have different shapes, give the task a method collate(examples) that pads "
    "them (docs/task.md)"
)
BROADCAST_REMEDY = (
    "give both the same shape, for example model(inputs).squeeze(1) or targets.unsqueeze(1)"
)


class Comparison:
    """Compares a batch of a few examples with its parts, in the memory that training takes.

    A model that draws random numbers in training (dropout) is compared in evaluation mode, because
    its draws differ from call to call. If it draws them there too, only means of many draws can be
    compared, which finds a mean and nothing else.

    It raises ``TaskNotAdditive`` with the two numbers that should be equal and the likely cause,
    ``TaskFailed`` for examples that work alone and raise together, and ``BuffersChanged`` if the
    forward pass in training mode changed a buffer.
    """

    def __init__(self, singles: SingleExamples) -> None:
        """Take the examples alone, to which some may be added later."""
        self.notes: list[str] = []
        self._singles, self._cache = singles, singles.cache
        self._exact: ExactModel | None = None
        self._exact_sums: dict[int, Sums] = {}

    def run(self, may_train_on: MayTrainOn) -> None:
        """Compare the examples together with the examples alone.

        Raises:
            TaskNotAdditive, TaskFailed: see ``Comparison``.
            MemoryError: an allocation failed.
        """
        positions = list(self._singles.sums)
        if positions and self._cache.differs_each_time(positions[0]):
            self.notes.append(
                f"example {positions[0]} differs each time it is read, as with random "
                "augmentation: each example is read once and compared as it was"
            )
        if len(positions) < 2:
            return
        if not self._together(lambda: self._cache.freeze(positions), positions):
            self.notes.append(
                "collate draws random numbers, and its batches cannot be split into rows: nothing "
                "could be compared"
            )
            return
        if self._cache.is_frozen:
            self.notes.append("collate draws random numbers: rows of one batch are compared")
            self._singles.restart()
        if self._singles.is_random:
            self._compare_draws(positions)
            return
        if self._singles.has_gradients:  # not of a model whose passes are slow
            self._check_hidden_state(positions[0])
            if self._singles.is_random:
                self._compare_draws(positions)
                return
            self._check_linear(positions[0], may_train_on)
            self._use_exact(positions)
        pairs = [positions[at : at + 2] for at in range(len(positions) - 1)]
        for group in pairs if len(positions) > 2 else []:
            self.compare(group)
        is_fitting = self._singles.has_gradients and may_train_on(len(positions))
        if self._exact is not None or not is_fitting:
            self.compare(positions)
        if is_fitting:
            self.compare(positions, with_gradients=True)
        if not is_fitting:
            self.notes.append(
                f"the gradients of {len(positions)} examples together were not compared: they are "
                "predicted not to fit in memory, or to take long"
            )

    def compare(self, group: Sequence[int], *, with_gradients: bool = False) -> None:
        """Compare the sums of a group with those of its examples alone.

        With ``with_gradients`` the group must be all examples, and the gradients are used up.

        Raises:
            TaskNotAdditive, TaskFailed: see ``Comparison``.
        """
        size = len(group)
        if with_gradients:
            total = self._singles.gradient_norm
            together = self._together(
                lambda: self._singles.backward(self._cache.batch(group), sign=-1.0), group
            )
            alone, tolerance = [self._singles.sums[p] for p in group], TOLERANCE
        else:
            together = self._together(lambda: self._forward(self._cache, group), group)
            alone, tolerance = [self._alone(p) for p in group], self._tolerance
        try:
            compare(
                *(together, alone),
                size=size,
                tolerance=tolerance,
                is_rounded=rounds_weights(self._singles.task),
                cause=partial(self._cause, self._cache, group),
            )
            if with_gradients:
                # The gradient of a single example is at most as long as the two sums around it.
                length = math.fsum(2 * norm for norm in self._singles.norms)
                gap = self._singles.gradient_norm
                compare_gradients(gap=gap, total=total, length=length, size=size)
        except TaskNotAdditive as error:
            self._explain(error, group)

    def compare_pieces(self, cache: ExampleCache, positions: Sequence[int]) -> set[str]:
        """Compare a larger batch with pieces of many sizes, without gradients; return zero metrics.

        A weight that is rounded in each call adds up in some cuts by chance, and seldom in all. A
        metric that is zero for the few examples alone, such as the accuracy of an untrained
        model, looks like a sum there.

        Raises:
            TaskNotAdditive, TaskFailed: see ``Comparison``.
            MemoryError: an allocation failed.
        """
        if self._singles.is_random or len(positions) < 2 or not cache.freeze(positions):
            return set()
        groups = pieces_of(positions)
        *parts, together = [
            self._together(partial(self._forward, cache, group), group)
            for group in (*groups, positions)
        ]
        how = f"in {len(groups)} pieces"
        cause = partial(self._cause, cache, positions)
        try:
            compare(
                *(together, parts),
                size=len(positions),
                how=how,
                tolerance=self._tolerance,
                is_rounded=rounds_weights(self._singles.task),
                cause=cause,
            )
        except TaskNotAdditive as error:
            again = self._forward(cache, positions)
            if again != together:
                return set()  # a random generator that the check cannot see
            self._raise_named(error, cache, positions)
        return {name for name, value in together.metrics.items() if value == 0}

    def _forward(self, cache: ExampleCache, group: Sequence[int]) -> Sums:
        if self._exact is not None:
            return self._exact.sums(cache.batch(group))
        return self._singles.forward(cache.batch(group))

    @property
    def _tolerance(self) -> float:
        return TOLERANCE if self._exact is None else EXACT_TOLERANCE

    def _alone(self, position: int) -> Sums:
        """Return the sums of one example, in float64 where the model can."""
        if self._exact is None:
            return self._singles.sums[position]
        if position not in self._exact_sums:
            self._exact_sums[position] = self._forward(self._cache, [position])
        return self._exact_sums[position]

    def _use_exact(self, positions: Sequence[int]) -> None:
        """Compare in float64 from now on, if the model and the task can."""
        singles = self._singles
        batch = self._together(lambda: self._cache.batch(positions), positions)
        self._exact = ExactModel.of(singles.task, singles.model, batch)

    def _check_hidden_state(self, position: int) -> None:
        """Check that a call leaves no state behind that changes the next one.

        A loss that differs for another reason draws random numbers from a generator of its own.

        Raises:
            HiddenState: it does; names the attributes.
        """
        singles = self._singles
        names = changed_attributes(
            singles.task,
            singles.model,
            lambda: singles.forward(self._cache.batch([position])).loss,
        )
        if names == ():
            singles.is_random = True
        elif names is not None:
            raise HiddenState(
                f"the same batch gives another loss when it is computed again: {', '.join(names)} "
                f"{'changes' if len(names) == 1 else 'change'} with each call, so that the sum "
                "depends on how the examples are cut"
            )

    def _check_linear(self, position: int, may_train_on: MayTrainOn) -> None:
        """Check that the gradient of 64 times the loss is 64 times the gradient.

        Raises:
            TaskNotAdditive: it is not; a hook clamps or normalises gradients.
        """
        singles = self._singles
        if not may_train_on(1):
            return
        length, gap = singles.scaled_gap(position)
        if gap > TOLERANCE * length:
            raise TaskNotAdditive(
                f"the gradient of {SCALE:g} times the loss and {SCALE:g} times the gradient, of "
                f"length {length:.6g}, are {gap:.3g} apart: a hook changes gradients, as "
                "register_hook with a clamp does, and what it does depends on how the examples are "
                "cut",
                remedy="leave gradient hooks out of the model; the server's optimizer may clip the "
                "mean gradient (docs/extend.md)",
            )

    def _cause(self, cache: ExampleCache, group: Sequence[int]) -> Cause:
        """Return why a group's loss is not the sum of its examples' losses.

        Two copies of one example need no padding, and their gap is that of a term which is added
        once a call.
        """
        first, other = group[0], group[1]
        gaps = []
        for position in (first, other):
            alone = self._forward(cache, [position]).loss
            gaps.append(2 * alone - self._forward(cache, [position, position]).loss)
        scale = abs(self._forward(cache, [first]).loss) or 1.0
        if max(map(abs, gaps)) <= self._tolerance * scale:
            batches = [cache.batch([position]) for position in group]
            is_ragged = any(shapes_of(one) != shapes_of(batches[0]) for one in batches)
            return PADDING if is_ragged else MIXED
        whole = math.fsum(self._forward(cache, [p]).loss for p in group)
        whole -= self._forward(cache, group).loss
        is_constant = math.isclose(gaps[0], gaps[1], rel_tol=0.01)
        is_constant &= math.isclose(whole, (len(group) - 1) * gaps[0], rel_tol=0.01)
        return PENALTY if is_constant else MIXED

    def _together(self, passed: Callable[[], Any], group: Sequence[int]) -> Any:
        """Run a pass of several examples that work alone.

        Raises:
            TaskFailed: it raised an exception.
        """
        try:
            return passed()
        except (HeadwaterError, MemoryError):
            raise
        except Exception as error:
            if is_allocation_failure(error):
                raise MemoryError(str(error)) from error
            raise together_failed(group, described(error)) from error

    def _explain(self, error: TaskNotAdditive, group: Sequence[int]) -> None:
        """Raise the error, with a wrong broadcast named; unless the loss itself is random."""
        first, again = (self._forward(self._cache, group[:1]) for _ in range(2))
        if first != again:
            self._singles.is_random = True
            self._compare_draws(group)
            return
        self._raise_named(error, self._cache, group)

    def _raise_named(
        self, error: TaskNotAdditive, cache: ExampleCache, positions: Sequence[int]
    ) -> None:
        found = self._pairing(cache, positions)
        # An axis of the model may be as long as the batch by chance, as the tokens of a mask are.
        if found is not None and self._pairing(cache, [*positions, *positions]) is not None:
            raise TaskNotAdditive(
                f"{error.message.partition(': ')[0]}: {found}", remedy=BROADCAST_REMEDY
            ) from error
        raise error

    def _pairing(self, cache: ExampleCache, positions: Sequence[int]) -> str | None:
        with warnings.catch_warnings(), BroadcastWatch(len(positions)) as watch:
            warnings.simplefilter("ignore")  # torch's own about the same broadcast, shown before
            loss_sum_alone(self._singles.task, self._singles.model, cache.batch(positions))
        found: str | None = watch.found
        return found

    def _compare_draws(self, positions: Sequence[int]) -> None:
        """Compare means of many draws of a random loss; they show whether a mean is returned."""
        together = [self._forward(self._cache, positions).loss for _ in range(NUM_DRAWS)]
        alone = [
            math.fsum(self._forward(self._cache, [p]).loss for p in positions)
            for _ in range(NUM_DRAWS)
        ]
        compare_draws(together, alone, size=len(positions))
        self.notes.append(
            "the loss draws random numbers in evaluation mode too: its means over "
            f"{NUM_DRAWS} draws were compared, its gradients were not"
        )


def pieces_of(positions: Sequence[int]) -> list[Sequence[int]]:
    """Cut positions into pieces of 1, 2, 3, 5, 8, 13, and again from 1."""
    pieces, start = [], 0
    for size in itertools.cycle((1, 2, 3, 5, 8, 13)):
        if start >= len(positions):
            break
        pieces.append(positions[start : start + size])
        start += size
    return pieces


def shapes_of(batch: Any) -> list[tuple[int, ...]]:
    """Return the shapes of a batch's tensors without their first axis, in their order."""
    if isinstance(batch, Tensor):
        return [] if batch.is_nested else [tuple(batch.shape[1:])]
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, list | tuple):
        return []
    return [shape for one in batch for shape in shapes_of(one)]


def together_failed(positions: Sequence[int], text: str) -> TaskFailed:
    """Return the error of examples that work alone and raise together."""
    return TaskFailed(
        f"{len(positions)} examples that work one by one fail in one batch: {text}",
        remedy=RAGGED_REMEDY,
    )
