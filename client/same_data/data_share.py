"""What a device without masks tells of which data it has, so that a copy of it is found.

The digest is of five examples and of how many there are. It tells a server nothing that it does not
know, unless the server guesses an example to the bit, or another device has the same.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.client.training.context import Identity
from headwater.common.additivity.hidden_state import same_random_numbers
from headwater.common.additivity.opened_again import compared_positions
from headwater.common.data.nested_values import parts_by_name, stored_tensors
from headwater.common.messages import DataShare
from headwater.common.task import Examples

log = logging.getLogger(__name__)

DIGEST_BYTES = 8
MAX_DEPTH = 8  # of objects that hold each other


def data_share(identity: Identity, examples: Examples, *, run_seed: int) -> DataShare:
    """Return which part a client has, and the digest of its examples if they can be read."""
    try:
        digest = digest_of(examples, run_seed=run_seed)
    except Exception as error:  # training says what is wrong with an example, and leaves it out
        log.debug("%s: its examples have no digest: %s", identity.name, error)
        digest = None
    return DataShare(part=identity.part, num_parts=identity.num_parts, digest=digest)


def digest_of(examples: Examples, *, run_seed: int) -> str:
    """Return the digest of five examples and of their number, another one in each run.

    Random numbers that an example draws, as augmentation does, are the same for all devices.

    Raises:
        TypeError: an example holds something whose value cannot be read.
        Exception: an example cannot be read.
    """
    key = run_seed.to_bytes(8, "little")
    digest = hashlib.blake2b(str(len(examples)).encode(), key=key, digest_size=DIGEST_BYTES)
    with same_random_numbers():
        for position in compared_positions(len(examples)):
            torch.default_generator.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            for piece in _pieces(examples[position], MAX_DEPTH):
                digest.update(piece)
    return digest.hexdigest()


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    """Yield a value as bytes, with its types and shapes.

    Raises:
        TypeError: nothing of it can be read.
    """
    if isinstance(value, Tensor):
        for tensor in stored_tensors(value.detach()):
            flat = tensor.cpu().contiguous().view(-1).view(torch.uint8)
            yield f"{tensor.dtype} {tuple(tensor.shape)}".encode()
            yield flat.numpy().tobytes()
    elif isinstance(value, np.ndarray) and value.dtype.kind != "O":
        yield f"{value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, bool | int | float | complex | str | bytes | type(None) | np.generic):
        yield f"{type(value).__name__} {value!r}".encode()
    elif hasattr(value, "__array_interface__"):  # a picture
        yield from _pieces(np.asarray(value), depth)
    else:
        yield from _pieces_of_parts(value, depth)


def _pieces_of_parts(value: Any, depth: int) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        parts = [part for pair in value.items() for part in pair]
    elif isinstance(value, Sequence | np.ndarray):
        parts = list(value)
    else:
        held = parts_by_name(value)
        if not held:
            raise TypeError(f"{type(value).__name__} holds nothing that can be read")
        parts = [part for pair in held.items() for part in pair]
    if not depth:
        raise TypeError("its parts lie too deep")
    yield f"{type(value).__name__} {len(parts)}".encode()
    for part in parts:
        yield from _pieces(part, depth - 1)
