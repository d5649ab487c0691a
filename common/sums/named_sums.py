"""The sums of a round beside the model's: each has a name, a length, and what divides it.

A plan's terms declare them (``Terms.sums``), each device adds a float32 vector of that length to
its update, and the server adds these up as it does the model's: exactly, in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwater.common.errors import CorruptUpdate, NonFiniteUpdate, OutlierUpdate
from headwater.common.model.vectors import all_finite
from headwater.common.terms import SumOf, Terms

MAX_VALUES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedSums:
    """The sums that a plan asks for, in the order in which they are sent."""

    of: Mapping[str, SumOf]

    @property
    def num_bytes(self) -> int:
        """The bytes of all of them in one update."""
        return 4 * sum(one.length for one in self.of.values())

    def joined(self, sums: Mapping[str, Tensor], *, name: str) -> bytes:
        """Return a device's sums as they are sent.

        Raises:
            CorruptUpdate: see ``flat``.
            NonFiniteUpdate, OutlierUpdate: one is not finite, or beyond its limit.
        """
        values, start = self.flat(sums, name=name), 0
        for key, asked in self.of.items():
            _check(values[start : start + asked.length], asked, key=key, name=name)
            start += asked.length
        return values.numpy().tobytes()

    def flat(self, sums: Mapping[str, Tensor], *, name: str) -> Tensor:
        """Return a device's sums one after the other, in float32.

        Raises:
            CorruptUpdate: one is missing, or has another length.
        """
        if sums.keys() != self.of.keys():
            raise CorruptUpdate(
                f"{name}: the plan asks for the sums {', '.join(self.of)}, found "
                f"{', '.join(sums) or 'none'}",
                remedy="set self.sums in the feature's Device, one tensor for each name",
            )
        parts = []
        for key, asked in self.of.items():
            values = sums[key].detach().to(torch.float32).reshape(-1)
            if values.numel() != asked.length:
                raise CorruptUpdate(
                    f"{name}: the sum {key} has {values.numel():,} values, the plan asks for "
                    f"{asked.length:,}"
                )
            parts.append(values)
        return torch.cat(parts) if parts else torch.zeros(0)

    def read(self, memory: memoryview, *, name: str) -> dict[str, Tensor]:
        """Return a device's sums from what it sent.

        Raises:
            CorruptUpdate: it has another length.
            NonFiniteUpdate: one is not finite.
        """
        if len(memory) != self.num_bytes:
            raise CorruptUpdate(
                f"{name}: the sums beside the model's have {len(memory):,} bytes, expected "
                f"{self.num_bytes:,}"
            )
        found, start = {}, 0
        for key, asked in self.of.items():
            part = np.frombuffer(memory[start : start + 4 * asked.length], dtype=np.float32)
            found[key] = torch.from_numpy(part.copy())
            start += 4 * asked.length
            _check(found[key], asked, key=key, name=name)
        return found


def _check(values: Tensor, asked: SumOf, *, key: str, name: str) -> None:
    """Check one sum of one update.

    Raises:
        NonFiniteUpdate: it is not finite.
        OutlierUpdate: it is beyond its limit, or below its least value.
    """
    if not all_finite(values):
        raise NonFiniteUpdate(f"{name}: the sum {key} is not finite")
    largest = float(values.abs().max())
    if largest > asked.limit:
        raise OutlierUpdate(
            f"{name}: the sum {key} has a value of {largest:.4g}, its limit is {asked.limit:g}",
            remedy="set limit in the SumOf of the feature's Terms, on both sides",
        )
    if asked.least is not None and (found := float(values.min())) < asked.least:
        raise OutlierUpdate(
            f"{name}: the sum {key} has a value of {found:.4g}, its least is {asked.least:g}"
        )


def named_sums(terms: Iterable[Terms], num_values: int) -> NamedSums:
    """Return what the terms of a plan ask for, for a model of so many parameters.

    Raises:
        CorruptUpdate: two features name the same sum, or one is longer than 2^30.
    """
    of: dict[str, SumOf] = {}
    for one in terms:
        for key, asked in one.sums(num_values).items():
            if key in of or not 0 < asked.length <= MAX_VALUES:
                raise CorruptUpdate(f"the sum {key!r} is asked for twice, or has no length")
            of[key] = asked
    return NamedSums(of=of)
