"""What stays the same of the simulated devices' hardware from round to round, in columns.

The columns are read off each device's own hardware (``headwater.simulation.fleet.virtual_hardware.virtual_hardware``) when it is first called.
A column has an entry for each device, and takes memory only around those that were called.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headwater.client.memory.peak_model import LARGEST_SIZE
from headwater.client.training.micro_batches import Seeds
from headwater.common.messages import Vitals
from headwater.simulation.fleet.random_events import are_on_battery, battery_seed
from headwater.simulation.fleet.virtual_hardware import SimulatedMachine

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Machines:
    """The hardware of N devices."""

    def __init__(
        self,
        num_devices: int,
        machine: Callable[[int, bool], SimulatedMachine],
        *,
        run_seed: int,
        most_held: int,
    ) -> None:
        """Take what makes a device's hardware, by its number and whether it is on battery."""
        self._machine = machine
        self._run_seed, self._most_held = run_seed, most_held
        self._vitals: tuple[dict[int, Vitals], dict[int, Vitals]] = ({}, {})
        self._is_known = np.zeros(num_devices, dtype=np.bool_)
        self.is_steady = np.zeros(num_devices, dtype=np.bool_)
        """Whether a micro-batch of a size takes as long each time."""
        self._on_battery: Floats = np.zeros(num_devices)
        self._battery_seeds: Seeds = np.zeros(num_devices, dtype=np.uint64)
        self.fitting: Ints = np.zeros(num_devices, dtype=np.int64)
        """The largest micro-batch that fits in memory; 0 where not even one example does."""
        self.seconds_per_micro_batch: Floats = np.zeros(num_devices)
        self.seconds_per_example: Floats = np.zeros(num_devices)
        self.transfer_seconds: Floats = np.zeros(num_devices)
        self.base_bytes: Floats = np.zeros(num_devices)
        self.bytes_per_example: Floats = np.zeros(num_devices)

    def meet(self, parts: Ints) -> None:
        """Read off what is not known yet.

        Raises:
            HeadwaterError: a device's examples cannot be opened.
        """
        for part in parts[~self._is_known[parts]].tolist():
            machine = self._machine(part, False)
            memory, timing = machine.memory, machine.timing()
            fitting = memory.fitting(1)
            self.is_steady[part] = machine.is_steady
            self._on_battery[part] = machine.on_battery
            self._battery_seeds[part] = battery_seed(self._run_seed, part)
            self.fitting[part] = LARGEST_SIZE if fitting is None else fitting
            self.seconds_per_micro_batch[part] = timing.seconds_per_micro_batch
            self.seconds_per_example[part] = timing.seconds_per_example
            self.transfer_seconds[part] = machine.transfer_seconds
            self.base_bytes[part] = memory.base_bytes
            self.bytes_per_example[part] = memory.bytes_per_example or 0.0
            self._is_known[part] = True

    def vitals(self, parts: Ints, *, round_number: int) -> list[Vitals]:
        """Return what devices tell of themselves: the same objects as long as it is the same.

        Of far more devices than these all is forgotten, and looked up again.
        """
        for known in self._vitals:
            if len(known) > max(self._most_held, 2 * len(parts)):
                known.clear()
        is_weak = are_on_battery(
            self._battery_seeds[parts], self._on_battery[parts], round_number=round_number
        )
        return list(map(self._of, parts.tolist(), is_weak.tolist()))

    def _of(self, part: int, is_on_battery: bool) -> Vitals:
        known = self._vitals[is_on_battery]
        told = known.get(part)
        if told is None:
            told = known[part] = self._machine(part, is_on_battery).vitals()
        return told
