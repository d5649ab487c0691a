"""Sends the factors of a vector's matrices: a projection that all devices of a round share.

In a round of side *right* all devices have the same orthonormal columns Q [n, r] for a matrix M
[m, n] and send M Q [m, r]; in one of side *left* the same U [m, r], and they send U^T M [r, n]. A
factor is linear in the vector, so factors add up over devices, also under masks, and the sum of M Q
Q^T, or of U U^T M, is what the server adds. Sides take turns: the columns of the next round span
what the last sum had (Vogels et al. 2019, "PowerSGD", with one exchange a round). Parameters that
are no matrix, or one that its factor would hardly make shorter, are sent whole.

The server sends the columns in the plan (``shared_columns``). What is not sent stays in the vector
(error feedback).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwater.common.compression.few_bits import decoded_few_bits, encode_few_bits
from headwater.common.compression.rounding import decoded_bfloat16, encode_bfloat16
from headwater.common.compression.shared_columns import (
    Shape,
    columns_bytes,
    encode_columns,
    orthonormal_columns,
)
from headwater.common.compression.terms import CompressionTerms, Matrix, Precision, Side
from headwater.common.errors import ProtocolMismatch
from headwater.common.model.layout import ModelLayout
from headwater.common.sums.encoded_vector import EncodedVector, Floats


def matrices_of(layout: ModelLayout, rank: int, *, least_share: float = 0.0) -> tuple[Matrix, ...]:
    """Return the matrices of a model's vector that a factor of this rank halves at least.

    A tensor of more dimensions is a matrix with as many rows as its first one has. Left out are
    those that no rank halves with at least this share on either side: long and narrow ones.
    """
    found = []
    for slot, (start, end) in zip(layout.trainable, layout.spans, strict=True):
        if len(slot.shape) < 2 or end == start:
            continue
        one = Matrix(start, slot.shape[0], (end - start) // slot.shape[0])
        longer, shorter = max(one.rows, one.columns), min(one.rows, one.columns)
        if 2 * max(one.rank(rank), least_rank(longer, least_share)) <= shorter:
            found.append(one)
    return tuple(found)


def least_rank(longer: int, least_share: float) -> int:
    """Return the rank at which a factor is that share of a matrix, on the side that sends less."""
    return math.ceil(round(longer * least_share, 9))


class _Part(NamedTuple):
    """A matrix, its columns [n, r] or [m, r], and where its factor is in what is sent."""

    matrix: Matrix
    basis: Floats
    first: int


class SharedFactors:
    """The projection of a round: from vectors [P] to what is sent of them [K]."""

    def __init__(self, terms: CompressionTerms, num_values: int) -> None:
        """Take the plan's matrices and columns.

        Raises:
            ProtocolMismatch: they are not of such a vector.
        """
        assert terms.side is not None
        assert terms.columns is not None
        ends = [0, *(place for one in terms.matrices for place in (one.start, one.end)), num_values]
        shapes = shapes_of(terms)
        is_in_order = all(low <= high for low, high in pairwise(ends))
        if not is_in_order or len(terms.columns) != columns_bytes(shapes):
            raise ProtocolMismatch("the plan's matrices are not those of this model")
        self.num_values, self.side = num_values, terms.side
        self.number = terms.num_sent(num_values)
        self._rest = list(zip(ends[::2], ends[1::2], strict=True))
        """Where the coordinates are that are sent whole."""
        self._parts, first = list[_Part](), 0
        found = orthonormal_columns(terms.columns, shapes)
        for one, basis in zip(terms.matrices, found, strict=True):
            self._parts.append(_Part(one, basis, first))
            first += one.length_of_factor(terms)
        self._num_factors = first

    def gather(self, values_P: Tensor) -> Tensor:
        """Return what is sent [K], and take it out of the vector."""
        values = values_P.numpy()
        sent = np.empty(self.number, dtype=np.float32)
        for part in self._parts:
            matrix = self._matrix(values, part)
            is_right = self.side == "right"
            factor = matrix @ part.basis if is_right else part.basis.T @ matrix
            sent[part.first : part.first + factor.size] = factor.reshape(-1)
            matrix -= self._product(part, factor, 0, part.matrix.rows)
        at = self._num_factors
        for start, end in self._rest:
            sent[at : at + end - start] = values[start:end]
            values[start:end] = 0.0
            at += end - start
        return torch.from_numpy(sent)

    def scatter_add(self, values_K: Tensor, values_P: Tensor) -> None:
        """Add what was sent to a vector."""
        values = values_P.numpy()
        for low, high, piece in self._pieces(values_K.numpy(), 0, self.num_values):
            values[low:high] += piece

    def decoded(self, sent_K: Floats) -> EncodedVector:
        """Return the vector of what was sent."""

        def decode(low: int, high: int) -> Floats:
            decoded = np.empty(high - low, dtype=np.float32)
            for first, end, piece in self._pieces(sent_K, low, high):
                decoded[first - low : end - low] = piece
            return decoded

        return EncodedVector(self.num_values, decode)

    def _pieces(self, sent: Floats, low: int, high: int) -> Iterator[tuple[int, int, Floats]]:
        """Yield the coordinates from ``low`` to ``high`` in pieces, each with its place."""
        for part in self._parts:
            one = part.matrix
            first, end = max(low, one.start), min(high, one.end)
            if first < end:
                top, bottom = (
                    (first - one.start) // one.columns,
                    -(-(end - one.start) // one.columns),
                )
                rows = self._product(part, self._factor(sent, part), top, bottom).reshape(-1)
                skipped = first - one.start - top * one.columns
                yield first, end, rows[skipped : skipped + end - first]
        at = self._num_factors
        for start, stop in self._rest:
            first, end = max(low, start), min(high, stop)
            if first < end:
                yield first, end, sent[at + first - start : at + end - start]
            at += stop - start

    def _matrix(self, values: Floats, part: _Part) -> Floats:
        one = part.matrix
        return values[one.start : one.end].reshape(one.rows, one.columns)

    def _factor(self, sent: Floats, part: _Part) -> Floats:
        rank, is_right = part.basis.shape[1], self.side == "right"
        shape = (part.matrix.rows, rank) if is_right else (rank, part.matrix.columns)
        return sent[part.first : part.first + shape[0] * shape[1]].reshape(shape)

    def _product(self, part: _Part, factor: Floats, top: int, bottom: int) -> Floats:
        """Return rows of the matrix of a factor.

        Column by column, so that a row has the same bits whatever others it is computed with.
        """
        is_right = self.side == "right"
        left, right = (factor, part.basis.T) if is_right else (part.basis, factor)
        rows = np.zeros((bottom - top, part.matrix.columns), dtype=np.float32)
        for column in range(right.shape[0]):
            rows += left[top:bottom, column, None] * right[column]
        return rows


def encode_factors(values_P: Tensor, factors: SharedFactors, values: Precision) -> bytearray:
    """Return what is sent, rounded; ``values_P`` becomes what was not sent."""
    sent_K = factors.gather(values_P)
    data = encode_bfloat16(sent_K) if values == "bfloat16" else encode_few_bits(sent_K, values)
    factors.scatter_add(sent_K, values_P)  # what the rounding lost
    return data


def decoded_factors(
    data: memoryview, factors: SharedFactors, values: Precision, *, name: str
) -> EncodedVector:
    """Return the vector of rounded factors, of as many bytes as the terms say.

    Raises:
        CorruptUpdate, NonFiniteUpdate: see ``decoded_few_bits``.
    """
    if values == "bfloat16":
        sent = decoded_bfloat16(data, factors.number)
    else:
        sent = decoded_few_bits(data, factors.number, values, name=name)
    return factors.decoded(sent[0 : factors.number])


def next_columns(
    mean_P: Tensor, terms: CompressionTerms, random: np.random.Generator
) -> tuple[Side, bytes]:
    """Return the side of the next round, and the columns that span what a sum had.

    Its last column is drawn at random, so that no part of a matrix stays out of sight for good; of
    rank 1 every fourth time.
    """
    assert terms.columns is not None
    found = list[Floats]()
    for one, basis in zip(
        terms.matrices, orthonormal_columns(terms.columns, shapes_of(terms)), strict=True
    ):
        matrix = mean_P[one.start : one.end].view(one.rows, one.columns).numpy().astype(np.float64)
        seen = matrix @ basis if terms.side == "right" else matrix.T @ basis
        directions = np.linalg.svd(seen, full_matrices=False)[0]
        if basis.shape[1] > 1 or random.integers(4) == 0:
            directions[:, -1] = random.standard_normal(len(directions))
        found.append(directions.astype(np.float32))
    return "left" if terms.side == "right" else "right", encode_columns(found)


def first_columns(matrices: Sequence[Matrix], rank: int, random: np.random.Generator) -> bytes:
    """Return random columns for a round of side right."""
    shapes = [(one.columns, one.rank(rank)) for one in matrices]
    return encode_columns([random.standard_normal(one).astype(np.float32) for one in shapes])


def shapes_of(terms: CompressionTerms) -> tuple[Shape, ...]:
    """Return the shapes of the columns of each matrix."""
    return tuple(one.shape_of_columns(terms) for one in terms.matrices)
