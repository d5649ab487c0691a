"""The constant figures of many simulated devices' hardware, as columns of numbers.

A device's entries are read from its ``VirtualHardware`` when it is first needed. A column has an
entry for each device, but uses memory only near those that were needed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headwater.client.memory.peak_model import LARGEST_SIZE
from headwater.client.training.sampler import Seeds
from headwater.common.messages import Vitals
from headwater.simulation.fleet.random_events import are_on_battery, battery_seed
from headwater.simulation.fleet.virtual_hardware import VirtualHardware

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class HardwareColumns:
    """The hardware of N devices."""

    def __init__(
        self,
        num_devices: int,
        hardware_of: Callable[[int, bool], VirtualHardware],
        *,
        run_seed: int,
        cache_size: int,
    ) -> None:
        """``hardware_of`` takes a device's number and whether it is on battery."""
        self._hardware_of = hardware_of
        self._run_seed, self._cache_size = run_seed, cache_size
        self._vitals: tuple[dict[int, Vitals], dict[int, Vitals]] = ({}, {})
        self._is_loaded = np.zeros(num_devices, dtype=np.bool_)
        self.is_steady = np.zeros(num_devices, dtype=np.bool_)
        """Whether a micro-batch of a given size always takes the same time."""
        self._on_battery: Floats = np.zeros(num_devices)
        self._battery_seeds: Seeds = np.zeros(num_devices, dtype=np.uint64)
        self.fitting: Ints = np.zeros(num_devices, dtype=np.int64)
        """The largest micro-batch that fits in memory; 0 if not even one example fits."""
        self.seconds_per_micro_batch: Floats = np.zeros(num_devices)
        self.seconds_per_example: Floats = np.zeros(num_devices)
        self.transfer_seconds: Floats = np.zeros(num_devices)
        self.base_bytes: Floats = np.zeros(num_devices)
        self.bytes_per_example: Floats = np.zeros(num_devices)

    def load(self, parts: Ints, *, held_bytes: int = 0) -> None:
        """Read the figures of the devices that have not been read yet.

        ``held_bytes`` are what local steps hold on each device, the same in all rounds.

        Raises:
            HeadwaterError: a device's examples cannot be opened.
        """
        for part in parts[~self._is_loaded[parts]].tolist():
            hardware = self._hardware_of(part, False)
            memory, speed = hardware.memory, hardware.constant_speed()
            with memory.holding(held_bytes):
                fitting, self.base_bytes[part] = memory.fitting(1), memory.base_bytes
            self.is_steady[part] = hardware.is_steady
            self._on_battery[part] = hardware.on_battery
            self._battery_seeds[part] = battery_seed(self._run_seed, part)
            self.fitting[part] = LARGEST_SIZE if fitting is None else int(fitting)
            self.seconds_per_micro_batch[part] = speed.seconds_per_micro_batch
            self.seconds_per_example[part] = speed.seconds_per_example
            self.transfer_seconds[part] = hardware.transfer_seconds
            self.bytes_per_example[part] = memory.bytes_per_example or 0.0
            self._is_loaded[part] = True

    def vitals(self, parts: Ints, *, round_number: int) -> list[Vitals]:
        """Return the devices' vitals in a round: the same objects as long as they are equal.

        A cache of far more devices than these is emptied.
        """
        for cached in self._vitals:
            if len(cached) > max(self._cache_size, 2 * len(parts)):
                cached.clear()
        flags = are_on_battery(
            self._battery_seeds[parts], self._on_battery[parts], round_number=round_number
        )
        known = self._vitals
        return [
            known[flag].get(part) or self._read_vitals(part, flag)
            for part, flag in zip(parts.tolist(), flags.tolist(), strict=True)
        ]

    def _read_vitals(self, part: int, is_on_battery: bool) -> Vitals:
        vitals = self._vitals[is_on_battery][part] = self._hardware_of(part, is_on_battery).vitals()
        return vitals
