"""What identifies an example between two openings of a device's data.

A data set may name its examples with the attribute ``example_names``: one text each, no two the
same, such as the paths of files. Without it an example is known by its number, which suits data
that only grow at their end: rows of a table, lines of a log.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.client.flower.request import DeviceRequest
from headwater.client.flower.state_file import EXAMPLES
from headwater.common.errors import TaskError
from headwater.common.flower import records
from headwater.common.task import Examples

NAMES = "example_names"
MAX_NAMED = 1 << 17
"""The most examples whose names are remembered: they take 11 bytes each in the state file."""

Hashes = NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KnownExamples:
    """The examples of a data set as it was opened in an epoch."""

    epoch: int
    """The epoch in which a device began to use them."""
    number: int
    hashes: Hashes | None = None
    """The first 64 bits of the SHA-256 of each example's name; None if they have no names."""

    @staticmethod
    def of(examples: Examples, *, epoch: int) -> KnownExamples:
        """Return what identifies the examples of a data set.

        Raises:
            TaskError: the names are not one text for each example, or two are the same.
        """
        names, number = getattr(examples, NAMES, None), len(examples)
        if names is None or number > MAX_NAMED:
            return KnownExamples(epoch=epoch, number=number)
        if len(names) != number or not all(isinstance(name, str) for name in names):
            raise TaskError(
                f"{NAMES} has {len(names)} names for {number} examples, or one that is no text",
                remedy=f"give each example one text, or leave {NAMES} out",
            )
        digests = (hashlib.sha256(name.encode(errors="surrogateescape")) for name in names)
        joined = b"".join(digest.digest()[:8] for digest in digests)
        hashes = np.frombuffer(joined, dtype="<u8").astype(np.uint64)
        if len(np.unique(hashes)) != number:
            raise TaskError(
                f"{NAMES} names two examples alike",
                remedy="give each example a name of its own, such as its path",
            )
        return KnownExamples(epoch=epoch, number=number, hashes=hashes)

    def is_same(self, other: KnownExamples) -> bool:
        """Return whether the examples are the same, in the same order."""
        if self.number != other.number:
            return False
        if self.hashes is None or other.hashes is None:
            return self.hashes is other.hashes
        return np.array_equal(self.hashes, other.hashes)

    def numbers_in(self, later: KnownExamples) -> NDArray[np.int64]:
        """Return each example's number in another opening; -1 where it is not there any more."""
        if self.hashes is None or later.hashes is None:
            numbers = np.arange(self.number)
            return np.where(numbers < later.number, numbers, -1)
        order = np.argsort(later.hashes)
        places = np.searchsorted(later.hashes, self.hashes, sorter=order)
        found = order[np.minimum(places, later.number - 1)]
        return np.where(later.hashes[found] == self.hashes, found, -1)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> KnownExamples:
        """Return what ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        names = plain["names"]
        hashes = None
        if names is not None:
            read = np.frombuffer(base64.b64decode(names, validate=True), dtype="<u8")
            hashes = read.astype(np.uint64)
            if len(hashes) != plain["number"]:
                raise ValueError("the examples have another number of names")
        return cls(epoch=int(plain["epoch"]), number=int(plain["number"]), hashes=hashes)

    def to_json(self) -> dict[str, Any]:
        """Return the examples as JSON has them."""
        names = None
        if self.hashes is not None:
            names = base64.b64encode(self.hashes.astype("<u8").tobytes()).decode()
        return {"epoch": self.epoch, "number": self.number, "names": names}


def known_examples_of(request: DeviceRequest) -> KnownExamples | None:
    """Return what identifies the examples that the sampler is at; None if it was not noted."""
    plain = records.load_state(request.context, EXAMPLES)
    return None if plain is None else KnownExamples.from_json(plain)
