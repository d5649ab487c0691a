"""Masks: a stream of pseudorandom ring elements, added to a vector in its own memory.

A mask is the keystream of ChaCha20 (or AES-256-CTR), read as little-endian integers and added or
subtracted modulo 2^16, 2^32 or 2^64, by the vector's dtype. All streams are open at once and the
vector is walked in chunks that stay in the cache, so a vector of any length costs two chunks of
memory for each thread and one pass for any number of masks.

Each ``part`` of an upload has a nonce of its own: the same keys mask the vector (part 0) and the
scalars (part 1) with independent streams. A key must never mask two different vectors under one
part: their difference would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.secret import Secret

Ring: TypeAlias = NDArray[np.uint16] | NDArray[np.uint32] | NDArray[np.uint64]
Cipher = Literal["chacha20", "aes256-ctr"]

VECTOR, SCALARS = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """One mask: the 32-byte key of its stream, and whether it is added or subtracted."""

    key: Secret
    sign: Literal[1, -1]


def mask_in_place(
    vector: Ring,
    streams: Sequence[Stream],
    *,
    cipher: Cipher = "chacha20",
    part: int = VECTOR,
    num_threads: int = 1,
) -> None:
    """Add sign x PRG(key) to the vector for each stream, modulo the ring of its dtype.

    The result does not depend on the number of threads or the order of the streams. The vector
    must be contiguous and little-endian.

    Raises:
        SecretErased: a key was erased; the vector is unchanged.
    """
    raise NotImplementedError


def unmask_in_place(
    vector: Ring,
    streams: Sequence[Stream],
    *,
    cipher: Cipher = "chacha20",
    part: int = VECTOR,
    num_threads: int = 1,
) -> None:
    """Take away what ``mask_in_place`` added with the same streams (the same signs).

    The server lists the self masks of the survivors with sign +1, and for each device that dropped
    the masks that its surviving neighbours added, with the signs that those neighbours used.
    """
    raise NotImplementedError
