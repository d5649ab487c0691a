"""The names of the simulated devices and the data that each opens, the same on every engine.

Without ``--data`` the devices are named 0 to N-1, and the task or a partition gives each its part.
With it each device has a file or folder of its own, and opens it as a real device does: as part 0
of 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from headwater.client.training.context import Identity
from headwater.common.data.partition_spec import PartitionRule
from headwater.common.settings.schema import Settings


@dataclass(frozen=True, kw_only=True)
class Identities:
    """Name and data of each of N devices, by the device's number from 0."""

    num_devices: int
    rule: PartitionRule | None
    """Partitions one data set over all devices; None if the task or ``data`` does."""
    data: tuple[str, ...]
    """Each device's own path; with a partition the path of the one data set; empty without data."""

    @cached_property
    def _names(self) -> tuple[str, ...]:
        from headwater.simulation.fleet.device_data import device_names

        return device_names(self.data)

    @cached_property
    def _parts(self) -> dict[str, int]:
        return {name: part for part, name in enumerate(self._names)}

    @property
    def has_own_data(self) -> bool:
        """Whether each device has a file or folder of its own."""
        return bool(self.data) and self.rule is None

    def name(self, part: int) -> str:
        """Return a device's name."""
        return self._names[part] if self.has_own_data else str(part)

    def part(self, name: str) -> int:
        """Return a device's number.

        Raises:
            KeyError, ValueError: no device has this name.
        """
        return next(self.parts([name]))

    def parts(self, names: Iterable[str]) -> Iterator[int]:
        """Yield each device's number; see ``part``."""
        return map(self._parts.__getitem__ if self.has_own_data else int, names)

    def of(self, part: int) -> Identity:
        """Return the identity with which a device opens its examples."""
        if self.has_own_data:
            return Identity(name=self._names[part], data=Path(self.data[part]), part=0, num_parts=1)
        return Identity(
            name=str(part),
            data=Path(self.data[0]) if self.data else None,
            part=part,
            num_parts=self.num_devices,
            rule=self.rule,
        )

    def node_config(self, part: int) -> dict[str, str | int]:
        """Return a device's entries in the configuration of its Flower node."""
        identity = self.of(part)
        config: dict[str, str | int] = {
            "name": identity.name,
            "partition-id": identity.part,
            "num-partitions": identity.num_parts,
        }
        return config if identity.data is None else config | {"data": str(identity.data)}


def identities_of(settings: Settings) -> Identities:
    """Return the devices of settings that ``with_fleet`` has returned."""
    data = settings.simulation.data or ()
    return _identities(
        settings.simulation.clients,
        settings.partition.rule(seed=settings.seed),
        (data,) if isinstance(data, str) else data,
    )


@lru_cache(maxsize=8)
def _identities(num_devices: int, rule: PartitionRule | None, data: tuple[str, ...]) -> Identities:
    return Identities(num_devices=num_devices, rule=rule, data=data)
