"""What the server knows of each device by name: seen when, asked for what, and why refused last.

It outlives connections, and with ``server.operations.history`` the server. Names are bounded, because without
TLS anybody may come under any: who was refused and never served is forgotten first, and beyond
``MOST_DEVICES`` a device is served but not noted, and counted.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from headwater.common.errors import (
    BytesUsedUp,
    ConnectionLost,
    HeadwaterError,
    OutsideUploadWindow,
    WorkingHours,
)
from headwater.common.transport.limits import NAME_PATTERN

if TYPE_CHECKING:  # torch comes with it, which status need not wait for
    from headwater.common.messages import Plan, Vitals

MAX_DEVICES = 10_000
MAX_REFUSED = 100
AWAY = {kind.__name__ for kind in (BytesUsedUp, OutsideUploadWindow, WorkingHours)}
MAX_REASON_CHARACTERS = 500  # characters of a refusal that are kept


@dataclass(kw_only=True, slots=True)
class DeviceRecord:
    """One device; times are seconds since 1970, and what is not known is not set."""

    name: str
    first_seen: float | None = None
    last_seen: float | None = None
    """Of a connected device: now."""
    is_connected: bool = False
    last_round: int | None = None
    accumulation_steps: int | None = None
    micro_batch_size: int | None = None
    quota: int | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    temperature_celsius: float | None = None
    battery: float | None = None
    is_on_battery: bool | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    refused_at: float | None = None
    refusal_code: str | None = None
    refusal_text: str | None = None

    def planned(self, plan: Plan) -> None:
        """Note what the device was asked for."""
        self.last_round = plan.round
        self.accumulation_steps = plan.accumulation_steps
        self.micro_batch_size, self.quota = plan.micro_batch_size, plan.quota

    def sensed(self, vitals: Vitals) -> None:
        """Note what its sensors say."""
        self.memory_limit_bytes = vitals.memory_limit_bytes
        self.temperature_celsius = vitals.temperature_celsius
        self.battery, self.is_on_battery = vitals.battery, vitals.is_on_battery

    @property
    def has_left(self) -> bool:
        """Whether it said why it is away, and has not come back since."""
        if self.refusal_code not in AWAY:
            return False
        return not self.is_connected or (self.refused_at or 0.0) >= (self.last_seen or 0.0)

    def refuse(self, error: HeadwaterError) -> None:
        """Note why it was refused; of one that has left, that it is gone is nothing new."""
        if isinstance(error, ConnectionLost) and self.has_left:
            return
        self.refused_at = time.time()
        self.refusal_code, self.refusal_text = error.code, str(error)[:MAX_REASON_CHARACTERS]


COLUMNS = tuple(column.name for column in fields(DeviceRecord))


class DeviceRecords:
    """The devices by name; any thread may note and read."""

    def __init__(self) -> None:
        self.num_not_noted = 0
        self._devices: dict[str, DeviceRecord] = {}
        self._strangers: dict[str, DeviceRecord] = {}
        self._awaited: dict[str, float] = {}
        self._lock = threading.Lock()

    def restore(self, known: Iterable[DeviceRecord]) -> None:
        """Take up what an earlier server knew."""
        with self._lock:
            for device in known:
                device.is_connected = False
                here = self._devices.setdefault(device.name, device)
                if here is not device:
                    here.first_seen = device.first_seen or here.first_seen
                    here.bytes_up += device.bytes_up
                    here.bytes_down += device.bytes_down

    def devices(self) -> list[DeviceRecord]:
        """Return all, those that were refused and never served last."""
        with self._lock:
            return [*self._devices.values(), *self._strangers.values()]

    def of(self, name: str) -> DeviceRecord:
        """Return the device that is served under a name."""
        with self._lock:
            return self._served(name)

    def _served(self, name: str) -> DeviceRecord:
        device = self._devices.get(name)
        if device is None:
            device = self._strangers.pop(name, None) or DeviceRecord(name=name)
            if len(self._devices) < MAX_DEVICES:
                self._devices[name] = device
        return device

    def connected(self, name: str) -> DeviceRecord:
        """Note that a device is here."""
        with self._lock:
            device = self._served(name)
            self.num_not_noted += name not in self._devices
        device.last_seen = time.time()
        device.first_seen = device.first_seen or device.last_seen
        device.is_connected = True
        return device

    def disconnected(self, device: DeviceRecord) -> None:
        """Note that it has gone."""
        device.last_seen, device.is_connected = time.time(), False

    def awaits(self, names: Iterable[str]) -> None:
        """Note that a round waits from now on for these devices, and for no others."""
        with self._lock:
            self._awaited = dict.fromkeys(names, time.monotonic())

    def answered(self, name: str) -> None:
        """Note that a device need not be waited for any more."""
        with self._lock:
            self._awaited.pop(name, None)

    def awaited(self) -> tuple[list[str], float]:
        """Return the names of those who are waited for, and for how many seconds."""
        with self._lock:
            since = min(self._awaited.values(), default=time.monotonic())
            return sorted(self._awaited), time.monotonic() - since

    def refuse(self, name: str, error: HeadwaterError) -> None:
        """Note why a device, or who came under its name, was refused; no name is none."""
        if not re.fullmatch(NAME_PATTERN, name):
            return
        with self._lock:
            device = self._devices.get(name) or self._stranger(name)
            device.refuse(error)

    def _stranger(self, name: str) -> DeviceRecord:
        device = self._strangers.pop(name, None) or DeviceRecord(name=name)
        while len(self._strangers) >= MAX_REFUSED:
            del self._strangers[next(iter(self._strangers))]  # the one that is longest ago
        self._strangers[name] = device
        return device
