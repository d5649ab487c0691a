"""What is of nearly the same length side by side, in rows that are padded to the longest."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

# Rows of a pass may be padded to the longest: by so much, and no more.
SHORTEST_SHARE = 0.75


def alike(sizes: Ints, at_once: int) -> Iterator[Ints]:
    """Cut what has sizes into groups of nearly the same, of at most ``at_once`` if that can be."""
    order = np.argsort(-sizes, kind="stable")
    start = 0
    while start < len(order):
        largest = int(sizes[order[start]])
        most = start + max(at_once // largest, 1)
        end = start + int(
            np.searchsorted(-sizes[order[start:]], -largest * SHORTEST_SHARE, "right")
        )
        end = min(end, most)
        yield order[start:end]
        start = end


def padded(starts: Ints, sizes: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the rows of each [R, M], padded by its first, and which are its own."""
    at = np.arange(sizes.max())
    mask = at[None, :] < sizes[:, None]
    return np.where(mask, starts[:, None] + at[None, :], starts[:, None]), mask


def runs(sizes: Ints, most: int) -> Iterator[slice]:
    """Cut a row of sizes into runs that sum to at most so many; one that is larger is alone."""
    ends = np.cumsum(sizes)
    start = before = 0
    while start < len(sizes):
        end = max(int(np.searchsorted(ends, before + most, "right")), start + 1)
        yield slice(start, end)
        start, before = end, int(ends[end - 1])


def is_in_order(index: Ints) -> bool:
    """Say whether indices are some number, the next, and so on."""
    flat = index.ravel()
    return bool((flat == np.arange(flat[0], flat[0] + len(flat))).all())


def taken(values: Tensor, index: Ints) -> Tensor:
    """Return rows of values [*index.shape, ...]; a view, if they lie so already."""
    if is_in_order(index):
        first = int(index.flat[0])
        found = values[first : first + index.size]
    else:
        found = values.index_select(0, torch.from_numpy(index.ravel()))
    return found.view(*index.shape, *values.shape[1:])
