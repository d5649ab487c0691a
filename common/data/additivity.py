"""Checks on a few real examples, before the first round, that a task's loss is a sum.

It finds the most common mistakes (a mean is returned, batch statistics, padding is counted) and
names them with the two numbers that should be equal.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwater.common.data.batches import batch_of
from headwater.common.errors import BuffersChanged, HeadwaterError, TaskNotAdditive
from headwater.common.model.vectors import all_finite
from headwater.common.task import Examples, Task, loss_sum, max_weight_per_example

log = logging.getLogger(__name__)

# float32 rounding of a few examples is below 1e-5 relative; the mistakes that the check looks for
# (a mean, batch statistics, counted padding) are off by a tenth and more.
ADDITIVE_TOLERANCE = 2.0**-10


def check_additive(task: Task, model: nn.Module, examples: Examples) -> None:
    """Check on up to four real examples that the loss, its weight and its gradient are sums.

    Compares each example alone, each adjacent pair, and all together. A model that draws random
    numbers in training (dropout) is compared in evaluation mode, because its draws differ from call
    to call. The model itself is not changed. A single example always passes. Examples that raise,
    or give a NaN, are skipped, as they are in training.

    Raises:
        TaskNotAdditive: with the two numbers that should be equal and the likely cause.
        BuffersChanged: the forward pass in training mode changed a buffer.
    """
    model = copy.deepcopy(model)
    model.train()
    positions = usable(task, model, examples)
    if not positions:
        return
    model.train(not _is_random(task, model, batch_of(task, examples, positions)))
    singles = {p: _measured(task, model, batch_of(task, examples, [p])) for p in positions}
    groups = [list(pair) for pair in itertools.pairwise(positions)] + [positions]
    bound = max_weight_per_example(task)
    for position, single in singles.items():
        if single[1] > bound:
            raise TaskNotAdditive(
                f"example {position} weighs {single[1]}, more than the task's "
                f"max_weight_per_example of {bound}",
                remedy="set max_weight_per_example to the most tokens that one example can have",
            )
    for group in groups:
        together = _measured(task, model, batch_of(task, examples, group))
        _compare(together, [singles[position] for position in group], size=len(group))


Measured = tuple[float, int, Tensor]


def usable(task: Task, model: nn.Module, examples: Examples) -> list[int]:
    """Return up to four of the first sixteen positions that give a finite loss and gradient."""
    usable_positions: list[int] = []
    for position in range(min(16, len(examples))):
        try:
            loss, _, gradient_P = _measured(task, model, batch_of(task, examples, [position]))
        except HeadwaterError:
            raise
        except Exception as error:
            log.debug("example %d is skipped: %s: %s", position, type(error).__name__, error)
            continue
        if math.isfinite(loss) and all_finite(gradient_P):
            usable_positions.append(position)
        if len(usable_positions) == 4:
            break
    return usable_positions


def _measured(task: Task, model: nn.Module, batch: Any) -> Measured:
    """Return the loss sum, the weight and the flat gradient [P] of a batch."""
    model.zero_grad(set_to_none=True)
    before = [(name, buffer, buffer._version) for name, buffer in model.named_buffers()]
    loss, weight, _ = loss_sum(task, model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    now = dict(model.named_buffers())
    for name, buffer, version in before:
        if now.get(name) is not buffer or buffer._version != version:
            raise BuffersChanged(f"a forward pass in training changed the buffer {name}")
    gradients = [
        torch.zeros(p.numel()) if p.grad is None else p.grad.detach().reshape(-1)
        for p in model.parameters()
        if p.requires_grad
    ]
    gradient_P = torch.cat(gradients)
    model.zero_grad(set_to_none=True)
    return loss.item(), weight, gradient_P


def _is_random(task: Task, model: nn.Module, batch: Any) -> bool:
    model.train()
    state = torch.get_rng_state()
    losses = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            losses.add(loss_sum(task, model, batch)[0].item())
    torch.set_rng_state(state)
    return len(losses) > 1


def _compare(together: Measured, alone: Sequence[Measured], *, size: int) -> None:
    """Compare one batch of ``size`` examples with the sums over its examples taken alone."""
    weight = sum(single[1] for single in alone)
    if together[1] != weight:
        raise TaskNotAdditive(
            f"{size} examples together weigh {together[1]}, one by one {weight}: "
            "probably padding is counted in the weight",
            remedy="count only real tokens or examples in the weight",
        )
    loss = math.fsum(single[0] for single in alone)
    scale = math.fsum(abs(single[0]) for single in alone) or 1.0
    if not abs(together[0] - loss) <= ADDITIVE_TOLERANCE * scale:
        raise TaskNotAdditive(
            f"the loss of {size} examples together is {together[0]:.6g}, the sum one by one "
            f"{loss:.6g}: {_likely_cause(together[0], loss, size)}"
        )
    gradient_P = alone[0][2].clone()
    for single in alone[1:]:
        gradient_P += single[2]
    norms = float(together[2].norm()), float(gradient_P.norm())
    length = math.fsum(float(single[2].norm()) for single in alone)
    gap = float(gradient_P.sub_(together[2]).norm())
    if not gap <= ADDITIVE_TOLERANCE * (length or 1.0):
        raise TaskNotAdditive(
            f"the gradient of {size} examples together has length {norms[0]:.6g}, the sum one by "
            f"one {norms[1]:.6g}, and they are {gap:.3g} apart: probably a layer mixes the "
            "examples of a batch"
        )


def _likely_cause(together: float, alone: float, size: int) -> str:
    if math.isclose(together * size, alone, rel_tol=0.01):
        return "probably a mean is returned, not a sum"
    return "probably padding enters the loss, or a layer mixes the examples of a batch"
