"""The names of the simulated devices and the data that each opens, the same on every engine.

Without ``--data`` the devices are named 0 to N-1, and the task or a partition gives each its part.
With it each device has a file or folder of its own, and opens it as a real device does: as part 0
of 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from headwater.client.training.context import Identity
from headwater.common.data.partition_spec import PartitionRule
from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings
from headwater.common.user_code.bundled_examples import existing_or_bundled
from headwater.common.user_code.run_scope import cached_in_scope

EQUAL = Path("equal")
"""The word for a fleet of equal devices, in place of a file."""
MAX_NAME = 100  # characters; the wire allows 128, and a state file's name holds more than this one


@dataclass(frozen=True, kw_only=True)
class Identities:
    """Name and data of each of N devices, by the device's number from 0."""

    num_devices: int
    rule: PartitionRule | None
    """Partitions one data set over all devices; None if the task or ``data`` does."""
    data: tuple[str, ...]
    """Each device's own path; with a partition the path of the one data set; empty without data."""
    labels: tuple[str | None, ...] = ()
    """Of each device of a fleet's file; empty without one."""

    @cached_property
    def _names(self) -> tuple[str, ...]:
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
        labels = self.labels[part] if self.labels else None
        if self.has_own_data:
            return Identity(
                name=self._names[part],
                data=Path(self.data[part]),
                part=0,
                num_parts=1,
                labels=labels,
            )
        return Identity(
            name=str(part),
            labels=labels,
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
        if identity.labels is not None:
            config["labels"] = identity.labels
        return config if identity.data is None else config | {"data": str(identity.data)}


def identities_of(settings: Settings) -> Identities:
    """Return the devices of settings that ``with_fleet`` has returned."""
    data = settings.simulation.data or ()
    return _identities(
        settings.simulation.clients,
        settings.partition.rule(seed=settings.seed),
        (data,) if isinstance(data, str) else data,
        () if settings.simulation.fleet is None else _labels(settings.simulation.fleet),
    )


@cached_in_scope(maxsize=8)
def _labels(fleet: Path) -> tuple[str | None, ...]:
    """Return the labels of the devices of a fleet's file; none at all if no device has some."""
    from headwater.simulation.fleet.fleet_file import read_fleet_file

    if fleet == EQUAL and not EQUAL.is_file():
        return ()
    found = tuple(device.labels for device in read_fleet_file(existing_or_bundled(fleet)).devices)
    return found if any(found) else ()


@lru_cache(maxsize=8)
def _identities(
    num_devices: int,
    rule: PartitionRule | None,
    data: tuple[str, ...],
    labels: tuple[str | None, ...],
) -> Identities:
    return Identities(num_devices=num_devices, rule=rule, data=data, labels=labels)


def device_names(paths: Sequence[str]) -> tuple[str, ...]:
    """Return a name for each device: its file's name without the suffix, or its folder's name.

    If all files have the same name, as in ``devices/*/data.csv``, it is the name of the last folder
    in which they differ. Letters that a device's name cannot have become ``-``.

    Raises:
        SettingsError: two names are the same.
    """
    steps = [_steps(Path(path)) for path in paths]
    place = 1
    shortest = min(map(len, steps))
    while place < shortest and len({step[-place] for step in steps}) == 1 < len(steps):
        place += 1
    names = tuple(_valid(step[-place]) or f"device-{number}" for number, step in enumerate(steps))
    by_name: dict[str, str] = {}
    for name, path in zip(names, paths, strict=True):
        if name in by_name:
            raise SettingsError(
                f"{by_name[name]} and {path} would both be the data of a device named {name}",
                remedy="rename one of them, or use a pattern that matches one file or folder a "
                "device",
            )
        by_name[name] = path
    return names


def _steps(path: Path) -> tuple[str, ...]:
    return (*path.parts[:-1], path.name if path.is_dir() else path.stem)


def _valid(text: str) -> str:
    return re.sub(r"^[^A-Za-z0-9]+", "", re.sub(r"[^A-Za-z0-9._-]+", "-", text))[:MAX_NAME]
