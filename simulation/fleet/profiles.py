"""Which devices a simulated fleet has: drawn from five profiles, or as a TOML file says.

A drawn fleet depends on the run's seed and the device's number, with a spread of a quarter around
each figure, so that device 17 is the same machine on every engine. A file's devices have the very
figures that stand in it (``docs/fleet.md``). What goes wrong in it may stand there as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from headwater.client.training.micro_batches import seed_of
from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings
from headwater.simulation.fleet.faults import (
    EVALUATE,
    NO_FAULTS,
    TRAIN,
    FleetFaults,
    Moment,
    read_faults,
)
from headwater.simulation.fleet.toml_tables import read_tables, wrong
from headwater.simulation.fleet.traces import ALWAYS, Availability, Shares, read_trace

MIB = 2**20
LARGEST_FLEET, LONGEST_TRACE = 100_000, 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One kind of device.

    Speeds are relative to a laptop's, memory is what the client may use, ``on_battery`` the share
    of rounds in which a device that has a battery runs on it.
    """

    name: str
    share: float
    cores: float
    relative_speed: float
    memory_bytes: int
    upload_bytes_per_second: float
    on_battery: float = 0.0


PROFILES = (
    Profile(name="laptop", share=0.30, cores=8, relative_speed=1.0, memory_bytes=4096 * MIB,
            upload_bytes_per_second=5e6, on_battery=0.2),
    Profile(name="pi5-8gb", share=0.20, cores=4, relative_speed=0.4, memory_bytes=2048 * MIB,
            upload_bytes_per_second=2.5e6),
    Profile(name="pi4-4gb", share=0.20, cores=4, relative_speed=0.16, memory_bytes=1024 * MIB,
            upload_bytes_per_second=2.5e6),
    Profile(name="pi4-2gb", share=0.20, cores=4, relative_speed=0.16, memory_bytes=512 * MIB,
            upload_bytes_per_second=1.2e6),
    Profile(name="pi-zero2-512mb", share=0.10, cores=4, relative_speed=0.06,
            memory_bytes=360 * MIB, upload_bytes_per_second=0.6e6),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedDevice:
    """One device's figures.

    Where ``examples_per_second`` or ``micro_batch_seconds`` is None, it follows from the relative
    speed and the model's size.
    """

    profile: str
    cores: float
    relative_speed: float
    memory_bytes: int
    upload_bytes_per_second: float
    examples_per_second: float | None = None
    micro_batch_seconds: float | None = None
    jitter: float = 0.0
    availability: Availability = ALWAYS
    on_battery: float = 0.0


def device_of(settings: Settings, part: int) -> SimulatedDevice:
    """Return the device of this number: from the fleet's file if there is one, else drawn."""
    path = settings.simulation.fleet
    return device(settings.seed, part) if path is None else read_fleet(path)[part]


def faults_of(settings: Settings) -> FleetFaults:
    """Return what goes wrong in a run: by the fleet's file, and by the faults' own."""
    chosen, found = settings.simulation, NO_FAULTS
    if chosen.fleet is not None:
        found = read_fleet_file(chosen.fleet)[1]
    return found if chosen.faults is None else found + read_faults(chosen.faults)


def moment_of(settings: Settings, part: int, *, round_number: int) -> Moment:
    """Return what a device's faults depend on in a round; the settings are ``with_fleet``'s."""
    return Moment(
        seed=settings.seed,
        num_devices=settings.simulation.clients,
        part=part,
        round=round_number,
    )


@lru_cache(maxsize=100_000)
def device(run_seed: int, part: int) -> SimulatedDevice:
    """Draw the device of this number."""
    generator = np.random.default_rng(seed_of("fleet", run_seed, part))
    kind = PROFILES[generator.choice(len(PROFILES), p=[p.share for p in PROFILES])]
    spread = generator.uniform(0.8, 1.25, size=3).tolist()  # numpy's numbers are slow to count with
    return SimulatedDevice(
        profile=kind.name,
        cores=kind.cores,
        relative_speed=kind.relative_speed * spread[0],
        memory_bytes=int(kind.memory_bytes * spread[1]),
        upload_bytes_per_second=kind.upload_bytes_per_second * spread[2],
        on_battery=kind.on_battery,
    )


def with_fleet(settings: Settings) -> Settings:
    """Return the settings with as many clients as the fleet's file has devices, if there is one.

    Raises:
        SettingsError: a file is wrong, another number of clients is set, a fault strikes nobody, or
            the engine cannot simulate what a file asks for.
    """
    chosen = settings.simulation
    if chosen.fleet is not None:
        devices = read_fleet(chosen.fleet)
        if "clients" in chosen.model_fields_set and chosen.clients != len(devices):
            raise SettingsError(
                f"{chosen.fleet} has {len(devices)} devices, and simulation.clients is set to "
                f"{chosen.clients}",
                remedy="leave --clients out, or change the counts in the file",
            )
        if not all(one.availability.is_always for one in devices):
            _check_engine(settings, f"{chosen.fleet} sets availability")
        chosen = chosen.model_copy(update={"clients": len(devices)})
        settings = settings.model_copy(update={"simulation": chosen})
    _check_faults(settings)
    return settings


def _check_engine(settings: Settings, what: str) -> None:
    engine = settings.simulation.engine
    if engine == "flower-ray":
        raise SettingsError(
            f"{what}, which the engine {engine} does not simulate",
            remedy="take --engine in-process or grpc, or a file without it",
        )


def _check_faults(settings: Settings) -> None:
    """Refuse faults that could strike nobody, or nobody on this engine.

    Raises:
        SettingsError: a device that is not there, a phase that no round of this run has, or a fault
            that the engine does not simulate.
    """
    faults = faults_of(settings)
    num_devices = settings.simulation.clients
    for fault in faults.all:
        strange = [part for part in fault.devices or () if part >= num_devices]
        if strange:
            raise SettingsError(
                f"a fault names device {strange[0]}, and there are {num_devices}, 0 to "
                f"{num_devices - 1}",
                remedy="name devices that there are, or a share of them",
            )
    for dropout in faults.dropout:
        is_secure = dropout.phase not in (TRAIN, EVALUATE)
        if is_secure and settings.secure.aggregation == "off":
            raise SettingsError(
                f"a dropout at {dropout.phase}, a phase of secure aggregation, which is off",
                remedy="set --secure-aggregation, or take the phase train",
            )
        if dropout.phase == EVALUATE and not settings.evaluation.on_devices:
            raise SettingsError(
                "a dropout at evaluate, and nothing is evaluated on devices",
                remedy="set --evaluate-on-devices, or take the phase train",
            )
    if faults.liar:
        _check_engine(settings, "there are liars")


def _entries(found: Any) -> tuple[float, ...] | str:
    """Turn a share of rounds, or a list of them, into a list; the name of a trace stays a name.

    Raises:
        ValueError: saying which entry is wrong.
    """
    if isinstance(found, str):
        return found
    entries = found if isinstance(found, list) else [found]
    if not 0 < len(entries) <= LONGEST_TRACE:
        raise ValueError(f"expected 1 to {LONGEST_TRACE:,} entries, found {len(entries):,}")
    for number, entry in enumerate(entries, 1):
        where = f"entry {number} " if isinstance(found, list) else ""
        if type(entry) not in (int, float) or not 0 <= entry <= 1:
            raise ValueError(f"{where}must be a number from 0 to 1")
    if max(entries) == 0:
        raise ValueError("the device is never there")
    return tuple(map(float, entries))


class DeviceTable(BaseModel):
    """A ``[[device]]`` table: a profile, or figures of its own, or both."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    profile: Literal["laptop", "pi5-8gb", "pi4-4gb", "pi4-2gb", "pi-zero2-512mb"] | None = None
    count: Annotated[int, Field(ge=1, le=LARGEST_FLEET)] = 1
    examples_per_second: Annotated[float, Field(ge=1e-6, le=1e9)] | None = None
    memory_bytes: Annotated[int, Field(ge=1, le=2**53)] | None = None
    upload_bytes_per_second: Annotated[float, Field(ge=100, le=1e12)] | None = None
    micro_batch_seconds: Annotated[float, Field(ge=0, le=3600)] | None = None
    cores: Annotated[float, Field(gt=0, le=4096)] | None = None
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.0
    availability: Annotated[tuple[float, ...] | str, BeforeValidator(_entries)] = (1.0,)
    round_seconds: Annotated[float, Field(gt=0, le=30 * 86_400)] | None = None
    on_battery: Annotated[float, Field(ge=0, le=1)] | None = None


class _File(FleetFaults):
    device: Annotated[tuple[DeviceTable, ...], Field(min_length=1)]


def read_fleet(path: Path) -> tuple[SimulatedDevice, ...]:
    """Return the devices of a fleet's file, in its order.

    Raises:
        SettingsError: the file or a trace that it names is not there, or is wrong.
    """
    return read_fleet_file(path)[0]


@lru_cache(maxsize=8)
def read_fleet_file(path: Path) -> tuple[tuple[SimulatedDevice, ...], FleetFaults]:
    """Read a fleet's file, once a process: its devices, and what goes wrong with them.

    Raises:
        SettingsError: see ``read_fleet``.
    """
    file = read_tables(path, _File, what="fleet file")
    num_devices = sum(told.count for told in file.device)
    if num_devices > LARGEST_FLEET:
        raise wrong(path, f"count: {num_devices:,} devices in all, at most {LARGEST_FLEET:,}")
    faults = FleetFaults(dropout=file.dropout, slow_link=file.slow_link, liar=file.liar)
    return tuple(_devices(file, path)), faults


def _devices(file: _File, path: Path) -> Iterator[SimulatedDevice]:
    profiles = {profile.name: profile for profile in PROFILES}
    for number, told in enumerate(file.device, 1):
        kind = None if told.profile is None else profiles[told.profile]
        own = ("examples_per_second", "memory_bytes", "upload_bytes_per_second")
        missing = [key for key in own if getattr(told, key) is None]
        if kind is None and missing:
            raise wrong(
                path,
                f"device number {number}: expected a profile, or all of {', '.join(own)}; "
                f"found no {', '.join(missing)}",
            )
        base = SimulatedDevice(
            profile="own figures" if kind is None else kind.name,
            cores=1.0 if kind is None else kind.cores,
            relative_speed=1.0 if kind is None else kind.relative_speed,
            memory_bytes=0 if kind is None else kind.memory_bytes,
            upload_bytes_per_second=0.0 if kind is None else kind.upload_bytes_per_second,
            on_battery=0.0 if kind is None else kind.on_battery,
        )
        one = replace(base, **told.model_dump(exclude_none=True, exclude=NOT_OF_A_DEVICE))
        for availability in _availability(told, path, number):
            yield replace(one, availability=availability)


NOT_OF_A_DEVICE = {"profile", "count", "availability", "round_seconds"}


def _availability(told: DeviceTable, path: Path, number: int) -> tuple[Availability, ...]:
    """Return when each device of a table is there; a trace lies beside the fleet's file."""
    if isinstance(told.availability, str):
        trace = path.parent / told.availability
        return read_trace(trace, num_devices=told.count, round_seconds=told.round_seconds)
    if told.round_seconds is not None:
        raise wrong(path, f"device number {number}: round_seconds, and no trace that is in seconds")
    return (Shares(told.availability),) * told.count
