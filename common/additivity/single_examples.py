"""The sums of single examples, and the sum of their gradients in the parameters' ``grad``.

Examples that raise or give a NaN are skipped, as they are in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwater.common.additivity.example_cache import ExampleCache
from headwater.common.additivity.outside_parameters import check_parameters_are_inside
from headwater.common.additivity.sums import Sums
from headwater.common.additivity.trial_state import (
    as_it_was,
    gradient_norm,
    random_state,
    zero_gradients,
)
from headwater.common.data.example_faults import ExampleFault, exception_fault, loss_fault
from headwater.common.errors import HeadwaterError, TaskError, TaskNotAdditive
from headwater.common.model.chunked_cross_entropy import adding_in_place
from headwater.common.model.layout import changed, moved, named_tensors, unfrozen
from headwater.common.model.vectors import bit_sum
from headwater.common.task import (
    Examples,
    LossOf,
    Task,
    loss_sum,
    loss_sum_alone,
    max_weight_per_example,
)
from headwater.common.user_code.failures import is_allocation_failure

NUM_COMPARED, NUM_TRIED = 4, 16
SCALE = 64.0  # of a loss: a sum over so many examples has gradients of this size

GRADIENT_FAULT = ExampleFault(
    "its gradient is NaN or infinite, though its loss is finite (nansum, or a mask after the loss, "
    "hides a NaN in the loss alone: replace it before the loss)"
)

MayTrainOn = Callable[[int], bool]
"""Returns whether a batch of so many examples may be trained on, after one example was."""


def usable(
    task: Task, model: nn.Module, examples: Examples, positions: Sequence[int] | None = None
) -> list[int]:
    """Return up to four of the first sixteen positions that give a finite loss and gradient."""
    tried = range(len(examples)) if positions is None else positions
    with as_it_was(model):
        singles = SingleExamples(task, model, ExampleCache(task, examples))
        singles.add(tried[:NUM_TRIED], lambda _: True)
    return list(singles.sums)


class SingleExamples:
    """Trains on examples one by one.

    A model that draws random numbers in training (dropout) is switched to evaluation mode, because
    its draws differ from call to call.
    """

    def __init__(
        self, task: Task, model: nn.Module, cache: ExampleCache, *, has_gradients: bool = True
    ) -> None:
        """Take the model in training mode; its gradients, if it has any, are set to zero.

        Without ``has_gradients`` no example passes backward.
        """
        self.sums: dict[int, Sums] = {}
        """The sums of each example that could be trained on, whose gradients are in ``grad``."""
        self.norms: list[float] = []
        """The norm of the gradients after each example that was added."""
        self.faults: dict[int, ExampleFault] = {}
        self.is_random = False
        """Whether the loss draws random numbers in evaluation mode too."""
        self.has_gradients = has_gradients
        """Whether the gradients of all examples are in ``grad``; else at most the first one's."""
        self.task, self.model, self.cache = task, model, cache
        self._is_looked_at = False  # the graph of a loss, once
        self._has_graph = False  # any loss that was to pass backward
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        zero_gradients(self._parameters)

    @property
    def gradient_norm(self) -> float:
        """The norm of what is in ``grad`` now."""
        return gradient_norm(self._parameters)

    def add(self, positions: Iterable[int], may_add: MayTrainOn) -> None:
        """Add the gradients of single examples that work: two, or four if so many may be added.

        If two may not be, the second passes forward only: no gradients are compared.

        Raises:
            MemoryError: an allocation failed.
            TaskNotAdditive: an example weighs more than the task's ``max_weight_per_example``.
            TaskError, BuffersChanged: a metric is not finite; the loss has no gradient; the forward
                pass changed a buffer.
        """
        self._add(positions, may_add)
        if self.sums and self.has_gradients and not self._has_graph:
            self._check_constant(next(iter(self.sums)))

    def _check_constant(self, position: int) -> None:
        """Check that a loss without a graph is a constant, as that of a picture without boxes.

        The parameters are doubled for one pass, and halved: float32 is exact in both.

        Raises:
            TaskError: the loss changes with the parameters.
        """
        try:
            _multiply(self._parameters, 2.0)
            loss = self.forward(self.cache.batch([position])).loss
        finally:
            _multiply(self._parameters, 0.5)
        if loss != self.sums[position].loss:
            raise TaskError(
                "the loss depends on the parameters, and has no gradient",
                remedy="leave out what cuts the graph in loss_sum and forward: detach(), .data, "
                ".item(), .numpy(), argmax, torch.no_grad(), inference_mode",
            )

    def _add(self, positions: Iterable[int], may_add: MayTrainOn) -> None:
        bound = max_weight_per_example(self.task)
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
            num_next = len(self.sums) + 1
            if num_next > NUM_COMPARED:
                return
            is_permitted = may_add(num_next)
            if num_next == 2:
                self.has_gradients = self.has_gradients and is_permitted
            elif not is_permitted:
                return

    def _single(self, position: int) -> Sums | None:
        """Add one example, with its gradient if it is to have one; None if it has a fault."""
        if position in self.sums:
            return self.sums[position]
        try:
            batch = self.cache.batch([position])
            before = random_state()
            sums = self._passed(batch)
            if random_state() != before and self.model.training and not self.is_random:
                self._switch_mode(position)
                self.restart()
                sums = self._passed(self.cache.batch([position]))
            fault = None if math.isfinite(sums.loss) else loss_fault(self.cache.batch([position]))
        except (HeadwaterError, MemoryError):
            raise
        except Exception as error:
            if is_allocation_failure(error):
                raise MemoryError(str(error)) from error
            fault = exception_fault(error)
        norm = self.gradient_norm if self.has_gradients else 0.0
        if fault is None and not math.isfinite(norm):
            fault = GRADIENT_FAULT
        if fault is not None:
            self.faults[position] = fault
            self.restart()
            return None
        self.sums[position] = sums
        self.norms.append(norm)
        return sums

    def _switch_mode(self, position: int) -> None:
        """Switch to evaluation mode, as the model draws random numbers in training."""
        self.model.eval()
        if self._draws([position]):
            self.model.train()
            self.is_random = True

    def _draws(self, positions: Sequence[int]) -> bool:
        """Return whether a forward pass draws random numbers from a generator of the process."""
        batch, before = self.cache.batch(positions), random_state()
        self.forward(batch)
        return random_state() != before

    def _gradient_versions(self) -> list[int | None]:
        """Return a number for each gradient, which grows when something writes to it."""
        grads = [parameter.grad for parameter in self._parameters]
        return [None if grad is None else grad._version for grad in grads]

    def restart(self) -> None:
        """Add the gradients again, without those of an example that failed half-way."""
        zero_gradients(self._parameters)
        self.norms = []
        for position in self.sums:
            self.sums[position] = self._passed(self.cache.batch([position]))
            self.norms.append(self.gradient_norm if self.has_gradients else 0.0)

    def _passed(self, batch: Any) -> Sums:
        return self.backward(batch, sign=1.0) if self.has_gradients else self.forward(batch)

    def scaled_gap(self, position: int) -> tuple[float, float]:
        """Return the length of ``SCALE`` times an example's gradient, and its gap to another.

        The other is the gradient of ``SCALE`` times its loss. The gradients of the examples that
        were added are added again afterwards.
        """
        zero_gradients(self._parameters)
        self.backward(self.cache.batch([position]), sign=1.0)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(SCALE)
        length = self.gradient_norm
        self.backward(self.cache.batch([position]), sign=-SCALE)
        gap = self.gradient_norm
        self.restart()
        return length, gap

    def forward(self, batch: Any) -> Sums:
        """Return the sums of a batch, without gradients.

        Raises:
            BuffersChanged: see ``backward``.
        """
        return self._sums(batch, loss_sum_alone)[1]

    def backward(self, batch: Any, *, sign: float) -> Sums:
        """Add the gradient of a batch times ``sign``; nothing is added if its loss is not finite.

        Raises:
            BuffersChanged: the forward pass changed a buffer or a parameter.
            TaskError: the loss depends on a parameter that is not in the model.
        """
        loss, sums = self._sums(batch, loss_sum)
        if not self._is_looked_at:
            self._is_looked_at = True
            check_parameters_are_inside(self.task, self.model, loss)
        self._has_graph |= loss.requires_grad
        if math.isfinite(sums.loss) and loss.requires_grad:
            with adding_in_place():
                (loss if sign == 1 else loss * sign).backward()  # type: ignore[no-untyped-call]
        return sums

    def _sums(self, batch: Any, compute: LossOf) -> tuple[Tensor, Sums]:
        before = [(name, tensor, tensor._version) for name, tensor in named_tensors(self.model)]
        places = [(name, one, *_place(one)) for name, one, _ in before if one.requires_grad]
        frozen = [(name, tensor) for name, tensor, _ in before if not tensor.requires_grad]
        gradients = self._gradient_versions()
        loss, weight, metrics = compute(self.task, self.model, batch)
        if self._gradient_versions() != gradients:
            raise TaskError(
                "loss_sum wrote to the gradients of the model: it called backward()",
                remedy="leave backward(), zero_grad() and step() out of loss_sum, and return the "
                "loss with its graph: the client takes the gradients",
            )
        now = dict(named_tensors(self.model))
        for name, tensor, version in before:
            if now.get(name) is not tensor or tensor._version != version:
                raise changed(tensor, name, "a forward pass in training")
        for name, tensor, *place in places:
            if [*_place(tensor)] != place:
                raise moved(f"the parameter {name}", "a forward pass in training")
        for name, tensor in frozen:
            if tensor.requires_grad:
                raise unfrozen(name)
        if loss.dtype in (torch.bfloat16, torch.float16):
            kind = str(loss.dtype).removeprefix("torch.")
            raise TaskNotAdditive(
                f"the loss is summed in {kind}, which rounds sums to two or three digits",
                remedy="compute the loss in float32: cross_entropy(logits.float(), labels, "
                'reduction="sum")',
            )
        sums = Sums(loss.item(), weight, metrics)
        for name, value in metrics.items():
            if math.isfinite(sums.loss) and not math.isfinite(value):
                raise TaskError(
                    f"loss_sum returned {value} as the sum of the metric {name}",
                    remedy="return sums of finite numbers as metrics",
                )
        return loss, sums


def _place(parameter: Tensor) -> tuple[int, int]:
    """Return where a parameter lies, and a sum over its bits."""
    bits = bit_sum(parameter) if parameter.dtype is torch.float32 else 0
    return parameter.data_ptr(), bits


def _multiply(parameters: Iterable[Tensor], factor: float) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(factor)
