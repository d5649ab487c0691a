"""Reads from autograd's graph how a loss was reduced to one number: by a sum, or by a mean.

A mean looks like any other number, and its gradients like those of an easier batch: no test of
values can tell it from a sum. The graph can. From the loss back to the reductions there are only
scalars, and linear operations on them; autograd's own gradient at a reduction is the factor by
which its result enters the loss. ``criterion(...)`` with the default ``reduction="mean"`` gives a
mean with the factor 1; ``criterion(...) * n`` one with the factor n, which is a sum again.

What it cannot see: a loss that another function computes as a whole (a custom
``autograd.Function``, a compiled loss, ``torch.linalg.norm``), and a term that does not depend on
the examples, such as a penalty on the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

# Operations whose result is proportional to a scalar that enters them.
LINEAR = (
    *("AddBackward", "SubBackward", "MulBackward", "DivBackward", "NegBackward", "RsubBackward"),
    *("ToCopyBackward", "CloneBackward", "AliasBackward", "ViewBackward", "UnsafeViewBackward"),
    *("ReshapeAliasBackward", "SqueezeBackward", "UnsqueezeBackward"),
)
MEAN, SUM = 1, 2  # values of torch's ``reduction``


@dataclass(kw_only=True)
class LossReduction:
    """The factors by which means and sums enter one loss; known after its backward pass."""

    means: list[float] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    is_seen: bool = True
    """Whether each term of the loss ends in a sum or a mean that the graph shows."""

    def is_mean(self, n: int) -> bool:
        """Return whether means enter the loss without the factor that makes them sums over ``n``.

        Half the factor is enough: label smoothing weighs its mean by less than one.
        """
        return n > 1 and bool(self.means) and sum(self.means) <= n / 2

    @property
    def factor(self) -> float | None:
        """The largest factor of a sum; None if there is none, or a mean beside it."""
        return None if self.means or not self.sums else max(self.sums)


def watch(loss: Tensor) -> LossReduction:
    """Return a loss's reduction, which its next backward pass fills in."""
    found = LossReduction()
    waiting: list[Any] = [loss.grad_fn]
    visited: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in visited or node.name().endswith("AccumulateGrad"):
            continue
        visited.add(node)
        kind = _reduction(node)
        if kind == MEAN:
            _record_factor(node, found.means)
        elif kind == SUM:
            _record_factor(node, found.sums)
            for mean in _means_within(node):
                _record_factor(mean, found.means)
        elif node.name().startswith(LINEAR):
            waiting += [above for above, _ in node.next_functions]
        else:
            found.is_seen = False
    if not found.means and not found.sums and not visited:
        found.is_seen = False
    return found


def _reduction(node: Any) -> int | None:
    """Return how a node reduces to a scalar: MEAN, SUM, or None if it does not."""
    name = node.name()
    if name.startswith("MeanBackward"):
        return MEAN
    if name.startswith(("SumBackward", "DotBackward")):
        return SUM
    reduction = getattr(node, "_saved_reduction", None)
    return reduction if reduction in (MEAN, SUM) else None


def _means_within(total: Any) -> list[Any]:
    """Return the means that a sum adds: of a list that was stacked, or over dimension 0."""
    above = [node for node, _ in total.next_functions if node is not None]
    stacked = [
        node
        for stack in above
        if stack.name().startswith("StackBackward") and len(total._saved_self_sym_sizes) == 1
        for node, _ in stack.next_functions
        if node is not None
    ]
    return [node for node in stacked if _reduction(node) == MEAN] + [
        node for node in above if node.name() == "MeanBackward1" and 0 in _dimensions(node)
    ]


def _dimensions(mean: Any) -> set[int]:
    """Return the dimensions of a mean, counted from the first; torch saves -1 as 2^64 - 1."""
    num_dimensions = len(mean._saved_self_sym_sizes)
    saved = mean._saved_dim or range(num_dimensions)
    return {(d - 2**64 if d >= 2**63 else d) % max(num_dimensions, 1) for d in saved}


def _record_factor(node: Any, factors: list[float]) -> None:
    def record(gradients: tuple[Tensor, ...]) -> None:
        factors.append(float(gradients[0].detach().abs().mean()))

    node.register_prehook(record)
