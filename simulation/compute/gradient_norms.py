"""The norms of devices' sums behind each of their steps, from what one backward pass sees.

What example i adds to the gradient of a linear layer's weight is b_i a_i^T: what comes back to the
layer times what went into it. So the product of what two examples add is (a_i . a_j)(b_i . b_j),
and the square of a sum is the sum of these over all pairs, without a vector (Goodfellow 2015,
"Efficient per-example gradient computations"; Li et al. 2022, "Large language models can be strong
differentially private learners", section 4). An example adds its own square and twice its products
with those before it. A bias is one more input, which is always 1.

Legend: D devices, S steps, N examples, T rows of an example (tokens), I inputs, O outputs, P
parameters.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from headwater.simulation.compute.padding import alike, is_in_order, padded, runs, taken

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Gradients of a layer that are held at once: less takes more calls. Of a layer as large as that the
# calls are what takes least, and devices take turns.
HELD_BYTES = 2 << 20
LARGE = 1 << 15
# Products of pairs that are held at once, in float64, if those of one device are not more.
PAIRS_BYTES = 16 << 20
# What it takes to write a number of a step's gradient, and to read it, in operations of pairs. For
# 1,000 devices of 15 examples in three steps pairs took 7 ms of a layer 64-128 and 5 of one 128-10,
# gradients 31 and 9; for eight of 128 tokens in two steps pairs took 6 of one 256-1024, gradients,
# which are the layer's own as well, 1.4.
WRITTEN = 16


class Squares:
    """Squared norms [S]; each part of the model adds those of its own gradient."""

    def __init__(self, sizes_S: Ints, num_steps_D: Ints) -> None:
        """Take the examples of each step, and the steps of each device, one behind the other."""
        self._sizes_S, self._num_steps_D = sizes_S, num_steps_D
        self._starts_S = np.cumsum(sizes_S) - sizes_S
        self._firsts_D = np.cumsum(num_steps_D) - num_steps_D
        self._counts_D: Ints = np.add.reduceat(sizes_S, self._firsts_D)
        self._grown_S = np.zeros(len(sizes_S))
        self._added_N = np.zeros(int(sizes_S.sum()))

    def norms(self) -> Floats:
        """Return the norms [S] of each device's sum behind each of its steps.

        Error of a square: 2^-24 of the square of the summed norms of what the examples add, times
        a layer's number of inputs, at the very most. A square below zero by rounding is zero.
        """
        squares_S = np.add.reduceat(self._added_N, self._starts_S)
        for step in range(1, int(self._num_steps_D.max())):
            at = self._firsts_D[self._num_steps_D > step] + step
            squares_S[at] += squares_S[at - 1]
        found: Floats = np.sqrt(np.maximum(squares_S + self._grown_S, 0.0))
        return found

    def add_linear(
        self, inputs_NTI: Tensor, outputs_NTO: Tensor, *, has_bias: bool
    ) -> Tensor | None:
        """Add a linear layer, by what went into it and what comes back to it.

        By pairs an example takes n T (I + O) operations more, with n examples of its device; by
        gradients no operation more, but those of each step, I O numbers, are written and read. They
        add up to the weight's gradient, which is returned then.
        """
        num_inputs, num_outputs = inputs_NTI.shape[2], outputs_NTO.shape[2]
        longest = int(self._counts_D.max()) * inputs_NTI.shape[1]
        num_pairs = longest * inputs_NTI.shape[0] * inputs_NTI.shape[1]
        num_written = len(self._sizes_S) * num_inputs * num_outputs
        if num_pairs * (num_inputs + num_outputs) <= WRITTEN * num_written:
            self._add_pairs(inputs_NTI, outputs_NTO, has_bias)
            return None
        if has_bias:
            self.add_vectors(outputs_NTO.sum(1))
        return self._add_gradients(inputs_NTI, outputs_NTO)

    def add_vectors(self, gradients_NP: Tensor) -> None:
        """Add parameters of which each example's own gradient is known."""
        summed = np.add.reduceat(gradients_NP.numpy(), self._starts_S, axis=0)
        norms, _ = grown(torch.from_numpy(summed), self._firsts_D, self._num_steps_D)
        self._grown_S += norms**2

    def _add_pairs(self, inputs_NTI: Tensor, outputs_NTO: Tensor, has_bias: bool) -> None:
        starts_D = np.cumsum(self._counts_D) - self._counts_D
        num_tokens, longest = inputs_NTI.shape[1], int(self._counts_D.max())
        at_once = PAIRS_BYTES // (8 * longest * num_tokens**2)
        for devices in alike(self._counts_D, at_once):
            index, mask = padded(starts_D[devices], self._counts_D[devices])
            a, b = _in_fours(_rows(inputs_NTI, index)), _in_fours(_rows(outputs_NTO, index, mask))
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

    def _add_gradients(self, inputs_NTI: Tensor, outputs_NTO: Tensor) -> Tensor:
        """Return the sum of all gradients [O, I]."""
        total_OI = inputs_NTI.new_zeros(outputs_NTO.shape[2], inputs_NTI.shape[2])
        most = HELD_BYTES // (4 * total_OI.numel())
        own_OI = torch.empty_like(total_OI)
        for devices in runs(self._num_steps_D, most if total_OI.numel() < LARGE else 1):
            if devices.stop - devices.start == 1:
                self._grow_in_turn(own_OI, inputs_NTI, outputs_NTO, devices.start)
                total_OI += own_OI
            else:
                total_OI += self._added_together(inputs_NTI, outputs_NTO, devices)
        return total_OI

    def _added_together(self, inputs_NTI: Tensor, outputs_NTO: Tensor, devices: slice) -> Tensor:
        """Return the sum of the gradients of some devices, all of whose steps are held."""
        num_inputs, num_outputs = inputs_NTI.shape[2], outputs_NTO.shape[2]
        num_steps, firsts = self._num_steps_D[devices], self._firsts_D[devices]
        steps = slice(int(firsts[0]), int(firsts[-1] + num_steps[-1]))
        sizes, starts = self._sizes_S[steps], self._starts_S[steps]
        gradients = inputs_NTI.new_empty((len(sizes), num_outputs, num_inputs))
        for some in alike(sizes, int(sizes.sum())):
            index, mask = padded(starts[some], sizes[some])
            a, b = _rows(inputs_NTI, index), _rows(outputs_NTO, index, mask)
            if is_in_order(some) and len(some) == len(sizes):
                torch.bmm(b.transpose(1, 2), a, out=gradients)
            else:
                gradients[torch.from_numpy(some)] = torch.bmm(b.transpose(1, 2), a)
        norms, sums_DP = grown(gradients.flatten(1), firsts - firsts[0], num_steps)
        self._grown_S[steps] += norms**2
        return sums_DP.sum(0).view(num_outputs, num_inputs)

    def _grow_in_turn(
        self, own_OI: Tensor, inputs_NTI: Tensor, outputs_NTO: Tensor, device: int
    ) -> None:
        """Write the sum of a device's gradients, and hold no more than that."""
        first = int(self._firsts_D[device])
        for step in range(first, first + int(self._num_steps_D[device])):
            start = int(self._starts_S[step])
            own = slice(start, start + int(self._sizes_S[step]))
            a, b = inputs_NTI[own].flatten(0, 1), outputs_NTO[own].flatten(0, 1)
            own_OI.addmm_(b.t(), a, beta=float(step > first))  # 0: what is there does not count
            self._grown_S[step] += float(torch.linalg.vector_norm(own_OI)) ** 2


def grown(gradients_SP: Tensor, firsts_D: Ints, num_steps_D: Ints) -> tuple[Floats, Tensor]:
    """Return the norms [S] of each device's sum behind each of its steps, and the sums [D, P].

    The gradients may be overwritten.
    """
    count = int(num_steps_D[0])
    if bool((num_steps_D == count).all()):
        grown_DKP = gradients_SP.view(len(firsts_D), count, -1)
        for step in range(1, count):
            grown_DKP[:, step] += grown_DKP[:, step - 1]
        return _norms(gradients_SP), grown_DKP[:, -1]
    sums_DP = gradients_SP[torch.from_numpy(firsts_D)]
    norms = np.zeros(len(gradients_SP))
    norms[firsts_D] = _norms(sums_DP)
    for step in range(1, int(num_steps_D.max())):
        at = np.flatnonzero(num_steps_D > step)
        further = gradients_SP[torch.from_numpy(firsts_D[at] + step)]
        if len(at) == len(num_steps_D):
            sums = sums_DP.add_(further)
        else:
            sums = sums_DP[torch.from_numpy(at)] + further
            sums_DP[torch.from_numpy(at)] = sums
        norms[firsts_D[at] + step] = _norms(sums)
    return norms, sums_DP


def _norms(vectors_DP: Tensor) -> Floats:
    found: Floats = torch.linalg.vector_norm(vectors_DP, dim=1).double().numpy()
    return found


def _in_fours(rows_RMI: Tensor) -> Tensor:
    """Add rows of zeros to a multiple of four.

    MKL multiplies 15 rows with themselves in twice the time of 16; the copies take half of that.
    """
    return functional.pad(rows_RMI, (0, 0, 0, -rows_RMI.shape[1] % 4))


def _rows(values_NTI: Tensor, index: Ints, mask: NDArray[np.bool_] | None = None) -> Tensor:
    """Return the rows of devices or steps side by side [R, M T, I], and zero where it is padded."""
    found = taken(values_NTI, index)
    if mask is not None and not mask.all():
        found = found * torch.from_numpy(mask)[:, :, None, None]
    return found.flatten(1, 2)
