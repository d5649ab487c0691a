"""One micro-batch: forward and backward pass, which adds its gradients to the vector.

A non-finite loss is found before its backward pass, which costs nothing on a CPU. A non-finite
gradient is in the vector when it is found, and so is a part of one after a backward pass that
raised; the vector is then invalid (``client.training.faults``).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headwater.client.training.accumulator import Accumulator
from headwater.client.training.context import TrainingContext
from headwater.client.training.sampler import Window, seed_of
from headwater.common.data.example_faults import ExampleFault, exception_fault
from headwater.common.data.example_lengths import Positions
from headwater.common.errors import HeadwaterError, TaskError
from headwater.common.messages import Plan, Step
from headwater.common.model.chunked_cross_entropy import adding_in_place
from headwater.common.task import LossOf, Metrics, loss_sum
from headwater.common.user_code.failures import described, is_allocation_failure

log = logging.getLogger(__name__)

GRADIENT_FAULT = ExampleFault(
    "its gradient is NaN or infinite, though its loss is finite (nansum, or a mask after the loss, "
    "hides a NaN in the loss alone: replace it before the loss)"
)


@dataclass(kw_only=True, slots=True)
class MicroBatchResult:
    """Loss and metrics of a micro-batch whose gradients are in the vector."""

    loss_sum: float
    metric_sums: Metrics
    step: Step
    faults: dict[int, ExampleFault] = field(default_factory=dict)
    """The examples that added nothing; none, unless each is clipped by itself."""
    needs_check: bool = False
    """Whether the vector may not be finite now."""


AddMicroBatch = Callable[[Plan, Window, Positions, TrainingContext, float], MicroBatchResult]
"""Adds a micro-batch to the vector; the step's time counts from the last argument."""


class NonFiniteLoss(Exception):
    """The loss is not finite; nothing was added to the vector."""


class InvalidGradients(Exception):
    """The vector is partly updated or not finite, and must be set to zero."""

    def __init__(self, text: str = "", fault: ExampleFault = GRADIENT_FAULT) -> None:
        super().__init__(text)
        self.fault = fault


class ForwardFailed(InvalidGradients):
    """The task raised in the forward pass, before anything was added to the vector."""


def add_micro_batch(
    plan: Plan,
    window: Window,
    positions: Positions,
    context: TrainingContext,
    since_seconds: float,
) -> MicroBatchResult:
    """Add a micro-batch's gradients to the vector; the step's time counts from ``since_seconds``.

    Whether the vector is still finite is for ``with_norm`` to find out.

    Raises:
        NonFiniteLoss: nothing was added.
        InvalidGradients: the task raised.
        MemoryError: an allocation failed; the vector is invalid.
        TaskError: the task breaks a rule.
    """
    accumulator, load = context.accumulator, context.load(positions)
    size = load if context.lengths is None else context.size(positions)
    context.memory.begin(load)
    num_changes = accumulator.num_changes
    loss, weight, metrics = forward(plan, window, positions, context)
    if plan.hides_data:  # a figure of the server's model's loses no gradient
        metrics = {name: value if math.isfinite(value) else 0.0 for name, value in metrics.items()}
    loss_value = checked_loss(loss, metrics, accumulator, num_changes)
    backward(loss)
    context.clock.worked(size)
    return MicroBatchResult(
        loss_sum=loss_value,
        metric_sums=metrics,
        step=Step(
            num_examples=len(positions),
            weight=weight,
            loss=loss_value / weight if weight else 0.0,
            peak_bytes=context.memory.end(load),
            seconds=context.clock.seconds() - since_seconds,
            size=None if context.lengths is None else size,
        ),
        needs_check=True,
    )


def checked_loss(
    loss: Tensor, metrics: Metrics, accumulator: Accumulator, num_changes: int
) -> float:
    """Return a loss as a number, before its backward pass.

    ``num_changes`` is the accumulator's before the forward pass.

    Raises:
        NonFiniteLoss: nothing was added.
        TaskError: ``loss_sum`` changed the vector, or a metric is not finite.
    """
    if accumulator.num_changes != num_changes:
        raise TaskError(
            "loss_sum changed the gradients of the model, and the sum so far is lost",
            remedy="leave zero_grad, backward and optimizers out of loss_sum",
        )
    value = loss.item()
    if not math.isfinite(value):
        raise NonFiniteLoss
    for name, metric in metrics.items():
        if not math.isfinite(metric):
            raise TaskError(
                f"loss_sum returned {metric} as the sum of the metric {name}",
                remedy="return sums of finite numbers as metrics",
            )
    return value


def with_norm(step: Step, context: TrainingContext) -> Step:
    """Return a step with the norm of the vector that it led to.

    Raises:
        InvalidGradients: the vector is not finite.
    """
    norm = context.accumulator.gradient_norm()
    if not math.isfinite(norm):
        raise InvalidGradients
    return replace(step, gradient_norm=norm)


def forward(
    plan: Plan,
    window: Window,
    positions: Positions,
    context: TrainingContext,
    compute: LossOf = loss_sum,
) -> tuple[Tensor, int, Metrics]:
    """Compute a micro-batch's loss sum; random layers are seeded by its first example.

    Raises:
        MemoryError: an allocation failed.
        InvalidGradients: the task raised an exception.
    """
    seed = layers_seed(plan.run_seed, window.place.epoch, context.name) + positions[0]
    torch.default_generator.manual_seed(seed)
    try:
        if (context.precision or plan.precision) == "bfloat16":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return compute(context.task, context.image.model, context.batches.of(positions))
        return compute(context.task, context.image.model, context.batches.of(positions))
    except (HeadwaterError, MemoryError):
        raise
    except Exception as error:
        if is_allocation_failure(error):
            raise MemoryError(str(error)) from error
        raise ForwardFailed(described(error), exception_fault(error)) from error


@functools.lru_cache(maxsize=64)
def layers_seed(run_seed: int, epoch: int, name: str) -> int:
    """Return the seed of random layers, less the number of a micro-batch's first example."""
    return seed_of("layers", run_seed, epoch, name)


def backward(loss: Tensor) -> None:
    """Add the gradients of a scalar into the leaves' ``grad``, as ``loss.backward()`` does.

    A loss without a graph, such as the zero that a detector returns for a picture without boxes,
    has no gradient and adds nothing. The task's check refuses one that depends on parameters.

    Raises:
        MemoryError: an allocation failed.
        InvalidGradients: an operation's backward raised an exception.
    """
    if not loss.requires_grad:
        return
    engine = _autograd_engine()
    try:
        # A Tensor subclass may define its own backward; other dtypes need a gradient of that dtype.
        with adding_in_place():
            if engine is None or type(loss) is not Tensor or loss.dtype is not torch.float32:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                _run_engine(engine, loss)
    except (HeadwaterError, MemoryError):
        raise
    except Exception as error:
        if is_allocation_failure(error):
            raise MemoryError(str(error)) from error
        raise InvalidGradients(described(error), exception_fault(error)) from error


Engine = Callable[..., Any]


@functools.cache
def _autograd_engine() -> Engine | None:
    """Return autograd's backward function, which ``Tensor.backward`` calls; None if it differs.

    ``Tensor.backward`` first inspects its arguments in Python. Without that a micro-batch of the
    digits perceptron takes 1.06 instead of 1.20 times the CPU time of a bare loop (136 and 151 us,
    torch 2.13, ``benchmarks.accumulation``), with the same gradients to the bit. The engine is not
    public API (its name is unchanged since 2017), so one small gradient is tried here, and
    ``Tensor.backward`` is used if the result is not the expected one.
    """
    try:
        engine: Engine = torch.autograd.Variable._execution_engine.run_backward
        leaf = torch.full((2,), 3.0, dtype=torch.float32, requires_grad=True)
        leaf.grad = torch.ones_like(leaf)
        with torch.enable_grad():
            _run_engine(engine, (leaf * leaf).sum())
        if leaf.grad.tolist() == [7.0, 7.0]:
            return engine
        log.debug("autograd's engine returned an unexpected gradient")
    except Exception as error:
        log.debug("autograd's engine: %s: %s", type(error).__name__, error)
    return None


def _run_engine(engine: Engine, loss: Tensor) -> None:
    engine(
        (loss,),
        (torch.ones_like(loss),),  # new each time: an operation may write to its gradient
        False,  # keep_graph
        False,  # create_graph
        (),  # inputs: all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )
