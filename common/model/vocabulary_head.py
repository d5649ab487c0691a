"""Losses and gradients of a linear head over a vocabulary, one chunk of words after another.

The forward pass adds up the exponentials of each chunk's logits (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"). The backward pass computes the logits again, and from
them each chunk's part of the gradients.

Some models cap their logits: ``cap * tanh(logit / cap)`` (Gemma Team 2024, "Gemma 2", section 2).
The cap's slope, ``1 - (capped / cap)^2``, follows from the capped logits themselves.

Legend: N tokens, M tokens that are not ignored, D features, V words of the vocabulary, C words of a
chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# With fewer words in a chunk the calls take longer than the products. 64 logits of a token take no
# more memory than its hidden state does, if that has 64 features or more.
MIN_WORDS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """The ignored target, the most bytes of a chunk's logits, and autocast's dtype if it is on.

    ``cap`` is the bound of the logits; None: they have none.
    """

    ignore_index: int
    chunk_bytes: int
    autocast: torch.dtype | None
    cap: float | None = None


class VocabularyHead:
    """The logits of the tokens that are not ignored."""

    def __init__(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        options: HeadOptions,
    ) -> None:
        """Raise ``IndexError`` if a target is neither a word nor ignored."""
        given = (hidden_ND, weight_VD, *(() if bias_V is None else (bias_V,)))
        is_double = any(tensor.dtype == torch.float64 for tensor in given)
        self.sum_dtype = torch.float64 if is_double else torch.float32
        self._cap = options.cap
        self._product_dtype = (
            self.sum_dtype if is_double or options.autocast is None else options.autocast
        )
        self._rows_M = (targets_N != options.ignore_index).nonzero()[:, 0]
        is_whole = len(self._rows_M) == len(targets_N)
        self._targets_M = targets_N if is_whole else targets_N[self._rows_M]
        hidden_MD = hidden_ND if is_whole else hidden_ND[self._rows_M]
        self._hidden_MD = hidden_MD.to(self._product_dtype)
        self._hidden_ND, self._weight_VD, self._bias_V = hidden_ND, weight_VD, bias_V
        num_words = len(weight_VD)
        wrong = self._targets_M[(self._targets_M < 0) | (self._targets_M >= num_words)]
        if len(wrong):
            raise IndexError(
                f"expected targets of 0 to {num_words - 1}, or {options.ignore_index} for tokens "
                f"to ignore, found {int(wrong[0])}"
            )
        bytes_a_word = self.sum_dtype.itemsize * max(len(self._rows_M), 1)
        num_chunks = -(-num_words // max(options.chunk_bytes // bytes_a_word, MIN_WORDS))
        size = -(-num_words // max(num_chunks, 1))  # all alike, the last one shorter by a few
        self._chunks = [slice(at, min(at + size, num_words)) for at in range(0, num_words, size)]

    def losses(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return each token's loss [N], the logarithms of its exponentials' sum [N], last logits.

        The logarithms are in float64: rounded to float32, one of 30 would change each probability
        by 1e-6 of it. The last chunk's logits [M, C] spare ``gradients`` to compute them again.
        """
        log_sums_M = torch.full((len(self._rows_M),), -torch.inf, dtype=torch.float64)
        picked_M = torch.zeros(len(self._rows_M), dtype=self.sum_dtype)
        logits_MC = picked_M[:0, None]
        for chunk in self._chunks:
            del logits_MC  # before the next chunk's are made
            logits_MC = self._logits(chunk)
            most_M = logits_MC.amax(1).clamp_min_(torch.finfo(self.sum_dtype).min)
            sums_M = (logits_MC - most_M[:, None]).exp_().sum(1)
            log_sums_M = torch.logaddexp(log_sums_M, most_M.double() + sums_M.double().log())
            tokens, places = self._targets(chunk)
            picked_M[tokens] = logits_MC[tokens, places]
        losses_N = torch.zeros(len(self._hidden_ND), dtype=self.sum_dtype)
        log_sums_N = torch.zeros(len(losses_N), dtype=torch.float64)
        losses_N[self._rows_M] = (log_sums_M - picked_M).to(self.sum_dtype)
        log_sums_N[self._rows_M] = log_sums_M
        return losses_N, log_sums_N, logits_MC

    def gradients(
        self,
        grads_N: Tensor,
        log_sums_N: Tensor,
        last_MC: Tensor,
        needs: tuple[bool, bool, bool],
        into_VD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of hidden state, weight and bias; empty ones where not needed.

        Takes the gradients of the losses, and what ``losses`` returned. ``into_VD``, if given, is
        what the weight's gradient is added to, and is returned.
        """
        log_sums_M1, grads_M1 = log_sums_N[self._rows_M, None], grads_N[self._rows_M, None]
        # In two parts: to subtract a float64 one would copy all logits.
        high_M1 = log_sums_M1.to(self.sum_dtype)
        low_M1 = (log_sums_M1 - high_M1).to(self.sum_dtype)
        hidden_MD = torch.zeros(self._hidden_MD.shape, dtype=self.sum_dtype)
        grad_VD = into_VD
        if grad_VD is None:
            grad_VD = self._weight_VD.new_zeros(self._weight_VD.shape if needs[1] else 0)
        grad_V = self._weight_VD.new_zeros(len(self._weight_VD) if needs[2] else 0)
        for chunk in reversed(self._chunks):
            size = len(self._rows_M), chunk.stop - chunk.start
            is_kept = chunk is self._chunks[-1] and last_MC.shape == size
            logits_MC = last_MC if is_kept else self._logits(chunk)
            slope_MC = self._slope(logits_MC)
            grad_MC = logits_MC - high_M1 if is_kept else logits_MC.sub_(high_M1)
            del logits_MC  # it is the gradient's memory, or the caller's
            grad_MC.sub_(low_M1)
            tokens, places = self._targets(chunk)
            grad_MC.exp_()[tokens, places] -= 1
            grad_MC.mul_(grads_M1)
            if slope_MC is not None:
                grad_MC.mul_(slope_MC)
            del slope_MC
            if needs[2]:
                grad_V[chunk] = grad_MC.sum(0)
            grad_MC = grad_MC.to(self._product_dtype)
            if needs[0]:
                _add_product(hidden_MD, grad_MC, self._weight(chunk))
            if needs[1]:
                _add_product(grad_VD[chunk], grad_MC.t(), self._hidden_MD)
            del grad_MC  # before the next chunk's is made
        grad_ND = self._hidden_ND.new_zeros(self._hidden_ND.shape if needs[0] else 0)
        if needs[0]:
            grad_ND[self._rows_M] = hidden_MD.to(grad_ND.dtype)
        return grad_ND, grad_VD, grad_V

    def _weight(self, chunk: slice) -> Tensor:
        return self._weight_VD[chunk].to(self._product_dtype)

    def _logits(self, chunk: slice) -> Tensor:
        """Return new logits [M, C], in the dtype of the sums."""
        logits_MC = (self._hidden_MD @ self._weight(chunk).t()).to(self.sum_dtype)
        if self._bias_V is not None:
            logits_MC.add_(self._bias_V[chunk])
        if self._cap is not None:
            logits_MC.div_(self._cap).tanh_().mul_(self._cap)
        return logits_MC

    def _slope(self, logits_MC: Tensor) -> Tensor | None:
        """Return the derivative of capped logits by those before the cap; None without a cap."""
        if self._cap is None:
            return None
        return logits_MC.div(self._cap).square_().neg_().add_(1)

    def _targets(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Return the tokens whose target is in the chunk, and its place there."""
        is_here = (self._targets_M >= chunk.start) & (self._targets_M < chunk.stop)
        tokens = is_here.nonzero()[:, 0]
        return tokens, self._targets_M[tokens] - chunk.start


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
