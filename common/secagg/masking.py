"""Adds masks, which are pseudorandom streams of ring elements, to a vector in place.

A mask is the keystream of ChaCha20 (RFC 8439; or of AES-256-CTR), read as little-endian integers
and added or subtracted modulo 2^16, 2^32 or 2^64, according to the vector's dtype. All streams are
open at once and the vector is processed in chunks that stay in the cache, so it passes through
memory once, whatever the number of masks. Extra memory: 256 KiB per thread, as much again of zeros,
and about 1 KiB per stream.

Each ``part`` of an upload has its own nonce: the same keys mask the vector, the scalars and the
sums beside the vector with independent streams. A key must never mask two vectors under one part:
that would reveal the difference of the vectors. Keys are derived for one session only, and a
session masks one update.

What the server learns from a masked vector: nothing, if it does not know the key of at least one
stream in it and the cipher is secure. A ChaCha20 stream ends, with an error, after 256 GiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher as OpenCipher
from cryptography.hazmat.primitives.ciphers import CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES, ChaCha20
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from headwater.common.secagg.keys import KEY_BYTES
from headwater.common.secagg.secret import Secret

Ring: TypeAlias = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32] | NDArray[np.uint64]
Cipher = Literal["chacha20", "aes256-ctr"]

VECTOR, SCALARS, SUMS = 0, 1, 2
"""The parts of an upload."""

# 256 KiB each of vector, keystream and zeros stay in a second-level cache of 1 MiB; a multiple of
# 64, the block of ChaCha20. With 128 KiB two threads contend for the interpreter's lock so often
# that a tenth of the time is lost. Stream by stream, memory would be read once for each mask.
CHUNK_BYTES = 1 << 18
_ZEROS = bytes(CHUNK_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """One mask: the 32-byte key of its stream, and its sign."""

    key: Secret
    sign: Literal[1, -1]

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"the key of a mask has {KEY_BYTES} bytes, not {len(self.key)}")


def mask_in_place(
    vector: Ring,
    streams: Sequence[Stream],
    *,
    remove: bool = False,
    cipher: Cipher = "chacha20",
    part: int = VECTOR,
    num_threads: int = 1,
) -> None:
    """Add sign x PRG(key) to the vector for each stream, modulo the ring of its dtype.

    With ``remove``, subtract it: this removes the masks that the same streams with the same signs
    added. The server lists the self masks of the survivors with sign +1, and for each dropped
    device the masks that its surviving neighbours added, with the signs that they used.

    The result does not depend on the order of the streams or on the number of threads, which
    process equal ranges of the vector (ciphers and numpy release the GIL).

    Raises:
        SecretErased: a key was erased; the vector is unchanged.
        ValueError: the vector is not contiguous and writable, or its elements are not little-endian
            unsigned integers.
    """
    if vector.ndim != 1 or not vector.flags.c_contiguous or not vector.flags.writeable:
        raise ValueError("only one contiguous, writable run of ring elements can be masked")
    if vector.dtype.str not in ("|u1", "<u2", "<u4", "<u8"):
        raise ValueError(f"a ring's elements are |u1, <u2, <u4 or <u8, not {vector.dtype.str}")
    for stream in streams:
        stream.key.reveal()  # checks all keys before the vector is changed
    num_chunks = -(-vector.nbytes // CHUNK_BYTES)
    num_ranges = max(min(num_threads, num_chunks), 1)
    per_chunk = CHUNK_BYTES // vector.itemsize
    cuts = [num_chunks * i // num_ranges * per_chunk for i in range(num_ranges)]
    ranges = [slice(start, end) for start, end in zip(cuts, [*cuts[1:], len(vector)], strict=True)]

    def process(span: slice) -> None:
        start_bytes = span.start * vector.itemsize
        contexts = [_open(s.key, cipher=cipher, part=part, at_bytes=start_bytes) for s in streams]
        is_added = [(stream.sign == 1) is not remove for stream in streams]
        _apply_streams(vector[span], contexts, is_added)

    if num_ranges == 1:
        process(ranges[0])
        return
    with ThreadPoolExecutor(num_ranges, thread_name_prefix="mask") as pool:
        list(pool.map(process, ranges))


def _apply_streams(
    vector: Ring, contexts: Sequence[CipherContext], is_added: Sequence[bool]
) -> None:
    """Add or subtract all streams, chunk by chunk."""
    keystream_U8 = np.empty(min(CHUNK_BYTES, vector.nbytes), dtype=np.uint8)
    keystream = keystream_U8.view(vector.dtype)
    zeros = memoryview(_ZEROS)
    operations = [np.add if added else np.subtract for added in is_added]
    for start in range(0, len(vector), max(len(keystream), 1)):
        chunk = vector[start : start + len(keystream)]
        mask = keystream[: len(chunk)]
        for context, operation in zip(contexts, operations, strict=True):
            context.update_into(zeros[: chunk.nbytes], keystream_U8.data)
            operation(chunk, mask, out=chunk)


def _open(key: Secret, *, cipher: Cipher, part: int, at_bytes: int) -> CipherContext:
    """Open the keystream of one key and part at a multiple of 64 bytes."""
    if cipher == "chacha20":
        # The block counter in four bytes, little-endian, then the nonce of 12: RFC 8439, 2.3.
        nonce = (at_bytes // 64).to_bytes(4, "little") + part.to_bytes(12, "little")
        return OpenCipher(ChaCha20(key.reveal(), nonce), mode=None).encryptor()
    # One counter of 128 bits, big-endian; the parts are 2^64 blocks apart.
    counter = (part << 64) + at_bytes // 16
    return OpenCipher(AES(key.reveal()), CTR(counter.to_bytes(16, "big"))).encryptor()
