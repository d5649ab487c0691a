"""Masks against ciphers in plain Python, and the algebra that unmasking relies on."""

from __future__ import annotations

import itertools
import math
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher as OpenCipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headwater.common.errors import SecretErased
from headwater.common.secagg.keys import pairwise_sign
from headwater.common.secagg.masking import (
    CHUNK_BYTES,
    SCALARS,
    VECTOR,
    Cipher,
    Ring,
    Stream,
    mask_in_place,
)
from headwater.common.secagg.secret import Secret

DTYPES = (np.uint8, np.uint16, np.uint32, np.uint64)
CIPHERS: tuple[Cipher, ...] = ("chacha20", "aes256-ctr")
PER_CHUNK = CHUNK_BYTES // 4
# Around the ends of chunks, and of blocks of the ciphers.
LENGTHS = (0, 1, 3, 15, 16, 17, PER_CHUNK - 1, PER_CHUNK, PER_CHUNK + 1, 3 * PER_CHUNK + 5)


def chacha20_block(key: bytes, counter: int, nonce: bytes) -> bytes:
    """RFC 8439, section 2.3, as it is written there."""
    start = struct.unpack("<4I", b"expand 32-byte k") + struct.unpack("<8I", key)
    start += (counter, *struct.unpack("<3I", nonce))
    words = list(start)

    def quarter_round(a: int, b: int, c: int, d: int) -> None:
        for x, y, z, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            words[x] = (words[x] + words[y]) % 2**32
            words[z] ^= words[x]
            words[z] = (words[z] << turn | words[z] >> 32 - turn) % 2**32

    for _ in range(10):
        for i in range(4):
            quarter_round(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter_round(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return struct.pack("<16I", *((w + s) % 2**32 for w, s in zip(words, start, strict=True)))


def chacha20(key: bytes, num_bytes: int, part: int) -> bytes:
    nonce = part.to_bytes(12, "little")
    blocks = (chacha20_block(key, i, nonce) for i in range(-(-num_bytes // 64)))
    return b"".join(blocks)[:num_bytes]


def aes256_ctr(key: bytes, num_bytes: int, part: int) -> bytes:
    """Encrypt the counters one by one (SP 800-38A, section 6.5)."""
    counters = ((part << 64) + i for i in range(-(-num_bytes // 16)))
    encrypt = OpenCipher(AES(key), ECB()).encryptor()
    return encrypt.update(b"".join(c.to_bytes(16, "big") for c in counters))[:num_bytes]


REFERENCE = {"chacha20": chacha20, "aes256-ctr": aes256_ctr}


def keys(num: int, *, seed: int = 0) -> list[bytes]:
    random = np.random.default_rng(seed)
    return [random.bytes(32) for _ in range(num)]


def streams(num: int, *, seed: int = 0) -> list[Stream]:
    """Streams of fixed keys, every third one subtracted."""
    return [
        Stream(key=Secret(key), sign=-1 if i % 3 == 2 else 1)
        for i, key in enumerate(keys(num, seed=seed))
    ]


def vector(length: int, dtype: Any = np.uint32, *, seed: int = 1) -> Ring:
    values: Ring = np.random.default_rng(seed).integers(
        0, np.iinfo(dtype).max, size=length, dtype=dtype, endpoint=True
    )
    return values


def test_the_reference_is_rfc_8439_s() -> None:
    key, nonce = bytes(range(32)), bytes.fromhex("000000090000004a00000000")
    assert chacha20_block(key, 1, nonce).hex() == (  # section 2.3.2
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", [VECTOR, SCALARS])
@pytest.mark.parametrize("cipher", CIPHERS)
def test_a_mask_is_the_cipher_s_keystream(dtype: Any, part: int, cipher: Cipher) -> None:
    (key,) = keys(1)
    length = (CHUNK_BYTES + 1000) // np.dtype(dtype).itemsize  # into the second chunk
    expected = REFERENCE[cipher](key, length * np.dtype(dtype).itemsize, part)
    masked = np.zeros(length, dtype=dtype)
    mask_in_place(masked, [Stream(key=Secret(key), sign=1)], cipher=cipher, part=part)
    assert masked.tobytes() == expected
    mask_in_place(masked, [Stream(key=Secret(key), sign=-1)], cipher=cipher, part=part)
    assert not masked.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cipher", CIPHERS)
def test_masks_add_and_subtract_in_the_ring(dtype: Any, cipher: Cipher) -> None:
    modulus = 2 ** (8 * np.dtype(dtype).itemsize)
    plain, length = vector(40, dtype), 40
    expected = [int(x) for x in plain]
    for stream in streams(7):
        stream_bytes = REFERENCE[cipher](bytes(stream.key.reveal()), plain.nbytes, VECTOR)
        mask = np.frombuffer(stream_bytes, dtype=dtype)
        expected = [
            (e + stream.sign * int(m)) % modulus for e, m in zip(expected, mask, strict=True)
        ]
    masked = plain.copy()
    mask_in_place(masked, streams(7), cipher=cipher)
    assert masked.tolist() == expected
    assert len(expected) == length


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("cipher", CIPHERS)
def test_the_result_is_independent_of_threads_and_order(length: int, cipher: Cipher) -> None:
    plain = vector(length)
    alone = plain.copy()
    mask_in_place(alone, streams(5), cipher=cipher)
    for num_threads in (2, 3, 7):
        masked = plain.copy()
        mask_in_place(masked, streams(5)[::-1], cipher=cipher, num_threads=num_threads)
        assert masked.tobytes() == alone.tobytes()


@pytest.mark.parametrize("length", LENGTHS)
def test_unmasking_removes_the_masks(length: int) -> None:
    plain = vector(length)
    masked = plain.copy()
    mask_in_place(masked, streams(4), num_threads=2)
    mask_in_place(masked, streams(4), remove=True, num_threads=3)
    assert masked.tobytes() == plain.tobytes()


def pair_key(a: str, b: str) -> bytes:
    return f"{min(a, b)}|{max(a, b)}".encode().ljust(32)


def masked_by(name: str, names: list[str], plain: NDArray[np.uint32]) -> NDArray[np.uint32]:
    masked = plain.copy()
    own = [Stream(key=Secret(name.encode().ljust(32)), sign=1)]
    pairs = [
        Stream(key=Secret(pair_key(name, peer)), sign=pairwise_sign(name, peer))
        for peer in names
        if peer != name
    ]
    mask_in_place(masked, own + pairs)
    return masked


@given(st.integers(2, 8), st.integers(1, 40), st.data())
def test_the_sum_of_survivors_remains_after_unmasking(
    num_devices: int, length: int, data: st.DataObject
) -> None:
    names = [f"d{i}" for i in range(num_devices)]
    dropped = data.draw(st.sets(st.sampled_from(names), max_size=num_devices - 1))
    survivors = [name for name in names if name not in dropped]
    plain = {
        name: vector(length, seed=i).astype(np.uint32, copy=False) for i, name in enumerate(names)
    }
    total = np.zeros(length, dtype=np.uint32)
    for name in survivors:
        total += masked_by(name, names, plain[name])
    left = [Stream(key=Secret(name.encode().ljust(32)), sign=1) for name in survivors]
    left += [
        Stream(key=Secret(pair_key(name, gone)), sign=pairwise_sign(name, gone))
        for name, gone in itertools.product(survivors, sorted(dropped))
    ]
    mask_in_place(total, left, remove=True)
    expected = [
        sum(column) % 2**32 for column in zip(*(plain[s].tolist() for s in survivors), strict=True)
    ]
    assert total.tolist() == expected


@pytest.mark.parametrize("cipher", CIPHERS)
def test_each_part_of_an_upload_has_its_own_streams(cipher: Cipher) -> None:
    parts = []
    for part in (VECTOR, SCALARS, 2):
        mask = np.zeros(64, dtype=np.uint64)
        mask_in_place(mask, streams(1), cipher=cipher, part=part)
        parts.append(mask)
    # Equal somewhere among 3 x 64 x 64 pairs with probability 12,288 / 2^64.
    assert len(set(np.concatenate(parts).tolist())) == 3 * 64


@pytest.mark.parametrize("cipher", CIPHERS)
@pytest.mark.parametrize("plain", [0, 1, 2**31 - 1])
def test_masked_vectors_are_uniform(cipher: Cipher, plain: int) -> None:
    """Chi-squared over 256 values of each byte; the keys are fixed, so it cannot fail by chance."""
    masked = np.full(1 << 18, plain, dtype=np.uint32)
    mask_in_place(masked, streams(3), cipher=cipher)
    for byte in masked.view(np.uint8).reshape(-1, 4).T:
        expected = len(byte) / 256
        chi_squared = float(((np.bincount(byte, minlength=256) - expected) ** 2 / expected).sum())
        # 255 degrees of freedom: mean 255, variance 510; six standard deviations.
        assert abs(chi_squared - 255) < 6 * math.sqrt(510)


def test_masking_needs_two_chunks_of_memory_for_any_vector() -> None:
    masked, twenty = vector(2_000_000), streams(20)
    mask_in_place(masked[:1], twenty)  # imports and caches
    tracemalloc.start()
    try:
        mask_in_place(masked, twenty)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The keystream, and no more than 1 KiB a context (OpenSSL's own half is not traced).
    assert peak < CHUNK_BYTES + 20 * 1024 + 16 * 1024


def test_an_erased_key_leaves_the_vector_unchanged() -> None:
    plain, five = vector(3 * PER_CHUNK), streams(5)
    five[4].key.erase()
    masked = plain.copy()
    with pytest.raises(SecretErased):
        mask_in_place(masked, five, num_threads=2)
    assert masked.tobytes() == plain.tobytes()


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(8, dtype=np.uint32)[::2],
        np.zeros((2, 2), dtype=np.uint32),
        np.zeros(4, dtype=np.int32),
        np.zeros(4, dtype=np.float32),
        np.zeros(4, dtype=">u4"),
        np.frombuffer(bytes(16), dtype=np.uint32),
    ],
)
def test_only_contiguous_ring_elements_are_masked(wrong: Any) -> None:
    with pytest.raises(ValueError, match="ring"):
        mask_in_place(wrong, streams(1))


@pytest.mark.parametrize("num_bytes", [0, 16, 31, 33])
def test_a_key_has_32_bytes(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Stream(key=Secret(bytes(num_bytes)), sign=1)
