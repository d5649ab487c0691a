"""Questions about a whole vector, answered in one pass over it and with no copy of it.

``torch.isfinite(v).all()`` and ``vector_norm(v, dtype=torch.float64)`` write copies as they go: of
4.9 million float32 they took 13 and 24 ms, where these take 0.8 and 2.5.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK = 1 << 17  # coordinates widened at a time: 1 MiB of float64 that stays in cache


def all_finite(values: Tensor) -> bool:
    """Say whether no number is NaN or infinite; of no numbers that is so."""
    if not values.numel():
        return True
    return all(math.isfinite(bound.item()) for bound in torch.aminmax(values))  # NaN comes through


def squared_norm(values_P: Tensor) -> float:
    """Return |values|^2, summed in float64: of finite float32 it is finite."""
    parts = (chunk.double() for chunk in torch.split(values_P, CHUNK))
    return math.fsum(torch.dot(part, part).item() for part in parts)
