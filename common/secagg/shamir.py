"""Shamir's secret sharing over GF(2^8), byte by byte, for many secrets at once.

Each byte of a secret is the constant term of a random polynomial of degree ``threshold - 1``;
holder h gets its value at x = h + 1. Any ``threshold`` shares determine the polynomials; fewer
reveal nothing about the secret, whatever the holders can compute (Shamir 1979). Bytes are elements
of GF(2^8) modulo x^8 + x^4 + x^3 + x + 1 (FIPS 197, section 4.2).

Splitting and combining are the same operation: a matrix of public factors (powers of x, Lagrange
coefficients) times rows of secret bytes. A product with a public factor is the sum of the row's
doublings at the factor's set bits, so secrets are only shifted and combined by exclusive or; no
table is indexed by a secret byte. Beyond that, constant time is not claimed: it is numpy.

Out of scope: a wrong share is not detected here, but by the commitments that accompany the sealed
shares (``common/secagg/keys.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headwater.common.errors import WrongShare

MAX_HOLDERS = 255  # x = 0 is the secret itself
POLYNOMIAL = 0x1B  # x^8 = x^4 + x^3 + x + 1

Bytes = NDArray[np.uint8]


def split(
    secrets: Sequence[bytes | bytearray | memoryview],
    *,
    threshold: int,
    num_holders: int,
    random: Callable[[int], bytes] = os.urandom,
) -> Bytes:
    """Split secrets of one length among holders; return the shares [num_holders, secrets, length].

    Row h belongs to the holder with x = h + 1. ``random`` gives the polynomials' coefficients above
    the constant term; they must be uniform and never reused.

    Raises:
        ValueError: no secret, or secrets of different lengths; a threshold outside 1..num_holders;
            more than 255 holders.
    """
    if not 1 <= threshold <= num_holders <= MAX_HOLDERS:
        raise ValueError(
            f"expected 1 <= threshold <= holders <= {MAX_HOLDERS}, found {threshold} and "
            f"{num_holders}"
        )
    if len({len(secret) for secret in secrets}) != 1:
        raise ValueError("expected at least one secret, and all of one length")
    num_bytes = sum(len(secret) for secret in secrets)
    rows_TN = np.empty((threshold, num_bytes), dtype=np.uint8)
    rows_TN[0] = np.concatenate([np.frombuffer(secret, dtype=np.uint8) for secret in secrets])
    coefficients = random((threshold - 1) * num_bytes)
    rows_TN[1:] = np.frombuffer(coefficients, dtype=np.uint8).reshape(threshold - 1, num_bytes)
    x_H = np.arange(1, num_holders + 1)
    logs_HT = _LOG[x_H][:, None] * np.arange(threshold)[None, :] % 255
    shares_HN = _times(_EXP[logs_HT], rows_TN)
    return shares_HN.reshape(num_holders, len(secrets), len(secrets[0]))


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret that one dealer's shares (x -> share) determine.

    All given shares are used. With fewer than the threshold, or with a wrong share among them, the
    result is another byte string: check it against the dealer's commitment.

    Raises:
        WrongShare: shares of different lengths.
        ValueError: no share, or an x outside 1..255.
    """
    if not shares or not all(1 <= x <= MAX_HOLDERS for x in shares):
        raise ValueError(f"shares at x = {sorted(shares)}: expected some, within 1..{MAX_HOLDERS}")
    lengths = {x: len(share) for x, share in shares.items()}
    if len(set(lengths.values())) != 1:
        raise WrongShare(f"shares of one secret differ in length; bytes by x: {lengths}")
    rows_HN = np.stack([np.frombuffer(share, dtype=np.uint8) for share in shares.values()])
    return _times(_at_zero(list(shares))[None, :], rows_HN).tobytes()


def _at_zero(x: Sequence[int]) -> Bytes:
    """Return the Lagrange coefficients at 0: the product over j != i of x_j / (x_j - x_i)."""
    x_H = np.array(x)
    differences_HH = x_H[:, None] ^ x_H[None, :]  # addition and subtraction are exclusive or
    np.fill_diagonal(differences_HH, 1)  # whose logarithm is 0
    logs_H = _LOG[x_H].sum() - _LOG[x_H] - _LOG[differences_HH].sum(axis=1)
    coefficients_H: Bytes = _EXP[logs_H % 255]
    return coefficients_H


def _times(factors_HT: Bytes, rows_TN: Bytes) -> Bytes:
    """Return the product [H, N] of public factors and secret rows over GF(2^8)."""
    multiples_TBN = np.empty((len(rows_TN), 8, rows_TN.shape[1]), dtype=np.uint8)
    multiples_TBN[:, 0] = rows_TN
    for bit in range(1, 8):
        previous = multiples_TBN[:, bit - 1]
        multiples_TBN[:, bit] = (previous << 1) ^ ((previous >> 7) * np.uint8(POLYNOMIAL))
    multiples = multiples_TBN.reshape(-1, rows_TN.shape[1])
    products = np.empty((len(factors_HT), rows_TN.shape[1]), dtype=np.uint8)
    for factors_T, product in zip(factors_HT, products, strict=True):
        bits = np.unpackbits(factors_T, bitorder="little")
        np.bitwise_xor.reduce(multiples[np.flatnonzero(bits)], axis=0, out=product)
    return products


def _tables() -> tuple[Bytes, NDArray[np.int64]]:
    """Return the generator's powers [255] and logarithms [256]; the entry of 0 is never used."""
    powers = np.zeros(255, dtype=np.uint8)
    logs = np.zeros(256, dtype=np.int64)
    element = 1
    for power in range(255):
        powers[power], logs[element] = element, power
        doubled = element << 1
        # Times 3, which generates the multiplicative group.
        element ^= doubled ^ ((POLYNOMIAL | 0x100) if doubled & 0x100 else 0)
    return powers, logs


_EXP, _LOG = _tables()
