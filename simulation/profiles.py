"""Which devices a simulated fleet has: drawn from five profiles, or as a TOML file says.

A drawn fleet depends on the run's seed and the device's number, with a spread of a quarter around
each figure, so that device 17 is the same machine on every engine. A file's devices have the very
figures that stand in it (``docs/fleet.md``).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from client.micro_batches import seed_of
from common.errors import SettingsError
from common.settings import Settings

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
    availability: tuple[float, ...] = (1.0,)
    on_battery: float = 0.0


def device_of(settings: Settings, part: int) -> SimulatedDevice:
    """Return the device of this number: from the fleet's file if there is one, else drawn."""
    path = settings.simulation.fleet
    return device(settings.seed, part) if path is None else read_fleet(path)[part]


@lru_cache(maxsize=100_000)
def device(run_seed: int, part: int) -> SimulatedDevice:
    """Draw the device of this number."""
    generator = np.random.default_rng(seed_of("fleet", run_seed, part))
    kind = PROFILES[generator.choice(len(PROFILES), p=[p.share for p in PROFILES])]
    spread = generator.uniform(0.8, 1.25, size=3)
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
        SettingsError: the file is wrong, another number of clients is set, or the engine cannot
            simulate what the file asks for.
    """
    chosen = settings.simulation
    if chosen.fleet is None:
        return settings
    devices = read_fleet(chosen.fleet)
    if "clients" in chosen.model_fields_set and chosen.clients != len(devices):
        raise SettingsError(
            f"{chosen.fleet} has {len(devices)} devices, and simulation.clients is set to "
            f"{chosen.clients}",
            remedy="leave --clients out, or change the counts in the file",
        )
    if chosen.engine == "flower-ray" and any(min(d.availability) < 1 for d in devices):
        raise SettingsError(
            f"{chosen.fleet} sets availability, which the engine flower-ray does not simulate",
            remedy="take --engine in-process, or a file without it",
        )
    simulation = chosen.model_copy(update={"clients": len(devices)})
    return settings.model_copy(update={"simulation": simulation})


def _trace(found: Any) -> tuple[float, ...]:
    """Turn a share of rounds, or a list of them, into a list.

    Raises:
        ValueError: saying which entry is wrong.
    """
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
    availability: Annotated[tuple[float, ...], BeforeValidator(_trace)] = (1.0,)
    on_battery: Annotated[float, Field(ge=0, le=1)] | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Annotated[tuple[DeviceTable, ...], Field(min_length=1)]


@lru_cache(maxsize=8)
def read_fleet(path: Path) -> tuple[SimulatedDevice, ...]:
    """Read a fleet's file, once a process: its devices in the order of the file.

    Raises:
        SettingsError: the file is not there, is not TOML, or has a wrong, missing or unknown key.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"cannot read the fleet file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not a TOML file: {error}") from error
    try:
        file = _File.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        given = "" if first["type"] == "missing" else f" (found {first['input']!r})"
        where = _place(first["loc"])
        raise _wrong(f"{path}: {where}: {first['msg'].lower()}{given}") from error
    num_devices = sum(told.count for told in file.device)
    if num_devices > LARGEST_FLEET:
        raise _wrong(f"{path}: count: {num_devices:,} devices in all, at most {LARGEST_FLEET:,}")
    return tuple(_devices(file, path))


def _devices(file: _File, path: Path) -> Iterator[SimulatedDevice]:
    profiles = {profile.name: profile for profile in PROFILES}
    for number, told in enumerate(file.device, 1):
        kind = None if told.profile is None else profiles[told.profile]
        own = ("examples_per_second", "memory_bytes", "upload_bytes_per_second")
        missing = [key for key in own if getattr(told, key) is None]
        if kind is None and missing:
            raise _wrong(
                f"{path}: device number {number}: expected a profile, or all of {', '.join(own)}; "
                f"found no {', '.join(missing)}"
            )
        base = SimulatedDevice(
            profile="own figures" if kind is None else kind.name,
            cores=1.0 if kind is None else kind.cores,
            relative_speed=1.0 if kind is None else kind.relative_speed,
            memory_bytes=0 if kind is None else kind.memory_bytes,
            upload_bytes_per_second=0.0 if kind is None else kind.upload_bytes_per_second,
            on_battery=0.0 if kind is None else kind.on_battery,
        )
        one = replace(base, **told.model_dump(exclude_none=True, exclude={"profile", "count"}))
        yield from [one] * told.count


def _wrong(message: str) -> SettingsError:
    return SettingsError(message, remedy="see docs/fleet.md for the file's keys and their ranges")


def _place(loc: tuple[int | str, ...]) -> str:
    """Name the table by its number from 1, as one counts them in the file."""
    if len(loc) < 2:
        return ".".join(map(str, loc))
    _, at, *keys = loc
    number = at + 1 if isinstance(at, int) else at
    return ": ".join([f"device number {number}", *map(str, keys)])
