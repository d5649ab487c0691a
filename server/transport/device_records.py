"""Records of each device by name: when it was connected, its last plan, and its last refusal.

Records outlive connections; ``server.operations.run_history`` keeps them across restarts of the
server. Their number is bounded, because without TLS anybody can connect under any name: devices
that were refused and never served are forgotten first. Beyond ``MAX_DEVICES`` a device is served
but not recorded, and counted.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from headwater.common.errors import (
    BytesUsedUp,
    ConnectionLost,
    HeadwaterError,
    OutsideActiveHours,
)
from headwater.common.transport.limits import NAME_PATTERN
from headwater.common.wording import natural

if TYPE_CHECKING:  # these import torch, and `headwater-server status` starts without it
    from headwater.common.messages import Plan, Vitals

Stage = Literal["planned", "computing", "uploading"]
"""Where a device is with its plan: it is on its way, is carried out, or the vector arrives."""
Stages = dict[str, Stage]
"""Of devices by name."""

MAX_DEVICES = 10_000
MAX_REFUSED = 100
LEAVING_CODES = {kind.__name__ for kind in (BytesUsedUp, OutsideActiveHours)}
MAX_REASON_CHARACTERS = 500


@dataclass(kw_only=True, slots=True)
class DeviceRecord:
    """One device; times are seconds since 1970, and unknown values are None."""

    name: str
    first_seen: float | None = None
    last_seen: float | None = None
    """When it last connected or disconnected; readers count a connected device as seen now."""
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
    task: str | None = None
    """The name and the code of the task that it trains, as it says."""
    labels: str | None = None
    version: str | None = None
    """Of headwater, as the device says; None before it said so."""

    def note_plan(self, plan: Plan) -> None:
        """Record the device's plan."""
        self.last_round = plan.round
        self.accumulation_steps = plan.accumulation_steps
        self.micro_batch_size, self.quota = plan.micro_batch_size, plan.quota

    def note_vitals(self, vitals: Vitals) -> None:
        """Record the device's memory limit, temperature and battery."""
        self.memory_limit_bytes = vitals.memory_limit_bytes
        self.temperature_celsius = vitals.temperature_celsius
        self.battery, self.is_on_battery = vitals.battery, vitals.is_on_battery

    @property
    def has_left(self) -> bool:
        """Whether the device said why it leaves and has not returned since."""
        if self.refusal_code not in LEAVING_CODES:
            return False
        return not self.is_connected or (self.refused_at or 0.0) >= (self.last_seen or 0.0)

    def note_refusal(self, error: HeadwaterError) -> None:
        """Record a refusal; the loss of its connection does not replace the reason for leaving."""
        if isinstance(error, ConnectionLost) and self.has_left:
            return
        self.refused_at = time.time()
        self.refusal_code, self.refusal_text = error.code, str(error)[:MAX_REASON_CHARACTERS]


COLUMNS = tuple(column.name for column in fields(DeviceRecord))


class DeviceRecords:
    """The records by device name; safe to read and write from any thread."""

    def __init__(self) -> None:
        self.num_unrecorded = 0
        """Connections of devices beyond ``MAX_DEVICES``."""
        self._devices: dict[str, DeviceRecord] = {}
        self._refused: dict[str, DeviceRecord] = {}
        self._awaited: dict[str, float] = {}
        self._num_steps: dict[str, int] = {}
        self._lock = threading.Lock()

    def restore(self, earlier: Iterable[DeviceRecord]) -> None:
        """Merge the records of an earlier server."""
        with self._lock:
            for device in earlier:
                device.is_connected = False
                known = self._devices.setdefault(device.name, device)
                if known is not device:
                    known.first_seen = device.first_seen or known.first_seen
                    known.bytes_up += device.bytes_up
                    known.bytes_down += device.bytes_down

    def devices(self) -> list[DeviceRecord]:
        """Return all records; devices that were refused and never served come last."""
        with self._lock:
            return [*self._devices.values(), *self._refused.values()]

    def get(self, name: str) -> DeviceRecord:
        """Return the record of a device that is served; it is made if there is none."""
        with self._lock:
            return self._served(name)

    def _served(self, name: str) -> DeviceRecord:
        device = self._devices.get(name)
        if device is None:
            device = self._refused.pop(name, None) or DeviceRecord(name=name)
            if len(self._devices) < MAX_DEVICES:
                self._devices[name] = device
        return device

    def note_connected(self, name: str) -> DeviceRecord:
        """Record that a device has connected; return its record."""
        with self._lock:
            device = self._served(name)
            self.num_unrecorded += name not in self._devices
        device.last_seen = time.time()
        device.first_seen = device.first_seen or device.last_seen
        device.is_connected = True
        return device

    def note_disconnected(self, device: DeviceRecord) -> None:
        """Record that a device has disconnected."""
        device.last_seen, device.is_connected = time.time(), False

    def set_awaited(self, names: Iterable[str]) -> None:
        """Record that a round waits for exactly these devices from now on."""
        with self._lock:
            self._awaited = dict.fromkeys(names, time.monotonic())
            self._num_steps = {}

    def note_answer(self, name: str) -> None:
        """Record that the round waits for this device no longer."""
        with self._lock:
            self._awaited.pop(name, None)

    def note_steps(self, name: str, num_steps: int) -> None:
        """Record the micro-batches that an awaited device has done of its plan, by its own word."""
        with self._lock:
            if name in self._awaited:
                self._num_steps[name] = num_steps

    def steps_done(self) -> dict[str, int]:
        """Return the micro-batches that devices have told, of the plans in progress."""
        with self._lock:
            return {name: n for name, n in self._num_steps.items() if name in self._awaited}

    def awaited(self) -> tuple[list[str], float]:
        """Return the names of the awaited devices, and how many seconds the round has waited."""
        with self._lock:
            since = min(self._awaited.values(), default=time.monotonic())
            return sorted(self._awaited, key=natural), time.monotonic() - since

    def note_refusal(self, name: str, error: HeadwaterError) -> None:
        """Record the refusal of a stream under this name; an invalid name is ignored."""
        if not re.fullmatch(NAME_PATTERN, name):
            return
        with self._lock:
            (self._devices.get(name) or self._never_served(name)).note_refusal(error)

    def _never_served(self, name: str) -> DeviceRecord:
        device = self._refused.pop(name, None) or DeviceRecord(name=name)
        while len(self._refused) >= MAX_REFUSED:
            del self._refused[next(iter(self._refused))]  # the oldest refusal
        self._refused[name] = device
        return device
