"""Compares a batch of a few examples with its parts: what a task returns must be a sum.

It finds the most common mistakes (a mean is returned, batch statistics, padding is counted, a wrong
broadcast) and names them with the two numbers that should be equal.

The check needs no second vector: the gradients of the single examples are added into the
parameters' ``grad``, that of all together is subtracted there, and the rest must be zero.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headwater.common.additivity.example_cache import ExampleCache
from headwater.common.additivity.single_examples import MayTrainOn, SingleExamples
from headwater.common.additivity.sums import (
    BroadcastWatch,
    Sums,
    compare,
    compare_draws,
    compare_gradients,
)
from headwater.common.errors import HeadwaterError, TaskFailed, TaskNotAdditive
from headwater.common.task import loss_sum_alone
from headwater.common.user_code import described, is_allocation_failure

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
        pairs = [positions[at : at + 2] for at in range(len(positions) - 1)]
        for group in pairs if len(positions) > 2 else []:
            self.compare(group)
        is_fitting = self._singles.has_gradients and may_train_on(len(positions))
        self.compare(positions, with_gradients=is_fitting)
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
        else:
            together = self._together(lambda: self._forward(self._cache, group), group)
        try:
            compare(together, [self._singles.sums[p] for p in group], size=size)
            if with_gradients:
                # The gradient of a single example is at most as long as the two sums around it.
                length = math.fsum(2 * norm for norm in self._singles.norms)
                gap = self._singles.gradient_norm
                compare_gradients(gap=gap, total=total, length=length, size=size)
        except TaskNotAdditive as error:
            self._explain(error, group)

    def compare_halves(self, cache: ExampleCache, positions: Sequence[int]) -> set[str]:
        """Compare a larger batch with its two halves, without gradients; return zero metrics.

        A metric that is zero for the few examples alone, such as the accuracy of an untrained
        model, looks like a sum there.

        Raises:
            TaskNotAdditive, TaskFailed: see ``Comparison``.
            MemoryError: an allocation failed.
        """
        if self._singles.is_random or len(positions) < 2 or not cache.freeze(positions):
            return set()
        middle = len(positions) // 2
        *halves, together = [
            self._together(partial(self._forward, cache, group), group)
            for group in (positions[:middle], positions[middle:], positions)
        ]
        try:
            compare(together, halves, size=len(positions), how="in two halves")
        except TaskNotAdditive as error:
            again = self._forward(cache, positions)
            if again != together:
                return set()  # a random generator that the check cannot see
            self._raise_named(error, cache, positions)
        return {name for name, value in together.metrics.items() if value == 0}

    def _forward(self, cache: ExampleCache, group: Sequence[int]) -> Sums:
        return self._singles.forward(cache.batch(group))

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


def together_failed(positions: Sequence[int], text: str) -> TaskFailed:
    """Return the error of examples that work alone and raise together."""
    return TaskFailed(
        f"{len(positions)} examples that work one by one fail in one batch: {text}",
        remedy=RAGGED_REMEDY,
    )
