"""The figures of simulated devices: five profiles, and devices that are drawn from them.

A drawn device depends on the run's seed and its number, and varies by a quarter around its
profile's figures; so device 17 is the same on every engine. Those of a file have exactly the file's
(``simulation.fleet.fleet_file``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from headwater.client.training.sampler import seed_of
from headwater.simulation.fleet.traces import ALWAYS, Availability

MIB = 2**20


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
    labels: str | None = None


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
