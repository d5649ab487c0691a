"""Adds the gradient of a large embedding table where the sum is kept, row by row.

torch's backward of an embedding makes a gradient of the whole table, mostly zeros: 206 MB for
50,257 words of width 1,024, the highest peak of a pass whose activations are recomputed, and then
adds all of it. Here only the rows of the words that occurred are computed, and added to the
table's ``grad``: the same numbers in the same order, so the bits are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwater.common.model.chunked_cross_entropy import grad_to_add_to

LEAST_BYTES = 16 << 20  # of a table; a smaller one is not worth it


def add_rows_in_place(model: nn.Module) -> None:
    """Let the model's large embeddings add their gradients by rows, where the caller permits it.

    That is within ``adding_in_place`` (``headwater.common.model.chunked_cross_entropy``). Forward
    methods are replaced on the instances; parameters and the state_dict stay as they are.
    """
    for module in model.modules():
        if type(module) is nn.Embedding and module.weight.nbytes >= LEAST_BYTES:
            is_plain = module.max_norm is None and not module.scale_grad_by_freq
            if is_plain and not module.sparse and "forward" not in vars(module):
                vars(module)["forward"] = _RowsForward(module)


class _RowsForward:
    """Replaces the forward method of an embedding."""

    def __init__(self, module: nn.Embedding) -> None:
        self._module = module

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch names it
        module, indices = self._module, input
        is_transformed = torch._C._are_functorch_transforms_active()
        if is_transformed or not (module.weight.requires_grad and torch.is_grad_enabled()):
            return nn.Embedding.forward(module, indices)
        padding = -1 if module.padding_idx is None else module.padding_idx
        found: Tensor = _Rows.apply(module.weight, indices, padding)  # type: ignore[no-untyped-call]
        return found


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, indices: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(indices)
        # Itself: where the block is computed again, a saved tensor comes back without its ``grad``.
        ctx.weight, ctx.padding = weight_VD, padding
        return torch.nn.functional.embedding(indices, weight_VD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        (indices,), weight_VD = ctx.saved_tensors, ctx.weight
        backward = torch.ops.aten.embedding_dense_backward
        into_VD = grad_to_add_to(weight_VD)
        if into_VD is None or into_VD.dtype != grad.dtype:
            return backward(grad, indices, len(weight_VD), ctx.padding, False), None, None
        rows_U, places = torch.unique(indices, return_inverse=True)
        at = (rows_U == ctx.padding).nonzero()
        padding = int(at) if len(at) else -1
        into_VD.index_add_(0, rows_U, backward(grad, places, len(rows_U), padding, False))
        return None, None, None
