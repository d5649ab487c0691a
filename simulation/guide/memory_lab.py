"""What a batch takes in memory: parameters, vector, and the activations that the backward needs.

The activations are counted, not guessed: torch says which tensors a forward pass keeps.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

FLOAT_BYTES = 4
MAX_BATCH = 256
LAYERS, WIDTH, PIXELS = 4, 24, 32


def measure(batch: int, micro_batch_size: int, limit_bytes: int) -> dict[str, Any]:
    """Return the bytes of a step in one pass and in micro-batches, beside a limit."""
    size = min(batch, micro_batch_size)
    parameters = sum(p.numel() for p in _model().parameters()) * FLOAT_BYTES
    whole, small = activation_bytes(batch), activation_bytes(size)
    return {
        "parameters": parameters,
        "vector": parameters,
        "whole": whole,
        "small": small,
        "limit": limit_bytes,
        "fits_whole": 2 * parameters + whole <= limit_bytes,
        "fits_small": 2 * parameters + small <= limit_bytes,
        "k": -(-batch // size),
        "most": max(int((limit_bytes - 2 * parameters) / activation_bytes(1)), 0),
    }


@lru_cache(maxsize=512)
def activation_bytes(batch: int) -> int:
    """Return the bytes of all tensors that a forward pass keeps for its backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model = _model()
    images = torch.zeros(batch, 1, PIXELS, PIXELS)
    labels = torch.zeros(batch, dtype=torch.int64)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = functional.cross_entropy(model(images), labels, reduction="sum")
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    del loss
    return sum(size for address, size in kept.items() if address not in own)


@lru_cache(maxsize=1)
def _model() -> nn.Module:
    """Return a small convolutional network for pictures of 32 x 32."""
    layers: list[nn.Module] = []
    channels = 1
    for _ in range(LAYERS):
        layers += [nn.Conv2d(channels, WIDTH, 3, padding=1), nn.ReLU()]
        channels = WIDTH
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * WIDTH, 10))
