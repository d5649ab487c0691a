"""Reads what each row of a batch adds to a task's sums, from one run of the task on the batch.

A task returns only sums. While it runs, a loss with ``reduction="sum"`` is computed with "none",
and its parts are kept before they are summed; so are those of a sum over all dimensions. If a task
makes a sum in another way, its examples go through the model one by one, by ``vmap``. So do those
of a task that sorts: after a sort the rows of a batch may be in another order than its examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from headwater.common.data.batches import UnsupportedBatch

# Losses that are the sum of what they return with ``reduction="none"``.
LOSSES = frozenset[Callable[..., Any]](
    {
        functional.binary_cross_entropy,
        functional.binary_cross_entropy_with_logits,
        functional.cross_entropy,
        functional.huber_loss,
        functional.l1_loss,
        functional.mse_loss,
        functional.nll_loss,
        functional.smooth_l1_loss,
    }
)
SUMS = frozenset[Callable[..., Any]]({torch.sum, Tensor.sum})
SORTS = frozenset[Callable[..., Any]](
    {torch.argsort, torch.msort, torch.sort, Tensor.argsort, Tensor.msort, Tensor.sort}
)


class _Parts(NamedTuple):
    """A sum, and what each row adds to it; torch counts the changes in place of both."""

    total: Tensor
    total_version: int
    of_rows: Tensor
    of_rows_version: int

    @property
    def is_unchanged(self) -> bool:
        return (self.total._version, self.of_rows._version) == (
            self.total_version,
            self.of_rows_version,
        )


class RowSums(TorchFunctionMode):
    """Keeps what each of N rows adds where a task sums over the rows of its batch.

    Only losses with ``reduction="sum"`` and sums over all dimensions are read.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows
        self._of_total: dict[int, _Parts] = {}  # by the id of the sum, which it keeps alive

    def of(self, total: object) -> Tensor:
        """Return the rows' parts [N] of a sum that the task returned.

        Raises:
            UnsupportedBatch: the task made it in another way.
        """
        parts = self._of_total.get(id(total))
        if parts is None or not parts.is_unchanged:
            raise UnsupportedBatch("a sum of the task is not made by a known loss or sum")
        return parts.of_rows

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation; if it sums over the rows, keep their parts.

        Raises:
            UnsupportedBatch: the operation sorts.
        """
        kwargs = kwargs or {}
        if func in SORTS:
            raise UnsupportedBatch("the task or its model sorts, and may change the rows' order")
        if func in LOSSES and kwargs.get("reduction") == "sum":
            return self._total(func(*args, **{**kwargs, "reduction": "none"}))
        if (
            func in SUMS
            and len(args) == 1
            and not kwargs
            and args[0].shape[:1] == (self._num_rows,)
        ):
            return self._total(args[0])
        return func(*args, **kwargs)

    def _total(self, parts: Tensor) -> Tensor:
        total = parts.sum()
        if parts.ndim and parts.numel() % self._num_rows == 0:
            of_rows = parts if parts.ndim == 1 and len(parts) == self._num_rows else None
            if of_rows is None:
                of_rows = parts.reshape(self._num_rows, -1).sum(1)
            self._of_total[id(total)] = _Parts(total, total._version, of_rows, of_rows._version)
        return total
