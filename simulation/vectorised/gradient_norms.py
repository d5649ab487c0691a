"""Computes each device's gradient norms from one backward pass over the examples of many devices.

Example i adds b_i a_i^T to the gradient of a linear layer's weight: the gradient of the layer's
output times the layer's input. So the inner product of the gradients of examples i and j is
(a_i . a_j)(b_i . b_j), and the squared norm of a sum of gradients is a sum over pairs of examples;
no device needs a vector (Goodfellow 2015, "Efficient per-example gradient computations"; Li et al.
2022, "Large language models can be strong differentially private learners", section 4). An example
adds its own square and twice its products with the examples before it. A bias is an input that is
always 1. Parameters outside linear layers get a copy for each example, so they must be few.

Legend: D devices, S steps, N examples, T rows of an example (tokens), I inputs, O outputs, P
parameters.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from headwater.simulation.vectorised.round_columns import (
    Bools,
    Floats,
    Ints,
    groups_of_similar_size,
    padded,
    runs,
)

# Products of pairs that are held at once, in float64, unless those of one device take more.
PAIRS_BYTES = 16 << 20
# Time to write and read one number of a step's gradient, in multiply-adds of the pairs' products.
# For 1,000 devices of 15 examples in three steps, pairs took 7 ms for a layer 64-128 and 5 ms for
# 128-10, and gradients 31 and 9. For eight devices of 128 tokens in two steps, pairs took 6 ms for
# a layer 256-1024, and gradients, which give the layer's own gradient too, 1.4.
WRITE_COST = 16
# Step gradients of a layer that are held at once; fewer take more calls. For a layer of this many
# weights the calls take little time, and the gradients of one device are computed at a time.
HELD_BYTES = 2 << 20
LARGE_LAYER = 1 << 15


class SquaredNorms:
    """Squared norms of each device's sum after each of its steps; each layer adds its own."""

    def __init__(self, sizes_S: Ints, num_steps_D: Ints) -> None:
        """Take the number of examples of each step, and of steps of each device, in order."""
        self._sizes_S, self._num_steps_D = sizes_S, num_steps_D
        self._starts_S = np.cumsum(sizes_S) - sizes_S
        self._firsts_D = np.cumsum(num_steps_D) - num_steps_D
        self._counts_D: Ints = np.add.reduceat(sizes_S, self._firsts_D)
        self._squares_S = np.zeros(len(sizes_S))
        self._added_N = np.zeros(int(sizes_S.sum()))

    def norms(self) -> Floats:
        """Return the norms [S] of each device's sum after each of its steps.

        Error of a square: 2^-24 of the square of the summed norms of the examples' gradients, times
        a layer's number of inputs, at most. A square below zero by rounding counts as zero.
        """
        squares_S = np.add.reduceat(self._added_N, self._starts_S)
        for step in range(1, int(self._num_steps_D.max())):
            at = self._firsts_D[self._num_steps_D > step] + step
            squares_S[at] += squares_S[at - 1]
        norms_S: Floats = np.sqrt(np.maximum(squares_S + self._squares_S, 0.0))
        return norms_S

    def add_linear(
        self, inputs_NTI: Tensor, gradients_NTO: Tensor, *, has_bias: bool
    ) -> Tensor | None:
        """Add a linear layer, from its inputs and the gradients of its outputs.

        By pairs of examples, which takes n T (I + O) operations more for each row, with n examples
        of its device; or by the gradients of the steps, I O numbers each, which are written and
        read. These sum to the weight's gradient, which is returned then.
        """
        num_inputs, num_outputs = inputs_NTI.shape[2], gradients_NTO.shape[2]
        longest = int(self._counts_D.max()) * inputs_NTI.shape[1]
        num_pairs = longest * inputs_NTI.shape[0] * inputs_NTI.shape[1]
        num_written = len(self._sizes_S) * num_inputs * num_outputs
        if num_pairs * (num_inputs + num_outputs) <= WRITE_COST * num_written:
            self._add_pairs(inputs_NTI, gradients_NTO, has_bias)
            return None
        if has_bias:
            self.add_gradients(gradients_NTO.sum(1))
        return self._add_step_gradients(inputs_NTI, gradients_NTO)

    def add_gradients(self, gradients_NP: Tensor) -> None:
        """Add parameters from the gradient of each example."""
        gradients_SP = np.add.reduceat(gradients_NP.numpy(), self._starts_S, axis=0)
        norms, _ = running_norms(torch.from_numpy(gradients_SP), self._firsts_D, self._num_steps_D)
        self._squares_S += norms**2

    def _add_pairs(self, inputs_NTI: Tensor, gradients_NTO: Tensor, has_bias: bool) -> None:
        starts_D = np.cumsum(self._counts_D) - self._counts_D
        num_tokens, longest = inputs_NTI.shape[1], int(self._counts_D.max())
        at_once = PAIRS_BYTES // (8 * longest * num_tokens**2)
        for devices in groups_of_similar_size(self._counts_D, at_once):
            index, mask = padded(starts_D[devices], self._counts_D[devices])
            a, b = (
                _in_fours(_rows(inputs_NTI, index)),
                _in_fours(_rows(gradients_NTO, index, mask)),
            )
            # In float64 nothing more is rounded, and no square of a finite gradient overflows.
            products = torch.bmm(a, a.transpose(1, 2)).double()
            if has_bias:
                products += 1
            products *= torch.bmm(b, b.transpose(1, 2))
            own = products.diagonal(dim1=1, dim2=2).clone()
            added = own + 2 * products.tril_(-1).sum(2)
            added = added[:, : index.shape[1] * num_tokens]
            of_each = added.view(*index.shape, -1).sum(2).numpy()
            self._added_N[index[mask]] += of_each[mask]

    def _add_step_gradients(self, inputs_NTI: Tensor, gradients_NTO: Tensor) -> Tensor:
        """Add the gradients of the steps, and return the sum of all of them [O, I]."""
        total_OI = inputs_NTI.new_zeros(gradients_NTO.shape[2], inputs_NTI.shape[2])
        at_once = HELD_BYTES // (4 * total_OI.numel()) if total_OI.numel() < LARGE_LAYER else 1
        for devices in runs(self._num_steps_D, at_once):
            add = self._add_one_device if devices.stop - devices.start == 1 else self._add_devices
            total_OI += add(inputs_NTI, gradients_NTO, devices)
        return total_OI

    def _add_devices(self, inputs_NTI: Tensor, gradients_NTO: Tensor, devices: slice) -> Tensor:
        """Add devices whose steps' gradients are all held at once; return their sum."""
        num_steps, firsts = self._num_steps_D[devices], self._firsts_D[devices]
        steps = slice(int(firsts[0]), int(firsts[-1] + num_steps[-1]))
        sizes, starts = self._sizes_S[steps], self._starts_S[steps]
        sums_SOI = inputs_NTI.new_empty(len(sizes), gradients_NTO.shape[2], inputs_NTI.shape[2])
        for some in groups_of_similar_size(sizes, int(sizes.sum())):
            index, mask = padded(starts[some], sizes[some])
            a, b = _rows(inputs_NTI, index), _rows(gradients_NTO, index, mask)
            sums_SOI[torch.from_numpy(some)] = torch.bmm(b.transpose(1, 2), a)
        norms, sums_DP = running_norms(sums_SOI.flatten(1), firsts - firsts[0], num_steps)
        self._squares_S[steps] += norms**2
        return sums_DP.sum(0).view(sums_SOI.shape[1:])

    def _add_one_device(self, inputs_NTI: Tensor, gradients_NTO: Tensor, device: slice) -> Tensor:
        """Add a device and hold only its running sum, which is returned."""
        sum_OI = inputs_NTI.new_empty(gradients_NTO.shape[2], inputs_NTI.shape[2])
        first = int(self._firsts_D[device.start])
        for step in range(first, first + int(self._num_steps_D[device.start])):
            start = int(self._starts_S[step])
            own = slice(start, start + int(self._sizes_S[step]))
            a, b = inputs_NTI[own].flatten(0, 1), gradients_NTO[own].flatten(0, 1)
            sum_OI.addmm_(b.t(), a, beta=float(step > first))  # beta 0 ignores old values
            self._squares_S[step] += float(torch.linalg.vector_norm(sum_OI)) ** 2
        return sum_OI


def running_norms(gradients_SP: Tensor, firsts_D: Ints, num_steps_D: Ints) -> tuple[Floats, Tensor]:
    """Return the norms [S] of each device's sum after each of its steps, and the sums [D, P].

    ``gradients_SP`` may be overwritten.
    """
    count = int(num_steps_D[0])
    if bool((num_steps_D == count).all()):
        sums_DKP = gradients_SP.view(len(firsts_D), count, -1)
        for step in range(1, count):
            sums_DKP[:, step] += sums_DKP[:, step - 1]
        return _norms(gradients_SP), sums_DKP[:, -1]
    sums_DP = gradients_SP[torch.from_numpy(firsts_D)]
    norms = np.zeros(len(gradients_SP))
    norms[firsts_D] = _norms(sums_DP)
    for step in range(1, int(num_steps_D.max())):
        at = np.flatnonzero(num_steps_D > step)
        sums = sums_DP[at] + gradients_SP[torch.from_numpy(firsts_D[at] + step)]
        sums_DP[at] = sums
        norms[firsts_D[at] + step] = _norms(sums)
    return norms, sums_DP


def _norms(vectors_DP: Tensor) -> Floats:
    norms: Floats = torch.linalg.vector_norm(vectors_DP, dim=1).double().numpy()
    return norms


def _rows(values_NTI: Tensor, index: Ints, mask: Bools | None = None) -> Tensor:
    """Return the rows of devices or steps side by side [R, M T, I]; padding is zero with a mask.

    A view if no row has to move.
    """
    first, flat = int(index.flat[0]), index.ravel()
    if bool((flat == np.arange(first, first + flat.size)).all()):
        rows = values_NTI[first : first + flat.size]
    else:
        rows = values_NTI.index_select(0, torch.from_numpy(flat))
    rows_RMTI = rows.view(*index.shape, *values_NTI.shape[1:])
    if mask is not None and not mask.all():
        rows_RMTI = rows_RMTI * torch.from_numpy(mask)[:, :, None, None]
    return rows_RMTI.flatten(1, 2)


def _in_fours(rows_RMI: Tensor) -> Tensor:
    """Pad with rows of zeros to a multiple of four.

    MKL multiplies 15 rows with themselves in twice the time of 16; the copies take half of that.
    """
    return functional.pad(rows_RMI, (0, 0, 0, -rows_RMI.shape[1] % 4))
