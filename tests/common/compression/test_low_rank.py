"""Factors of matrices: linear, exact about what is left; in time nothing is missed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headwater.common.compression.encoding import Coding
from headwater.common.compression.low_rank import (
    SharedFactors,
    first_columns,
    matrices_of,
    next_columns,
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
        "basis": first_columns(flipped, rank, np.random.default_rng(0)),
    }
    return CompressionTerms(method="low-rank", **given | changes)


def vector(seed: int) -> Tensor:
    return torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(seed))


def whole(chosen: CompressionTerms, sent_K: Tensor) -> Tensor:
    found_P = torch.zeros(NUM_VALUES)
    SharedFactors(chosen, NUM_VALUES).scatter_add(sent_K, found_P)
    return found_P


@pytest.mark.parametrize("side", ["right", "left"])
def test_what_is_sent_and_what_is_left_add_up_to_the_vector(side: Side) -> None:
    chosen, values_P = terms(side), vector(0)
    coding, left_P = Coding(terms=chosen, run_seed=0, round=1), values_P.clone()
    data = coding.encode(left_P, "pi")
    assert len(data) == chosen.num_bytes(NUM_VALUES)
    sent_P = coding.read(data, "pi", NUM_VALUES).tensor()
    # A coordinate is a sum of as many products as the rank, and the rounding is taken back.
    error = (sent_P.double() + left_P.double() - values_P.double()).abs().max()
    assert error < 4 * (RANK + 1) * EPS * values_P.abs().max()
    assert torch.equal(sent_P[:5] + left_P[:5], values_P[:5])  # beside the matrices all is sent
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
    assert chosen.basis is not None
    at = 0
    for one in MATRICES:
        length = RANK * (one.columns if side == "right" else one.rows)
        basis = chosen.basis[at : at + length].view(-1, RANK).double()
        at += length
        matrix = values_P[one.start : one.end].view(one.rows, one.columns).double()
        expected = matrix @ basis @ basis.T if side == "right" else basis @ basis.T @ matrix
        found = found_P[one.start : one.end].view(one.rows, one.columns)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


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
    basis = first_columns([one], rank, random)
    chosen = CompressionTerms(
        method="low-rank", rank=rank, matrices=(one,), side="right", basis=basis
    )
    left_P, arrived_P = torch.zeros(384), torch.zeros(384, dtype=torch.float64)
    rounds = 400
    for _ in range(rounds):
        left_P += matrix.flatten()
        sent_P = torch.zeros(384)
        factors = SharedFactors(chosen, 384)
        factors.scatter_add(factors.gather(left_P), sent_P)
        arrived_P += sent_P
        side, basis = next_columns(sent_P, chosen, random)
        chosen = chosen.model_copy(update={"side": side, "basis": basis})
    expected = rounds * matrix.flatten().double()
    assert (arrived_P - expected).norm() < 0.15 * expected.norm()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"matrices": (Matrix(5, 40, 30), Matrix(1200, 20, 64))}, "not those of this model"),
        ({"matrices": (Matrix(5, 40, 30), Matrix(1213, 20, 64))}, "not those of this model"),
        ({"basis": torch.zeros(3)}, "not those of this model"),
        ({"basis": 2 * first_columns(MATRICES, RANK, np.random.default_rng(0))}, "orthonormal"),
        ({"basis": torch.full((RANK * 94,), torch.nan)}, "orthonormal"),
    ],
)
def test_columns_that_project_nothing_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ProtocolMismatch, match=text):
        SharedFactors(terms(**changes), NUM_VALUES)


def test_terms_of_low_rank_have_columns() -> None:
    with pytest.raises(ValueError, match="a side and columns"):
        CompressionTerms(method="low-rank", side="left")
    with pytest.raises(ValueError, match="a side and columns"):
        CompressionTerms(method="low-rank", basis=torch.zeros(1))


def test_matrices_are_those_that_a_factor_halves() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(64, 50), nn.Linear(50, 2))
    layout = ModelImage(model).layout
    starts = [start for start, _ in layout.spans]
    assert matrices_of(layout, 4) == (Matrix(starts[0], 16, 27), Matrix(starts[2], 50, 64))
    assert matrices_of(layout, 20) == (Matrix(starts[2], 50, 64),)
    assert matrices_of(layout, 30) == ()
