"""Rules that combine updates of which some may be false: trimmed mean, median, Krum, clipped sum.

Each rule is a pure function of a matrix [N, P] with an update in each row, and its weights. Unlike
the sum they need every single vector, so they are incompatible with masks. They work on
coordinates in chunks: beside the matrix they hold 64 MiB.

How examples count. The papers assume workers with equally many examples. In ``clipped`` a weight
counts as in the sum. In the other rules each update is divided by its weight and has one vote,
however many examples it claims: a weight is a claim, and must not buy influence. So where honest
devices hold different numbers of examples, a small device's examples count more than a large
one's. Where they hold different labels, these rules discard honest minorities: a coordinate that
only one device in ten moves is trimmed. ``benchmarks/RESULTS.md`` has the price.

Sources: Yin, Chen, Ramchandran, Bartlett 2018, "Byzantine-Robust Distributed Learning", definitions
1 (median) and 2 (trimmed mean); Blanchard, El Mhamdi, Guerraoui, Stainer 2017, "Machine Learning
with Adversaries", section 4 (Krum).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.server.aggregation.norm_watch import norm_per_weight, scaled_to

Rule = Literal["sum", "clipped", "trimmed-mean", "median", "krum"]
Rows = NDArray[np.float32]
Floats = NDArray[np.float64]

CHUNK_BYTES = 16 << 20  # of float64 in one chunk; a rule holds up to four such


def num_needed(rule: Rule, num_updates: int, *, share: float) -> int:
    """Return the number of updates without which a rule withstands no ``share`` of false ones."""
    attackers = num_attackers(num_updates, share=share)
    return {"trimmed-mean": 2 * attackers + 1, "krum": 2 * attackers + 3}.get(rule, 1)


def num_attackers(num_updates: int, *, share: float) -> int:
    """Return the number of false updates that a rule should withstand: the share, rounded up."""
    return math.ceil(round(share * num_updates, 9))


def trimmed_mean(rows_NP: Rows, weights: Sequence[int], *, share: float) -> Tensor:
    """Return each coordinate's mean without its ceil(share x N) largest and smallest values."""
    num_updates = len(weights)
    trimmed = num_attackers(num_updates, share=share)
    mean_P = np.empty(rows_NP.shape[1], dtype=np.float32)
    for low, high, means_NC in _chunks(rows_NP, weights):
        means_NC.sort(axis=0)
        mean_P[low:high] = means_NC[trimmed : num_updates - trimmed].mean(axis=0)
    return torch.from_numpy(mean_P)


def median(rows_NP: Rows, weights: Sequence[int]) -> Tensor:
    """Return each coordinate's median; of an even number, the mean of the middle two."""
    median_P = np.empty(rows_NP.shape[1], dtype=np.float32)
    for low, high, means_NC in _chunks(rows_NP, weights):
        median_P[low:high] = np.median(means_NC, axis=0)
    return torch.from_numpy(median_P)


def krum(rows_NP: Rows, weights: Sequence[int], *, share: float) -> tuple[Tensor, int]:
    """Return the update that is closest to its N - f - 2 nearest ones, and its row; f = share x N.

    Of equal scores the first row wins, so the caller orders the rows.
    """
    num_updates = len(weights)
    num_near = max(num_updates - num_attackers(num_updates, share=share) - 2, 1)
    products_NN = np.zeros((num_updates, num_updates))
    for _, _, means_NC in _chunks(rows_NP, weights):
        products_NN += means_NC @ means_NC.T
    norms_N = np.diag(products_NN)
    distances_NN = np.maximum(norms_N[:, None] + norms_N[None, :] - 2 * products_NN, 0.0)
    np.fill_diagonal(distances_NN, np.inf)
    distances_NN.sort(axis=1)
    chosen = int(distances_NN[:, :num_near].sum(axis=1).argmin())
    mean_P = (rows_NP[chosen] / np.float64(weights[chosen])).astype(np.float32)
    return torch.from_numpy(mean_P), chosen


def clipped(rows_NP: Rows, weights: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
    """Yield each update with its norm per unit of weight reduced to the round's median at most."""
    norms = [
        norm_per_weight(torch.from_numpy(row), weight)
        for row, weight in zip(rows_NP, weights, strict=True)
    ]
    limit = float(np.median(norms))
    for row, weight, norm in zip(rows_NP, weights, norms, strict=True):
        yield scaled_to(torch.from_numpy(row), norm=norm, limit=limit), weight


def _chunks(rows_NP: Rows, weights: Sequence[int]) -> Iterator[tuple[int, int, Floats]]:
    """Yield chunks of coordinates, from low to high, with the updates divided by their weights."""
    num_updates, num_values = rows_NP.shape
    size = max(CHUNK_BYTES // (8 * max(num_updates, 1)), 1)
    divisors_N1 = np.array(weights, dtype=np.float64)[:, None]
    for low in range(0, num_values, size):
        high = min(low + size, num_values)
        yield low, high, rows_NP[:, low:high] / divisors_N1
