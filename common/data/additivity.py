"""Checks on a few real examples, before the first round, that what a task returns is a sum.

It finds the most common mistakes (a mean is returned, batch statistics, padding is counted, a wrong
broadcast) and names them with the two numbers that should be equal.

The check needs no second vector: the gradients of the single examples are added into the
parameters' ``grad``, that of all together is subtracted there, and the rest must be zero.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwater.common.data.example_cache import ExampleCache
from headwater.common.data.example_faults import ExampleFault, exception_fault, loss_fault
from headwater.common.data.sums import (
    BroadcastWatch,
    Sums,
    compare,
    compare_draws,
    compare_gradients,
)
from headwater.common.data.trial_state import (
    as_it_was,
    gradient_norm,
    random_state,
    zero_gradients,
)
from headwater.common.errors import (
    BuffersChanged,
    HeadwaterError,
    TaskError,
    TaskFailed,
    TaskNotAdditive,
)
from headwater.common.task import Examples, Task, loss_sum, max_weight_per_example
from headwater.common.user_code import described, is_allocation_failure

NUM_COMPARED, NUM_TRIED = 4, 16
# A loss that draws random numbers in evaluation mode too is compared on means of so many draws.
NUM_DRAWS = 16

GRADIENT_FAULT = ExampleFault("its gradient is NaN or infinite, though its loss is finite")

RAGGED_REMEDY = (
    "if the examples have different shapes, give the task a method collate(examples) that pads "
    "them (docs/task.md)"
)
BROADCAST_REMEDY = (
    "give both the same shape, for example model(inputs).squeeze(1) or targets.unsqueeze(1)"
)

MayTrainOn = Callable[[int], bool]
"""Returns whether a batch of so many examples may be trained on, after one example was."""


def usable(task: Task, model: nn.Module, examples: Examples) -> list[int]:
    """Return up to four of the first sixteen positions that give a finite loss and gradient."""
    with as_it_was(model):
        comparison = Comparison(task, model, ExampleCache(task, examples))
        comparison.add_singles(range(min(NUM_TRIED, len(examples))), lambda _: True)
    return list(comparison.singles)


class Comparison:
    """Compares a batch of a few examples with its parts, in the memory that training takes.

    A model that draws random numbers in training (dropout) is compared in evaluation mode, because
    its draws differ from call to call. If it draws them there too, only means of many draws can be
    compared, which finds a mean and nothing else.

    It raises ``TaskNotAdditive`` with the two numbers that should be equal and the likely cause,
    ``TaskFailed`` for examples that work alone and raise together, and ``BuffersChanged`` if the
    forward pass in training mode changed a buffer. Examples that raise or give a NaN are skipped,
    as they are in training.
    """

    def __init__(self, task: Task, model: nn.Module, cache: ExampleCache) -> None:
        """Take the model in training mode; its gradients, if it has any, are set to zero."""
        self.singles: dict[int, Sums] = {}
        """The sums of each example that could be trained on, whose gradients are in ``grad``."""
        self.faults: dict[int, ExampleFault] = {}
        self.notes: list[str] = []
        self._task, self._model, self._cache = task, model, cache
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._norms: list[float] = []
        self._is_random = False
        zero_gradients(self._parameters)

    # Single examples.

    def add_singles(self, positions: Iterable[int], may_add: MayTrainOn) -> None:
        """Add the gradients of single examples that work: two, or four if so many may be added.

        Raises:
            MemoryError: an allocation failed.
            TaskError, BuffersChanged: see ``Comparison``.
        """
        bound = max_weight_per_example(self._task)
        for position in positions:
            sums = self._single(position)
            if sums is None:
                continue
            if sums.weight > bound:
                raise TaskNotAdditive(
                    f"example {position} weighs {sums.weight}, more than the task's "
                    f"max_weight_per_example of {bound}",
                    remedy="set max_weight_per_example to the most tokens that one example can "
                    "have",
                )
            num_next = len(self.singles) + 1
            if num_next > NUM_COMPARED or (num_next > 2 and not may_add(num_next)):
                return

    def _single(self, position: int) -> Sums | None:
        """Add one example's gradient; None if it has a fault."""
        if position in self.singles:
            return self.singles[position]
        try:
            batch = self._cache.batch([position])
            before = random_state()
            sums = self._backward(batch, sign=1.0)
            if random_state() != before and self._model.training and not self._is_random:
                self._switch_mode(position)
                self._restart()
                sums = self._backward(self._cache.batch([position]), sign=1.0)
            fault = None if math.isfinite(sums.loss) else loss_fault(self._cache.batch([position]))
        except (HeadwaterError, MemoryError):
            raise
        except Exception as error:
            if is_allocation_failure(error):
                raise MemoryError(str(error)) from error
            fault = exception_fault(error)
        norm = gradient_norm(self._parameters)
        if fault is None and not math.isfinite(norm):
            fault = GRADIENT_FAULT
        if fault is not None:
            self.faults[position] = fault
            self._restart()
            return None
        self.singles[position] = sums
        self._norms.append(norm)
        return sums

    def _switch_mode(self, position: int) -> None:
        """Switch to evaluation mode, as the model draws random numbers in training."""
        self._model.eval()
        if self._draws([position]):
            self._model.train()
            self._is_random = True

    def _draws(self, positions: Sequence[int]) -> bool:
        """Return whether a forward pass draws random numbers from a generator of the process."""
        batch, before = self._cache.batch(positions), random_state()
        self.forward(batch)
        return random_state() != before

    def _restart(self) -> None:
        """Add the gradients again, without those of an example that failed half-way."""
        zero_gradients(self._parameters)
        self._norms = []
        for position in self.singles:
            self.singles[position] = self._backward(self._cache.batch([position]), sign=1.0)
            self._norms.append(gradient_norm(self._parameters))

    # Groups.

    def run(self, may_train_on: MayTrainOn) -> None:
        """Compare the examples together with the examples alone.

        Raises:
            TaskNotAdditive, TaskFailed: see ``Comparison``.
            MemoryError: an allocation failed.
        """
        positions = list(self.singles)
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
            self._restart()
        if self._is_random:
            self._compare_draws(positions)
            return
        pairs = [positions[at : at + 2] for at in range(len(positions) - 1)]
        for group in pairs if len(positions) > 2 else []:
            self.compare(group)
        is_fitting = may_train_on(len(positions))
        self.compare(positions, with_gradients=is_fitting)
        if not is_fitting:
            self.notes.append(
                f"the gradients of {len(positions)} examples together were not compared: they are "
                "predicted not to fit in memory"
            )

    def compare(self, group: Sequence[int], *, with_gradients: bool = False) -> None:
        """Compare the sums of a group with those of its examples alone.

        With ``with_gradients`` the group must be all examples, and the gradients are used up.

        Raises:
            TaskNotAdditive, TaskFailed: see ``Comparison``.
        """
        size = len(group)
        total = gradient_norm(self._parameters)
        if with_gradients:
            together = self._together(
                lambda: self._backward(self._cache.batch(group), sign=-1.0), group
            )
        else:
            together = self._together(lambda: self.forward(self._cache.batch(group)), group)
        gap = gradient_norm(self._parameters)
        try:
            compare(together, [self.singles[p] for p in group], size=size)
            if with_gradients:
                # The gradient of a single example is at most as long as the two sums around it.
                length = math.fsum(2 * norm for norm in self._norms)
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
        if self._is_random or len(positions) < 2 or not cache.freeze(positions):
            return set()
        middle = len(positions) // 2
        *halves, together = [
            self._together(partial(self._forward_of, cache, group), group)
            for group in (positions[:middle], positions[middle:], positions)
        ]
        try:
            compare(together, halves, size=len(positions), how="in two halves")
        except TaskNotAdditive as error:
            again = self.forward(cache.batch(positions))
            if again != together:
                return set()  # a random generator that the check cannot see
            self._raise_named(error, cache.batch(positions), len(positions))
        return {name for name, value in together.metrics.items() if value == 0}

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
        first = group[0]
        again = self.forward(self._cache.batch([first]))
        if again != self.singles[first]:
            self._is_random = True
            self._compare_draws(group)
            return
        self._raise_named(error, self._cache.batch(group), len(group))

    def _raise_named(self, error: TaskNotAdditive, batch: Any, size: int) -> None:
        with torch.no_grad(), warnings.catch_warnings(), BroadcastWatch(size) as watch:
            warnings.simplefilter("ignore")  # torch's own about the same broadcast, shown before
            loss_sum(self._task, self._model, batch)
        if watch.found is not None:
            raise TaskNotAdditive(
                f"{error.message.partition(': ')[0]}: {watch.found}", remedy=BROADCAST_REMEDY
            ) from error
        raise error

    def _compare_draws(self, positions: Sequence[int]) -> None:
        """Compare means of many draws of a random loss; they show whether a mean is returned."""
        together = [self.forward(self._cache.batch(positions)).loss for _ in range(NUM_DRAWS)]
        alone = [
            math.fsum(self.forward(self._cache.batch([p])).loss for p in positions)
            for _ in range(NUM_DRAWS)
        ]
        compare_draws(together, alone, size=len(positions))
        self.notes.append(
            "the loss draws random numbers in evaluation mode too: its means over "
            f"{NUM_DRAWS} draws were compared, its gradients were not"
        )

    # Passes.

    def _forward_of(self, cache: ExampleCache, group: Sequence[int]) -> Sums:
        return self.forward(cache.batch(group))

    def forward(self, batch: Any) -> Sums:
        """Return the sums of a batch, without gradients."""
        with torch.no_grad():
            return self._sums(batch)[1]

    def _backward(self, batch: Any, *, sign: float) -> Sums:
        """Add the gradient of a batch times ``sign``; nothing is added if its loss is not finite.

        Raises:
            BuffersChanged: the forward pass changed a buffer.
        """
        before = [(name, buffer, buffer._version) for name, buffer in self._model.named_buffers()]
        loss, sums = self._sums(batch)
        now = dict(self._model.named_buffers())
        for name, buffer, version in before:
            if now.get(name) is not buffer or buffer._version != version:
                raise BuffersChanged(f"a forward pass in training changed the buffer {name}")
        if math.isfinite(sums.loss):
            (loss if sign == 1 else loss * sign).backward()  # type: ignore[no-untyped-call]
        return sums

    def _sums(self, batch: Any) -> tuple[Tensor, Sums]:
        loss, weight, metrics = loss_sum(self._task, self._model, batch)
        sums = Sums(loss.item(), weight, metrics)
        for name, value in metrics.items():
            if math.isfinite(sums.loss) and not math.isfinite(value):
                raise TaskError(
                    f"loss_sum returned {value} as the sum of the metric {name}",
                    remedy="return sums of finite numbers as metrics",
                )
        return loss, sums


def together_failed(positions: Sequence[int], text: str) -> TaskFailed:
    """Return the error of examples that work alone and raise together."""
    return TaskFailed(
        f"{len(positions)} examples that work one by one fail in one batch: {text}",
        remedy=RAGGED_REMEDY,
    )
