"""The constant figures of many simulated devices' hardware, as columns of numbers.

A device's entries are read from its ``VirtualHardware`` when it is first needed. A column has an
entry for each device, but uses memory only near those that were needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from headwater.client.memory.peak_model import LARGEST_SIZE
from headwater.client.training.sampler import Seeds
from headwater.server.planning.vitals_columns import VitalsColumns
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
    ) -> None:
        """``hardware_of`` takes a device's number and whether it is on battery."""
        self._hardware_of = hardware_of
        self._run_seed = run_seed
        names = [one.name for one in fields(VitalsColumns)]
        self._vitals = VitalsColumns(**{name: np.zeros(num_devices) for name in names})
        """On mains."""
        self._battery_share: Floats = np.zeros(num_devices)
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
        new, vitals = parts[~self._is_loaded[parts]], []
        for part in new.tolist():
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
            if hardware.on_battery:
                self._battery_share[part] = self._hardware_of(part, True).time_share().share
            self._is_loaded[part] = True
            vitals.append(hardware.vitals())
        self._vitals.put(new, VitalsColumns.of(vitals))

    def vitals(self, parts: Ints, *, round_number: int) -> VitalsColumns:
        """Return the vitals of devices that are loaded, in a round."""
        found, on_battery = self._vitals.some(parts), self._on_battery[parts]
        if on_battery.any():
            seeds = self._battery_seeds[parts]
            is_drained = are_on_battery(seeds, on_battery, round_number=round_number)
            found.share[is_drained] = self._battery_share[parts][is_drained]
            found.is_on_battery[is_drained] = 1.0
        return found
