"""Shamir's secret sharing over GF(2^8), byte by byte, for many secrets at once.

Each byte of a secret is the constant term of a random polynomial of degree ``threshold - 1``;
holder h is given its values at x = h + 1. Any ``threshold`` shares determine the polynomials, fewer
say nothing of the secret, whatever the holders can compute (Shamir 1979). Bytes are elements of
GF(2^8) modulo x^8 + x^4 + x^3 + x + 1 (FIPS 197), multiplied by tables of logarithms.

Out of scope: a wrong share is not detected here but by the commitments beside the sealed shares
(``common/session_keys.py``). Table look-ups are not constant in time: a process on the same machine
that watches the cache could learn of the shares that are made or combined there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

MAX_HOLDERS = 255  # x = 0 is the secret itself


def split(
    secrets: Sequence[bytes | bytearray | memoryview],
    *,
    threshold: int,
    num_holders: int,
    random: Callable[[int], bytes] = os.urandom,
) -> NDArray[np.uint8]:
    """Split secrets of one length among holders; return the shares [num_holders, secrets, length].

    Row h belongs to the holder with x = h + 1. The bytes of ``random`` are the coefficients of the
    polynomials above the constant term.

    Raises:
        ValueError: secrets of several lengths or none; a threshold that is not in
            1..num_holders; more than 255 holders.
    """
    raise NotImplementedError


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret that shares (x -> share) of one dealer determine.

    All shares given are used. With fewer than the threshold, or with a wrong one among them, the
    result is some other byte string: check it against what the dealer published.

    Raises:
        WrongShare: shares of several lengths.
        ValueError: no share, or an x outside 1..255.
    """
    raise NotImplementedError
