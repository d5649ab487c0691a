"""The devices of a simulated fleet as a TOML file lists them, with their faults and own data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from headwater.common.data.data_paths import find_data
from headwater.common.settings.fields import OwnLabels
from headwater.common.user_code.run_scope import cached_in_scope
from headwater.simulation.fleet.faults import FleetFaults
from headwater.simulation.fleet.profiles import PROFILES, SimulatedDevice
from headwater.simulation.fleet.toml_tables import file_error, read_tables
from headwater.simulation.fleet.traces import Availability, RoundShares, read_trace

MAX_DEVICES, MAX_ENTRIES = 100_000, 10_000


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
    labels: OwnLabels | None = None


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
