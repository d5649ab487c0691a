"""The devices of a simulated fleet: drawn from five profiles, or listed in a TOML file.

A drawn device depends on the run's seed and its number, and varies by a quarter around its
profile's figures; so device 17 is the same on every engine. The devices of a file have exactly the
file's figures (``docs/fleet.md``). The file may list faults as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from headwater.client.training.sampler import seed_of
from headwater.common.data.data_paths import find_data
from headwater.common.run_scope import cached_in_scope
from headwater.simulation.fleet.faults import FleetFaults
from headwater.simulation.fleet.toml_tables import file_error, read_tables
from headwater.simulation.fleet.traces import ALWAYS, Availability, RoundShares, read_trace

MIB = 2**20
MAX_DEVICES, MAX_ENTRIES = 100_000, 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedDevice:
    """The figures of one device.

    ``relative_speed`` is relative to a laptop, ``memory_bytes`` is the client's memory limit, and
    ``on_battery`` the share of rounds in which the device runs on its battery. If
    ``examples_per_second`` or ``micro_batch_seconds`` is None, it follows from the relative speed
    and the model's size.
    """

    profile: str = "own figures"
    cores: float = 1.0
    relative_speed: float = 1.0
    memory_bytes: int
    upload_bytes_per_second: float
    examples_per_second: float | None = None
    micro_batch_seconds: float | None = None
    jitter: float = 0.0
    availability: Availability = ALWAYS
    on_battery: float = 0.0


PROFILES = (
    SimulatedDevice(profile="laptop", cores=8, relative_speed=1.0, memory_bytes=4096 * MIB,
                    upload_bytes_per_second=5e6, on_battery=0.2),
    SimulatedDevice(profile="pi5-8gb", cores=4, relative_speed=0.4, memory_bytes=2048 * MIB,
                    upload_bytes_per_second=2.5e6),
    SimulatedDevice(profile="pi4-4gb", cores=4, relative_speed=0.16, memory_bytes=1024 * MIB,
                    upload_bytes_per_second=2.5e6),
    SimulatedDevice(profile="pi4-2gb", cores=4, relative_speed=0.16, memory_bytes=512 * MIB,
                    upload_bytes_per_second=1.2e6),
    SimulatedDevice(profile="pi-zero2-512mb", cores=4, relative_speed=0.06, memory_bytes=360 * MIB,
                    upload_bytes_per_second=0.6e6),
)  # fmt: skip
EQUAL_DEVICE = replace(PROFILES[0], on_battery=0.0)
"""Each device of the fleet ``equal``: a laptop that is always plugged in."""
PROFILE_SHARES = (0.30, 0.20, 0.20, 0.20, 0.10)  # of a drawn fleet


@lru_cache(maxsize=100_000)
def draw_device(run_seed: int, part: int) -> SimulatedDevice:
    """Draw the device of this number."""
    generator = np.random.default_rng(seed_of("fleet", run_seed, part))
    profile = PROFILES[generator.choice(len(PROFILES), p=PROFILE_SHARES)]
    spread = generator.uniform(0.8, 1.25, size=3).tolist()  # arithmetic on numpy's scalars is slow
    return replace(
        profile,
        relative_speed=profile.relative_speed * spread[0],
        memory_bytes=int(profile.memory_bytes * spread[1]),
        upload_bytes_per_second=profile.upload_bytes_per_second * spread[2],
    )


def _entries(value: Any) -> tuple[float, ...] | str:
    """Return a probability, or a list of them, as a tuple; a trace's file name is returned as is.

    Raises:
        ValueError: an entry is wrong; the message says which.
    """
    if isinstance(value, str):
        return value
    entries = value if isinstance(value, list) else [value]
    if not 0 < len(entries) <= MAX_ENTRIES:
        raise ValueError(f"expected 1 to {MAX_ENTRIES:,} entries, found {len(entries):,}")
    for number, entry in enumerate(entries, 1):
        place = f"entry {number} " if isinstance(value, list) else ""
        if type(entry) not in (int, float) or not 0 <= entry <= 1:
            raise ValueError(f"{place}must be a number from 0 to 1")
    if max(entries) == 0:
        raise ValueError("the device is never available")
    return tuple(map(float, entries))


class DeviceTable(BaseModel):
    """A ``[[device]]`` table: a profile, own figures, or a profile with some figures replaced."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    profile: Literal["laptop", "pi5-8gb", "pi4-4gb", "pi4-2gb", "pi-zero2-512mb"] | None = None
    count: Annotated[int, Field(ge=1, le=MAX_DEVICES)] = 1
    examples_per_second: Annotated[float, Field(ge=1e-6, le=1e9)] | None = None
    memory_bytes: Annotated[int, Field(ge=1, le=2**53)] | None = None
    upload_bytes_per_second: Annotated[float, Field(ge=100, le=1e12)] | None = None
    micro_batch_seconds: Annotated[float, Field(ge=0, le=3600)] | None = None
    cores: Annotated[float, Field(gt=0, le=4096)] | None = None
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.0
    availability: Annotated[tuple[float, ...] | str, BeforeValidator(_entries)] = (1.0,)
    round_seconds: Annotated[float, Field(gt=0, le=30 * 86_400)] | None = None
    on_battery: Annotated[float, Field(ge=0, le=1)] | None = None
    data: Annotated[str, Field(min_length=1)] | None = None


class _FleetTables(FleetFaults):
    device: Annotated[tuple[DeviceTable, ...], Field(min_length=1)]


class FleetFile(NamedTuple):
    """A fleet's file: its devices in order, their faults, and their own data, if it has any."""

    devices: tuple[SimulatedDevice, ...]
    faults: FleetFaults
    data: tuple[str, ...]
    """A path for each device, or none at all."""


def read_fleet(path: Path) -> tuple[SimulatedDevice, ...]:
    """Return the devices of a fleet's file, in its order.

    Raises:
        SettingsError: the file, or a trace or data that it names, does not exist or is wrong.
    """
    return read_fleet_file(path).devices


@cached_in_scope(maxsize=8)
def read_fleet_file(path: Path) -> FleetFile:
    """Read a fleet's file, once in a run.

    Raises:
        SettingsError: see ``read_fleet``.
    """
    file = read_tables(path, _FleetTables, name="fleet file")
    found = tuple(_own_data(table, path, number) for number, table in enumerate(file.device, 1))
    tables = [
        table.model_copy(update={"count": len(data)}) if data else table
        for table, data in zip(file.device, found, strict=True)
    ]
    num_devices = sum(table.count for table in tables)
    if num_devices > MAX_DEVICES:
        raise file_error(path, f"count: {num_devices:,} devices in all, at most {MAX_DEVICES:,}")
    if any(found) and not all(found):
        number = found.index(()) + 1
        raise file_error(path, f"device number {number} has no data, and other devices have")
    faults = FleetFaults(
        dropout=file.dropout, slow_link=file.slow_link, absence=file.absence, liar=file.liar
    )
    return FleetFile(tuple(_devices(tables, path)), faults, tuple(chain.from_iterable(found)))


def _own_data(table: DeviceTable, path: Path, number: int) -> tuple[str, ...]:
    """Return the paths of a table's data, which start in the fleet file's folder."""
    if table.data is None:
        return ()
    source = f"{path}: device number {number}: data"
    found = find_data(table.data, source=source, folder=path.parent)
    if "count" in table.model_fields_set and table.count != len(found):
        raise file_error(
            path,
            f"device number {number}: {table.data} has {len(found)} matches, and count is "
            f"{table.count}; it may be left out",
        )
    return found


def _devices(tables: Sequence[DeviceTable], path: Path) -> Iterator[SimulatedDevice]:
    profiles = {one.profile: one for one in PROFILES}
    for number, table in enumerate(tables, 1):
        profile = None if table.profile is None else profiles[table.profile]
        required = ("examples_per_second", "memory_bytes", "upload_bytes_per_second")
        missing = [key for key in required if getattr(table, key) is None]
        if profile is None and missing:
            raise file_error(
                path,
                f"device number {number}: expected a profile, or all of {', '.join(required)}; "
                f"found no {', '.join(missing)}",
            )
        base = profile or SimulatedDevice(memory_bytes=0, upload_bytes_per_second=0.0)
        device = replace(base, **table.model_dump(exclude_none=True, exclude=TABLE_ONLY_KEYS))
        for availability in _availability(table, path, number):
            yield replace(device, availability=availability)


TABLE_ONLY_KEYS = {"profile", "count", "availability", "round_seconds", "data"}


def _availability(table: DeviceTable, path: Path, number: int) -> tuple[Availability, ...]:
    """Return the availability of each device of a table; a trace is in the fleet file's folder."""
    if isinstance(table.availability, str):
        trace = path.parent / table.availability
        return read_trace(trace, num_devices=table.count, round_seconds=table.round_seconds)
    if table.round_seconds is not None:
        message = f"device number {number}: round_seconds is set without a trace in seconds"
        raise file_error(path, message)
    return (RoundShares(table.availability),) * table.count
