"""The record of when each device's update was in an opened sum, and which devices are due again.

The privacy of correlated noise rests on it: any two sums with one device are at least as many
rounds apart as the noise has bands. Each name counts as one device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Participation:
    """The number of sums so far, and of each device its last one and how many it was in."""

    num_sums: int = 0
    last: Mapping[str, int] = field(default_factory=dict)
    times: Mapping[str, int] = field(default_factory=dict)

    @property
    def most_times(self) -> int:
        """The sums that the device in most sums was in."""
        return max(self.times.values(), default=0)

    def is_early(self, name: str, *, bands: int) -> bool:
        """Whether the next sum would be fewer than ``bands`` after one with this device."""
        last = self.last.get(name)
        return last is not None and self.num_sums + 1 - last < bands

    def due(self, names: Collection[str], *, bands: int, most: int | None, seed: int) -> list[str]:
        """Return the devices that may be in the next sum, those that were in the fewest first.

        Devices that were in ``most`` sums may be in no more. Among equals a seed decides.
        """
        times = self.times
        able = [
            name
            for name in names
            if not self.is_early(name, bands=bands) and (most is None or times.get(name, 0) < most)
        ]
        able.sort(key=lambda name: (times.get(name, 0), _digest(seed, times.get(name, 0), name)))
        return able

    def after(self, names: Collection[str]) -> Participation:
        """Return the record after one more sum, of these devices."""
        number = self.num_sums + 1
        return replace(
            self,
            num_sums=number,
            last={**self.last, **dict.fromkeys(names, number)},
            times={**self.times, **{name: self.times.get(name, 0) + 1 for name in names}},
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        rows = {name: [self.last[name], self.times[name]] for name in self.last}
        return {"num_sums": self.num_sums, "devices": rows}

    @staticmethod
    def of_json(row: Mapping[str, Any]) -> Participation:
        """Return the record that ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is another.
        """
        rows = row["devices"].items()
        return Participation(
            num_sums=int(row["num_sums"]),
            last={str(name): int(last) for name, (last, _) in rows},
            times={str(name): int(times) for name, (_, times) in rows},
        )


def _digest(seed: int, lap: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}\x1f{lap}\x1f{name}".encode()).digest()
