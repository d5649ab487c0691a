"""The summed cross-entropy of a linear head, without the logits of a whole vocabulary at once.

A language model's last layer gives a logit for each token and each word of the vocabulary: 512
tokens and 50,257 words are 103 MB in float32, and their softmax and gradient as much again. Here
the vocabulary is cut into chunks (``vocabulary_head``), whose logits the backward pass computes
again. Those of the last chunk are kept between the two passes, so a vocabulary of a single chunk is
computed once.

torch 2.13 has ``torch.nn.functional.linear_cross_entropy``, with chunks of tokens. It holds a
second gradient of the whole weight from the forward to the backward pass (206 MB for 50,257 words
and 1,024 features) and cannot run under ``torch.func``; torch 2.6 to 2.10 do not have it.

Legend: N tokens, M tokens that are not ignored, D features, V words of the vocabulary, C words of a
chunk, B examples of a vmap.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from headwater.common.model.bfloat16_weights import plain
from headwater.common.model.vocabulary_head import HeadOptions, VocabularyHead

CHUNK_BYTES = 16 << 20


class _Promise(threading.local):
    """Whether the backward passes of this thread add in place; on a CPU they run in it."""

    is_made = False


_promise = _Promise()


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["sum", "none"] = "sum",
    cap: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Return the cross-entropy of the logits ``hidden @ weight.T + bias``, summed over tokens.

    Loss and gradients equal those of ``cross_entropy(linear(hidden, weight, bias), targets,
    reduction="sum")`` to rounding. They take the memory of three to four chunks of logits, each of
    ``chunk_bytes`` at most (of 64 words at least). A token with an ignored target costs nothing.

    ``hidden`` is [..., D], ``weight`` [V, D] (it may be the embedding's weight, too), ``bias`` [V],
    ``targets`` [...] int64. Products are computed in autocast's dtype if autocast is on, otherwise
    in that of the sums: float32, or float64 if an argument is float64. The loss has the dtype of
    the sums; each gradient that of its argument.

    * ``cap`` is a soft cap of the logits, ``cap * tanh(logits / cap)``, as Gemma 2 has one of 30.
      Its gradient takes another chunk.
    * ``reduction="none"`` returns each token's loss, in the shape of ``targets``; 0 if ignored.
    * No target, or none that is not ignored: the loss is 0, and so are the gradients.
    * Logits of -inf count as words that cannot occur; a NaN makes the loss a NaN, as in torch.
    * ``torch.func.grad`` and ``vmap`` work, one example after another where each has its own weight
      or gradient of the weight. Second derivatives and forward-mode gradients are refused.

    Raises:
        ValueError: shapes or dtypes do not fit, the cap is not above 0, or ``reduction`` is
            another. A mean is refused: the means of micro-batches cannot be added up.
        IndexError: a target is neither ``ignore_index`` nor in 0 to V - 1.
    """
    _check(hidden, weight, targets, bias, reduction)
    if cap is not None and not cap > 0:
        raise ValueError(f"expected a cap above 0, or None, found {cap!r}")
    options = HeadOptions(
        ignore_index=ignore_index, chunk_bytes=chunk_bytes, autocast=_autocast_dtype(), cap=cap
    )
    losses_N = _Losses.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]),
        plain(weight),
        bias,
        targets.reshape(-1),
        options,
    )[0]
    losses: Tensor = losses_N.sum() if reduction == "sum" else losses_N.view(targets.shape)
    return losses


class adding_in_place:
    """Promise that a backward pass adds all gradients into the leaves' ``grad``, and only there.

    Then the weight's gradient is added to its ``grad`` chunk by chunk, and no second one of its
    size exists. Right for ``loss.backward()``, wrong for ``torch.autograd.grad`` and
    ``backward(inputs=...)``. A weight with hooks is left to autograd, which calls them.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before, _promise.is_made = _promise.is_made, True

    def __exit__(self, *_: object) -> None:
        _promise.is_made = self._before


def grad_to_add_to(weight: Tensor) -> Tensor | None:
    """Return the ``grad`` that a backward pass may add the weight's gradient to by itself.

    None outside of ``adding_in_place``, where a hook must see or change the gradient, and in a
    backward pass inside of one that does not add to this weight: a hook of the model may call
    ``torch.autograd.grad``, as deep equilibrium models do.
    """
    has_hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    if not (_promise.is_made and weight.is_leaf) or has_hooks:
        return None
    return weight.grad if _is_added_to(weight) else None


def _is_added_to(weight: Tensor) -> bool:
    """Return whether the backward pass that runs now adds to a leaf's ``grad``."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(weight).node))
    except RuntimeError:  # autograd.grad of this leaf, or a backward method called by hand
        return False


def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, reduction: str
) -> None:
    if reduction not in ("sum", "none"):
        raise ValueError(
            f'expected reduction="sum" or "none", found {reduction!r}: means of micro-batches '
            "cannot be added up"
        )
    if weight.ndim != 2 or hidden.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            "expected hidden [..., D] and weight [V, D], found "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if hidden.shape[:-1] != targets.shape or targets.dtype != torch.int64:
        raise ValueError(
            f"expected an int64 target for each token, of shape {tuple(hidden.shape[:-1])}, found "
            f"{targets.dtype} of shape {tuple(targets.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"expected a bias of shape {tuple(weight.shape[:1])}, found {tuple(bias.shape)}"
        )


def _autocast_dtype() -> torch.dtype | None:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


class _Losses(torch.autograd.Function):
    """Each token's loss [N], the logarithm of its sum of exponentials [N], the last logits [M, C].

    The last logits are empty where none can be kept: below a vmap, in a loop over examples.
    """

    @staticmethod
    def forward(
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        options: HeadOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            return VocabularyHead(hidden_ND, weight_VD, bias_V, targets_N, options).losses()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.options = inputs
        _, log_sums_N, logits_MC = output
        ctx.mark_non_differentiable(log_sums_N, logits_MC)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, log_sums_N, logits_MC)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return None, None, None, None, None
        hidden, weight, bias = ctx.needs_input_grad[:3]
        tensors = (*ctx.saved_tensors, grads[0], ctx.options)
        into_VD = grad_to_add_to(tensors[1]) if weight else None
        if into_VD is not None:
            found = _gradients(*tensors, (hidden, True, bias), into_VD=into_VD)
            weight = False
        else:
            found = _Gradients.apply(*tensors, (hidden, weight, bias))  # type: ignore[no-untyped-call]
        is_returned = (hidden, weight, bias)
        returned = (one if is_so else None for one, is_so in zip(found, is_returned, strict=True))
        return *returned, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        """Join the tokens of all examples if they share a weight; else go through the examples."""
        *tensors, options = inputs
        if in_dims[1] is None and in_dims[2] is None:
            hidden_BND, targets_BN = (
                _batched(tensors[at], in_dims[at], info.batch_size) for at in (0, 3)
            )
            losses, log_sums, logits = _Losses.apply(  # type: ignore[no-untyped-call]
                hidden_BND.flatten(0, 1), *tensors[1:3], targets_BN.flatten(), options
            )
            shape = targets_BN.shape
            return (losses.view(shape), log_sums.view(shape), logits), (0, 0, None)
        each = [
            _Losses.apply(*one, options)  # type: ignore[no-untyped-call]
            for one in _examples(tensors, in_dims, info.batch_size)
        ]
        losses, log_sums = (torch.stack([one[at] for one in each]) for at in (0, 1))
        return (losses, log_sums, each[0][2][:0]), (0, 0, None)


class _Gradients(torch.autograd.Function):
    """The gradients of the hidden state, the weight and the bias; empty where not needed."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return _gradients(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("chunked_cross_entropy has no second derivatives: use cross_entropy")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        """As ``_Losses``; a weight that needs a gradient needs one for each example."""
        *tensors, options, needs = inputs
        size = info.batch_size
        if in_dims[1] is None and in_dims[2] is None and not any(needs[1:]):
            hidden_BND, targets_BN, log_sums_BN, grads_BN = (
                _batched(tensors[at], in_dims[at], size) for at in (0, 3, 4, 6)
            )
            hidden_ND, *others = _Gradients.apply(  # type: ignore[no-untyped-call]
                hidden_BND.flatten(0, 1),
                *tensors[1:3],
                *(each.flatten() for each in (targets_BN, log_sums_BN)),
                tensors[5],
                grads_BN.flatten(),
                options,
                needs,
            )
            return (hidden_ND.view(hidden_BND.shape), *others), (0, None, None)
        each = [
            _Gradients.apply(*one, options, needs)  # type: ignore[no-untyped-call]
            for one in _examples(tensors, in_dims, size)
        ]
        return tuple(torch.stack(found) for found in zip(*each, strict=True)), (0, 0, 0)


def _gradients(*inputs: Any, into_VD: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    hidden_ND, weight_VD, bias_V, targets_N, log_sums_N, last_MC, grads_N, options, needs = inputs
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        head = VocabularyHead(hidden_ND, weight_VD, bias_V, targets_N, options)
        return head.gradients(grads_N, log_sums_N, last_MC, needs, into_VD)


def _batched(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """Return a tensor with its examples first; one that has none is repeated."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _examples(
    tensors: Sequence[Tensor | None], in_dims: Sequence[int | None], size: int
) -> Iterator[list[Tensor | None]]:
    """Yield the tensors of each example of a vmap."""
    for example in range(size):
        yield [
            tensor if tensor is None or dim is None else tensor.select(dim, example)
            for tensor, dim in zip(tensors, in_dims, strict=False)
        ]
