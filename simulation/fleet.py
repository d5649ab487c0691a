"""The simulated fleet: which device has which speed, memory and link.

Devices are drawn from five profiles by the run's seed and the device's number, with a spread of a
quarter around each figure, so that device 17 is the same machine on every engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from client.device import WORKING_FACTOR, Hardware, Speed, activation_bytes
from client.micro_batches import seed_of
from client.resident import Identity
from client.workplace import Clock, Workplace
from common.parameters import ModelLayout
from common.settings import Settings

MIB = 2**20
# What Python, torch and this client hold before any model: about 250 MB on amd64 and arm64.
IDLE_BYTES = 250 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One kind of device. Speeds are relative to a laptop's; memory is what the client may use."""

    name: str
    share: float
    cores: float
    relative_speed: float
    memory_bytes: int
    upload_bytes_per_second: float


PROFILES = (
    Profile(name="laptop", share=0.30, cores=8, relative_speed=1.0, memory_bytes=4096 * MIB,
            upload_bytes_per_second=5e6),
    Profile(name="pi5-8gb", share=0.20, cores=4, relative_speed=0.4, memory_bytes=2048 * MIB,
            upload_bytes_per_second=2.5e6),
    Profile(name="pi4-4gb", share=0.20, cores=4, relative_speed=0.16, memory_bytes=1024 * MIB,
            upload_bytes_per_second=2.5e6),
    Profile(name="pi4-2gb", share=0.20, cores=4, relative_speed=0.16, memory_bytes=512 * MIB,
            upload_bytes_per_second=1.2e6),
    Profile(name="pi-zero2-512mb", share=0.10, cores=4, relative_speed=0.06,
            memory_bytes=300 * MIB, upload_bytes_per_second=0.6e6),
)  # fmt: skip

# A laptop's seconds per example on a model of P parameters: 6 P operations at 5e9 a second, and
# the dispatch of some fifty operators per micro-batch.
OPERATIONS_PER_PARAMETER = 6
OPERATIONS_PER_SECOND = 5e9
DISPATCH_SECONDS = 4e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedDevice:
    """A profile with its own spread."""

    profile: str
    cores: float
    relative_speed: float
    memory_bytes: int
    upload_bytes_per_second: float


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
    )


class VirtualClock:
    """Seconds that pass only when a micro-batch is done."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self._seconds = 0.0
        self._transfer_seconds = speed.overhead_seconds

    def seconds(self) -> float:
        """Return the time; the model and the update travel behind the first look at the clock.

        So a round's seconds hold the transfer, as they do for the server, and a step's do not.
        """
        now = self._seconds
        self._seconds += self._transfer_seconds
        self._transfer_seconds = 0.0
        return now

    def worked(self, num_examples: int) -> None:
        self._seconds += (
            self._speed.seconds_per_micro_batch + num_examples * self._speed.seconds_per_example
        )


class SimulatedMachine:
    """A device's hardware under a virtual clock."""

    def __init__(self, device: SimulatedDevice, num_parameters: int) -> None:
        self._device = device
        self._num_parameters = num_parameters
        self.clock: Clock = VirtualClock(self._timing(bytes_per_example=1.0))

    def cores(self) -> float:
        return self._device.cores

    def memory_limit_bytes(self) -> int | None:
        return self._device.memory_bytes

    def speed(self, place: Workplace) -> Speed:
        return self._timing(bytes_per_example=activation_bytes(place) * WORKING_FACTOR)

    def _timing(self, *, bytes_per_example: float) -> Speed:
        vector_bytes = 4 * self._num_parameters
        each = OPERATIONS_PER_PARAMETER * self._num_parameters / OPERATIONS_PER_SECOND
        return Speed(
            seconds_per_micro_batch=DISPATCH_SECONDS / self._device.relative_speed,
            seconds_per_example=each / self._device.relative_speed,
            base_bytes=IDLE_BYTES + 2 * vector_bytes,
            bytes_per_example=bytes_per_example,
            overhead_seconds=2 * vector_bytes / self._device.upload_bytes_per_second,
        )


def simulated_machine(identity: Identity, settings: Settings, layout: ModelLayout) -> Hardware:
    """Return the hardware of a simulated device."""
    return SimulatedMachine(device(settings.seed, identity.part), layout.num_parameters)
