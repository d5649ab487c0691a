"""Clips a vector to an L2 norm, so that one device changes a sum by a bounded amount.

A vector that is not finite becomes zero: a refusal would say something about the device's data.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwater.common.model.vectors import CHUNK, all_finite, squared_norm

# Scaling rounds each coordinate, and so the norm, by up to 2^-24 of it; the margin is larger.
MARGIN = 1 - 2.0**-20


def clip_to_norm(values_P: Tensor, bound: float) -> bool:
    """Scale a float32 vector in place to an L2 norm of at most ``bound``; return if it was longer.

    =====================  =======================================
    the vector             becomes
    =====================  =======================================
    norm <= bound          unchanged
    norm > bound           the same direction, norm (1 - 2^-20) bound
    a NaN or an infinity   zero, which is no longer than the bound
    =====================  =======================================
    """
    if not all_finite(values_P):
        values_P.zero_()
        return False
    norm_squared = squared_norm(values_P)
    if norm_squared <= bound * bound:
        return False
    factor = bound * MARGIN / math.sqrt(norm_squared)
    for chunk in torch.split(values_P, CHUNK):
        chunk.copy_(chunk.double().mul_(factor))
    return True
