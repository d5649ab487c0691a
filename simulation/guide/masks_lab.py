"""What a masked update looks like, and what the server sees together with colluding devices.

One digit is in the victim's update. Its first layer's gradient is a multiple of the image, so a
plain update shows the digit itself. Every pair of devices shares the key of one mask, which one of
them adds and the other subtracts; each adds one of its own, which the server removes at the end.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from headwater.common.secagg.fixed_point import (
    Encoding,
    RingVector,
    decode,
    encode_in_place,
    plan_encoding,
)
from headwater.common.secagg.masking import Stream, mask_in_place
from headwater.common.secagg.secret import Secret
from headwater.examples.digits import Digits
from headwater.simulation.guide.sums_lab import digits_model

SIDE, BINS, VICTIM = 8, 32, 0


def look(num_devices: int, num_colluders: int, digit: int) -> dict[str, Any]:
    """Return the pictures in the victim's update, as it is, masked, unmasked by others, and summed.

    ``num_colluders`` devices tell the server the keys that they share with the victim.
    """
    vectors = [_update(digit if n == VICTIM else (digit + n) % 10, n) for n in range(num_devices)]
    unit = int(vectors[VICTIM].view(-1, SIDE * SIDE).norm(dim=1).argmax())
    encoding = plan_encoding(
        clip=max(float(v.abs().max()) for v in vectors), max_weight=num_devices, ring_bits=32
    )
    rings = [_encoded(vector, encoding) for vector in vectors]
    masked = [ring.copy() for ring in rings]
    for n, ring in enumerate(masked):
        mask_in_place(ring, _streams(n, range(num_devices)))
    others = [n for n in range(num_devices) if n != VICTIM][:num_colluders]
    seen = masked[VICTIM].copy()
    mask_in_place(seen, [_own(VICTIM), *_pairs(VICTIM, others)], remove=True)
    total = np.zeros_like(rings[0])
    for n, ring in enumerate(masked):
        opened = ring.copy()
        mask_in_place(opened, [_own(n)], remove=True)
        total += opened
    return {
        "plain": _picture(vectors[VICTIM], unit),
        "masked": _picture(_decoded(masked[VICTIM], encoding), unit),
        "seen": _picture(_decoded(seen, encoding), unit),
        "sum": _picture(_decoded(total, encoding), unit),
        "histogram_plain": _histogram(rings[VICTIM]),
        "histogram_masked": _histogram(masked[VICTIM]),
        "is_revealed": bool(np.array_equal(seen, rings[VICTIM])),
        "is_sum_exact": bool(np.array_equal(total, np.sum(rings, axis=0, dtype=rings[0].dtype))),
        "keys_missing": num_devices - 1 - len(others),
    }


@cache
def _update(digit: int, part: int) -> Tensor:
    """Return the first layer's gradient [128 x 64] of one image of a digit."""
    images, labels = Digits().train_examples(data=None, part=0, num_parts=1).tensors
    image = images[labels == digit][part : part + 1]
    model = digits_model(has_norm=False)
    loss = functional.cross_entropy(model(image), torch.tensor([digit]), reduction="sum")
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = next(iter(model.parameters())).grad
    assert gradient is not None
    return gradient.flatten()


def _encoded(vector: Tensor, encoding: Encoding) -> RingVector:
    ring, _ = encode_in_place(vector.clone(), weight=1, encoding=encoding)
    return ring


def _decoded(ring: RingVector, encoding: Encoding) -> NDArray[np.float32]:
    return decode(ring.copy(), encoding).astype(np.float32)


def _key(*parts: object) -> Secret:
    return Secret(hashlib.sha256(repr(parts).encode()).digest())


def _own(device: int) -> Stream:
    return Stream(key=_key("own", device), sign=1)


def _pairs(device: int, others: list[int]) -> list[Stream]:
    return [
        Stream(key=_key("pair", *sorted((device, other))), sign=1 if device < other else -1)
        for other in others
    ]


def _streams(device: int, devices: range) -> list[Stream]:
    return [_own(device), *_pairs(device, [n for n in devices if n != device])]


def _picture(vector: Tensor | NDArray[np.float32], unit: int) -> list[float]:
    """Return one hidden unit's part of the vector as a picture of 8 x 8, from 0 to 1."""
    part = np.asarray(vector, dtype=np.float64).reshape(-1, SIDE * SIDE)[unit]
    if abs(part.min()) > abs(part.max()):
        part = -part
    low, high = float(part.min()), float(part.max())
    return [round((float(v) - low) / ((high - low) or 1.0), 3) for v in part]


def _histogram(ring: RingVector) -> list[int]:
    """Return how many coordinates are in each of ``BINS`` equal parts of the ring."""
    counts, _ = np.histogram(ring.astype(np.float64), bins=BINS, range=(0.0, 2.0**32))
    return [int(count) for count in counts]
