"""Shamir's sharing against two independent implementations: plain integers and SLIP-0039."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shamir_mnemonic.shamir import RawShare, _interpolate

from headwater.common.errors import WrongShare
from headwater.common.secagg.shamir import MAX_HOLDERS, combine, split


def times(a: int, b: int) -> int:
    """Multiply in GF(2^8): without carries, then reduced. Neither tables nor logarithms."""
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(14, 7, -1):
        if product >> bit & 1:
            product ^= 0x11B << (bit - 8)
    return product


@functools.cache
def inverse(a: int) -> int:
    return next(b for b in range(1, 256) if times(a, b) == 1)


def evaluate(coefficients: list[int], x: int) -> int:
    value, power = 0, 1
    for coefficient in coefficients:
        value ^= times(coefficient, power)
        power = times(power, x)
    return value


def interpolate(points: Mapping[int, int], at: int) -> int:
    """Evaluate the polynomial of lowest degree through the points."""
    value = 0
    for i, y in points.items():
        above, below = y, 1
        for j in points:
            if j != i:
                above, below = times(above, at ^ j), times(below, i ^ j)
        value ^= times(above, inverse(below))
    return value


def test_the_reference_multiplies_as_fips_197_does() -> None:
    assert times(0x57, 0x83) == 0xC1  # FIPS 197, section 4.2
    assert times(0x57, 0x13) == 0xFE  # section 4.2.1
    assert times(0x53, 0xCA) == 0x01


@given(
    st.lists(st.binary(min_size=3, max_size=3), min_size=1, max_size=3),
    st.integers(1, 6).flatmap(lambda t: st.tuples(st.just(t), st.integers(t, 12))),
    st.integers(0, 2**32),
)
def test_shares_are_the_values_of_the_polynomials(
    secrets: list[bytes], sizes: tuple[int, int], seed: int
) -> None:
    threshold, num_holders = sizes
    num_bytes = 3 * len(secrets)
    drawn = np.random.default_rng(seed).bytes((threshold - 1) * num_bytes)
    shares = split(secrets, threshold=threshold, num_holders=num_holders, random=lambda _: drawn)
    flat = b"".join(secrets)
    for h in range(num_holders):
        expected = [evaluate([flat[i], *drawn[i::num_bytes]], h + 1) for i in range(num_bytes)]
        assert shares[h].tobytes() == bytes(expected)


@given(
    st.binary(min_size=1, max_size=9),
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40)).map(sorted),
    st.randoms(use_true_random=False),
)
def test_any_threshold_of_shares_reconstructs_the_secret(
    secret: bytes, sizes: list[int], random: Random
) -> None:
    threshold, num_given, num_holders = sizes
    shares = split([secret], threshold=threshold, num_holders=num_holders)
    holders = random.sample(range(num_holders), num_given)
    given_shares = {h + 1: shares[h, 0].tobytes() for h in holders}
    assert combine(given_shares) == secret
    by_integers = bytes(
        interpolate({x: share[i] for x, share in given_shares.items()}, at=0)
        for i in range(len(secret))
    )
    assert by_integers == secret


@given(st.integers(2, 16), st.integers(16, MAX_HOLDERS), st.binary(min_size=32, max_size=32))
def test_slip_0039_s_reference_reads_our_shares(
    threshold: int, num_holders: int, secret: bytes
) -> None:
    shares = split([secret], threshold=threshold, num_holders=num_holders)[:, 0]
    raw = [
        RawShare(h + 1, shares[h].tobytes()) for h in range(num_holders - threshold, num_holders)
    ]
    assert _interpolate(raw, 0) == secret
    assert _interpolate(raw, 1) == shares[0].tobytes()


@settings(max_examples=10)
@given(st.integers(0, 255))
def test_one_share_less_is_consistent_with_every_secret(secret: int) -> None:
    # t - 1 shares and any assumed secret lie on exactly one polynomial of degree t - 1: there is a
    # t-th share for each of the 256 secrets, and they all differ.
    threshold = 3
    shares = split([bytes([secret])], threshold=threshold, num_holders=3)[:, 0, 0]
    known = {1: int(shares[0]), 2: int(shares[1])}
    assert len({interpolate({0: guess, **known}, at=3) for guess in range(256)}) == 256


def test_one_share_less_gives_another_byte_string() -> None:
    secret = bytes(32)
    shares = split([secret], threshold=5, num_holders=9)
    # Equal with probability 2^-256.
    assert combine({h + 1: shares[h, 0].tobytes() for h in range(4)}) != secret


def test_shares_of_255_holders_and_a_threshold_of_all_combine() -> None:
    secret = os.urandom(32)
    shares = split([secret], threshold=MAX_HOLDERS, num_holders=MAX_HOLDERS)
    assert combine({h + 1: shares[h, 0].tobytes() for h in range(MAX_HOLDERS)}) == secret


def test_with_a_threshold_of_one_each_share_is_the_secret() -> None:
    shares = split([b"open"], threshold=1, num_holders=3)
    assert [share.tobytes() for share in shares[:, 0]] == [b"open"] * 3


@pytest.mark.parametrize(
    ("threshold", "num_holders"), [(0, 3), (4, 3), (2, MAX_HOLDERS + 1), (-1, -1)]
)
def test_impossible_sizes_are_refused(threshold: int, num_holders: int) -> None:
    with pytest.raises(ValueError, match="threshold"):
        split([b"x"], threshold=threshold, num_holders=num_holders)


@pytest.mark.parametrize("secrets", [[], [b"a", b"bc"]])
def test_secrets_of_different_lengths_or_none_are_refused(secrets: list[bytes]) -> None:
    with pytest.raises(ValueError, match="one length"):
        split(secrets, threshold=1, num_holders=2)


@pytest.mark.parametrize("shares", [{}, {0: b"a"}, {256: b"a"}])
def test_shares_at_invalid_x_are_refused(shares: dict[int, bytes]) -> None:
    with pytest.raises(ValueError, match="within 1"):
        combine(shares)


def test_shares_of_different_lengths_are_refused() -> None:
    with pytest.raises(WrongShare, match="differ in length"):
        combine({1: b"ab", 2: b"a"})
