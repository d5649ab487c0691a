"""Factors of matrices: linear, exact about what is left; in time nothing is missed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from headwater.common.compression.encoding import Coding
from headwater.common.compression.low_rank import (
    SharedFactors,
    first_columns,
    least_rank,
    matrices_of,
    next_columns,
    shapes_of,
)
from headwater.common.compression.shared_columns import (
    Shape,
    columns_bytes,
    encode_columns,
    orthonormal_columns,
)
from headwater.common.compression.terms import CompressionTerms, Matrix, Side
from headwater.common.errors import ProtocolMismatch
from headwater.common.model.parameters import ModelImage

RANK = 3
MATRICES = (Matrix(5, 40, 30), Matrix(1205, 20, 64))
NUM_VALUES = 1205 + 20 * 64 + 7
EPS = 2.0**-23


def terms(side: Side = "right", rank: int = RANK, **changes: Any) -> CompressionTerms:
    flipped = [one if side == "right" else Matrix(0, one.columns, one.rows) for one in MATRICES]
    given: dict[str, Any] = {
        "matrices": MATRICES,
        "side": side,
        "rank": rank,
        "columns": first_columns(flipped, rank, np.random.default_rng(0)),
    }
    return CompressionTerms(method="low-rank", **given | changes)


def vector(seed: int) -> Tensor:
    return torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(seed))


def whole(chosen: CompressionTerms, sent_K: Tensor) -> Tensor:
    found_P = torch.zeros(NUM_VALUES)
    SharedFactors(chosen, NUM_VALUES).scatter_add(sent_K, found_P)
    return found_P


@pytest.mark.parametrize("values", ["bfloat16", "int4", "int2", "int1"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_what_is_sent_and_what_is_left_add_up_to_the_vector(side: Side, values: str) -> None:
    chosen, values_P = terms(side, values=values), vector(0)
    coding, left_P = Coding(terms=chosen, run_seed=0, round=1), values_P.clone()
    data = coding.encode(left_P, "pi")
    assert len(data) == chosen.num_bytes(NUM_VALUES)
    sent_P = coding.read(data, "pi", NUM_VALUES).tensor()
    # A coordinate is a sum of as many products as the rank, and the rounding is taken back.
    error = (sent_P.double() + left_P.double() - values_P.double()).abs().max()
    assert error < 4 * (RANK + 1) * EPS * values_P.abs().max()
    if values == "bfloat16":  # beside the matrices all is sent
        assert torch.equal(sent_P[:5] + left_P[:5], values_P[:5])
        assert left_P[:5].abs().max() <= 2.0**-8 * values_P[:5].abs().max()


@pytest.mark.parametrize("side", ["right", "left"])
def test_factors_of_devices_add_up_to_the_factor_of_their_sum(side: Side) -> None:
    factors = SharedFactors(terms(side), NUM_VALUES)
    sent = sum(factors.gather(vector(seed)) for seed in range(5))
    total = factors.gather(torch.stack([vector(seed) for seed in range(5)]).sum(0))
    torch.testing.assert_close(sent, total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
def test_what_is_sent_is_the_projection_of_each_matrix(side: Side) -> None:
    chosen, values_P = terms(side), vector(0)
    found_P = whole(chosen, SharedFactors(chosen, NUM_VALUES).gather(values_P.clone()))
    assert chosen.columns is not None
    for one, found in zip(
        MATRICES, orthonormal_columns(chosen.columns, shapes_of(chosen)), strict=True
    ):
        basis = torch.from_numpy(found).double()
        matrix = values_P[one.start : one.end].view(one.rows, one.columns).double()
        expected = matrix @ basis @ basis.T if side == "right" else basis @ basis.T @ matrix
        projected = found_P[one.start : one.end].view(one.rows, one.columns)
        torch.testing.assert_close(projected.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_part_has_the_bits_of_the_whole(side: Side) -> None:
    chosen = terms(side)
    coding = Coding(terms=chosen, run_seed=0, round=1)
    found = coding.read(coding.encode(vector(0), "pi"), "pi", NUM_VALUES)
    cuts = (0, 3, 5, 6, 47, 1204, 1205, 1300, NUM_VALUES - 8, NUM_VALUES - 3, NUM_VALUES)
    parts = [found[low:high] for low, high in pairwise(cuts)]
    assert np.array_equal(np.concatenate(parts), found.tensor().numpy())


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_with_what_was_left_every_direction_is_sent_in_time(rank: int) -> None:
    """A constant vector, two blocks of which share no row and column, reaches the server."""
    one = Matrix(0, 24, 16)
    matrix = torch.zeros(24, 16)
    matrix[:12, :8], matrix[12:, 8:] = torch.randn(12, 8), torch.randn(12, 8)
    random = np.random.default_rng(1)
    columns = first_columns([one], rank, random)
    chosen = CompressionTerms(
        method="low-rank", rank=rank, matrices=(one,), side="right", columns=columns
    )
    left_P, arrived_P = torch.zeros(384), torch.zeros(384, dtype=torch.float64)
    rounds = 400
    for _ in range(rounds):
        left_P += matrix.flatten()
        sent_P = torch.zeros(384)
        factors = SharedFactors(chosen, 384)
        factors.scatter_add(factors.gather(left_P), sent_P)
        arrived_P += sent_P
        side, columns = next_columns(sent_P, chosen, random)
        chosen = chosen.model_copy(update={"side": side, "columns": columns})
    expected = rounds * matrix.flatten().double()
    assert (arrived_P - expected).norm() < 0.15 * expected.norm()


@pytest.mark.parametrize(
    "changes",
    [
        {"matrices": (Matrix(5, 40, 30), Matrix(1200, 20, 64))},
        {"matrices": (Matrix(5, 40, 30), Matrix(1213, 20, 64))},
        {"columns": bytes(3)},
    ],
)
def test_columns_of_another_model_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolMismatch, match="not those of this model"):
        SharedFactors(terms(**changes), NUM_VALUES)


@given(data=st.binary(min_size=17, max_size=17))
def test_whatever_numbers_columns_have_they_are_orthonormal(data: bytes) -> None:
    shapes: tuple[Shape, ...] = ((5, 3), (9, 2), (1, 1))
    assert columns_bytes(shapes) == len(data)
    for shape, found in zip(shapes, orthonormal_columns(data, shapes), strict=True):
        assert found.shape == shape
        np.testing.assert_allclose(found.T @ found, np.eye(shape[1]), atol=1e-5)


def test_columns_span_nearly_what_they_were_made_of() -> None:
    drawn = np.random.default_rng(0).standard_normal((300, 20)).astype(np.float32)
    (found,) = orthonormal_columns(encode_columns([drawn]), ((300, 20),))
    left = drawn - found @ (found.T @ drawn)
    assert np.square(left).sum() < 0.03 * np.square(drawn).sum()


def test_terms_of_low_rank_have_columns() -> None:
    with pytest.raises(ValueError, match="a side and columns"):
        CompressionTerms(method="low-rank", side="left")
    with pytest.raises(ValueError, match="a side and columns"):
        CompressionTerms(method="low-rank", columns=bytes(1))


def test_matrices_are_those_that_a_factor_halves() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(64, 50), nn.Linear(50, 2))
    layout = ModelImage(model).layout
    starts = [start for start, _ in layout.spans]
    assert matrices_of(layout, 4) == (Matrix(starts[0], 16, 27), Matrix(starts[2], 50, 64))
    assert matrices_of(layout, 20) == (Matrix(starts[2], 50, 64),)
    assert matrices_of(layout, 30) == ()


def test_a_matrix_that_is_too_long_for_the_least_share_has_no_factor() -> None:
    layout = ModelImage(nn.Sequential(nn.Linear(64, 400), nn.Linear(400, 6))).layout
    assert len(matrices_of(layout, 2)) == 2
    (only,) = matrices_of(layout, 2, least_share=0.01)
    assert (only.rows, only.columns) == (400, 64)
    assert [least_rank(longest, 0.01) for longest in (1, 400, 700, 701)] == [1, 4, 7, 8]
