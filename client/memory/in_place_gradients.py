"""Adds the gradients of large embeddings and linear layers where the sum is kept.

torch's backward makes a new gradient, as large as the parameter, and then adds it to ``grad``. That
of an embedding is mostly zeros: 206 MB for 50,257 words of width 1,024, the highest peak of a pass
whose activations are recomputed. Here only the rows of the words that occurred are computed and
added: the same numbers in the same order, so the bits are the same. The matrix product of a linear
layer adds to the sum by itself, as Megatron-LM's gradient_accumulation_fusion does: up to rounding
the same sum, without a block of memory for each layer that the kernel must clear first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from headwater.common.model.chunked_cross_entropy import grad_to_add_to

# Of a weight; for a smaller one it is not worth it.
LEAST_TABLE_BYTES, LEAST_LINEAR_BYTES = 16 << 20, 4 << 20


def add_in_place(model: nn.Module) -> None:
    """Let the model's large layers add their gradients by themselves, where the caller permits it.

    That is within ``adding_in_place`` (``headwater.common.model.chunked_cross_entropy``). Forward
    methods are replaced on the instances; parameters and the state_dict stay as they are.
    """
    for module in model.modules():
        if "forward" in vars(module):
            continue
        if type(module) is nn.Embedding and module.weight.nbytes >= LEAST_TABLE_BYTES:
            is_plain = module.max_norm is None and not module.scale_grad_by_freq
            if is_plain and not module.sparse:
                vars(module)["forward"] = _Forward(module, _embedded)
        elif type(module) is nn.Linear and module.weight.nbytes >= LEAST_LINEAR_BYTES:
            vars(module)["forward"] = _Forward(module, _multiplied)


class _Forward:
    """Replaces the forward method of a layer."""

    def __init__(self, module: nn.Module, passed: Callable[[Any, Tensor], Tensor]) -> None:
        self._module, self._passed = module, passed

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch names it
        module: Any = self._module
        is_transformed = torch._C._are_functorch_transforms_active() or is_compiling()
        if is_transformed or not (module.weight.requires_grad and torch.is_grad_enabled()):
            found: Tensor = type(module).forward(module, input)
            return found
        return self._passed(module, input)


def _embedded(module: nn.Embedding, indices: Tensor) -> Tensor:
    padding = -1 if module.padding_idx is None else module.padding_idx
    found: Tensor = _Rows.apply(module.weight, indices, padding)  # type: ignore[no-untyped-call]
    return found


def _multiplied(module: nn.Linear, inputs: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cpu"):  # a copy of the weight in bfloat16 is multiplied
        return nn.Linear.forward(module, inputs)
    found: Tensor = _Product.apply(inputs, module.weight, module.bias)  # type: ignore[no-untyped-call]
    return found


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, indices: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(indices)
        # Itself: where the block is computed again, a saved tensor comes back without its ``grad``.
        ctx.weight, ctx.padding = weight_VD, padding
        return functional.embedding(indices, weight_VD)

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


class _Product(torch.autograd.Function):
    """A linear layer: N rows of D inputs, E outputs."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight = weight_ED  # itself, as above
        outputs = functional.linear(inputs, weight_ED, bias_E)
        # Of more than two dimensions torch computes it as a view, which no operation after a
        # Function may change in place.
        found: Tensor = torch.ops.aten._unsafe_view(outputs, outputs.shape)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        (inputs,), weight_ED = ctx.saved_tensors, ctx.weight
        has_inputs, _, has_bias = ctx.needs_input_grad
        grad_NE, inputs_ND = (one.reshape(-1, one.shape[-1]) for one in (grad, inputs))
        of_inputs = grad @ weight_ED if has_inputs else None
        of_bias = grad_NE.sum(0) if has_bias else None
        into_ED = grad_to_add_to(weight_ED)
        if into_ED is None or into_ED.dtype != grad.dtype:
            return of_inputs, grad_NE.T @ inputs_ND, of_bias
        into_ED.addmm_(grad_NE.T, inputs_ND)
        return of_inputs, None, of_bias
