"""Few bits: near the least squared error that such levels allow, and sparse blocks keep zeros."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from headwater.common.compression.few_bits import decoded_few_bits, encode_few_bits
from headwater.common.compression.terms import BLOCK, FewBits

NUM_BLOCKS = 40


def drawn(kind: str) -> Tensor:
    random, shape = np.random.default_rng(0), (NUM_BLOCKS, BLOCK)
    values = {
        "normal": random.standard_normal(shape),
        "laplace": random.laplace(size=shape),
        "heavy tails": random.standard_t(3, size=shape),
        "sparse": random.standard_normal(shape) * (random.random(shape) < 0.05),
    }[kind]
    return torch.from_numpy(values.astype(np.float32)).reshape(-1)


def read(data: bytearray, length: int, method: FewBits) -> Tensor:
    return decoded_few_bits(memoryview(data), length, method, name="pi").tensor()


def least_error(values: np.ndarray, levels: np.ndarray) -> float:
    """Return the squared error of the nearest levels at the best of many scales, block by block."""
    best = np.full(NUM_BLOCKS, np.inf)
    for step in np.geomspace(0.01, 4, 120):
        scale = step * np.abs(values).mean(1)[:, None, None]
        distance = np.abs(values[:, :, None] - scale * levels).min(2)
        best = np.minimum(best, (distance**2).sum(1))
    return float(best.sum())


@pytest.mark.parametrize("kind", ["normal", "laplace", "heavy tails", "sparse"])
@pytest.mark.parametrize("method", ["int4", "int2", "int1"])
def test_the_error_is_near_the_least_of_any_scale(method: FewBits, kind: str) -> None:
    values_P = drawn(kind)
    halves = {"int4": [], "int2": [-1.5, -0.5, 0.5, 1.5], "int1": [-0.5, 0.5]}[method]
    whole = {"int4": range(-7, 8), "int2": [-1, 0, 1], "int1": []}[method]
    expected = min(
        least_error(values_P.numpy().reshape(NUM_BLOCKS, BLOCK), np.array(levels, dtype=float))
        for levels in (halves, list(whole))
        if len(levels)
    )
    left_P = values_P.clone()
    encode_few_bits(left_P, method)
    assert float((left_P.double() ** 2).sum()) <= 1.04 * expected


def test_one_bit_is_the_sign_and_the_mean_magnitude() -> None:
    values_P = torch.tensor([1.0, -2.0, 3.0, -6.0])
    sent = read(encode_few_bits(values_P.clone(), "int1"), 4, "int1")
    assert sent.tolist() == [3.0, -3.0, 3.0, -3.0]


@pytest.mark.parametrize("method", ["int4", "int2", "int1"])
def test_zeros_are_sent_as_zeros_and_any_size_of_numbers_as_such(method: FewBits) -> None:
    assert not read(encode_few_bits(torch.zeros(BLOCK + 3), method), BLOCK + 3, method).any()
    for size in (1e-30, 1e30):
        values_P = torch.tensor([size, -size])
        sent = read(encode_few_bits(values_P.clone(), method), 2, method)
        assert torch.allclose(sent, values_P, rtol=1e-5)


@pytest.mark.parametrize("method", ["int4", "int2", "int1"])
def test_numbers_that_are_not_finite_get_a_scale_that_the_server_refuses(method: FewBits) -> None:
    for wrong in (float("nan"), float("inf")):
        values_P = torch.ones(2 * BLOCK)
        values_P[5] = wrong
        scales = np.frombuffer(encode_few_bits(values_P, method), "<f4", 2)
        assert not np.isfinite(scales[0])
        assert np.isfinite(scales[1])
