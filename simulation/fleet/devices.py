"""The simulated devices: one model and one vector in this process, each device's data and place."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from headwater.client.device.hardware import Hardware
from headwater.client.training.trainer import HELD, Identity, Resident, resident_of
from headwater.common.errors import SettingsError
from headwater.common.messages import DescribeRequest, DeviceReport, Plan, Update
from headwater.common.model.parameters import ModelImage
from headwater.common.settings.schema import Settings
from headwater.common.task import Examples
from headwater.server.fleet import Dropout, UpdateOfMany
from headwater.simulation.fleet.faults import LiarFault, lies
from headwater.simulation.fleet.hardware_columns import Ints, Machines
from headwater.simulation.fleet.position_columns import Walks
from headwater.simulation.fleet.profiles import device_of, faults_of, moment_of
from headwater.simulation.fleet.random_events import at_round, is_on_battery
from headwater.simulation.fleet.virtual_hardware import (
    SimulatedMachine,
    machine_of,
    simulated_machine,
)

log = logging.getLogger(__name__)

# Of so many devices what was looked up is kept in any case (``Devices.most_held``).
LEAST_HELD = 4000

# A machine that is the same in each round, and what an example takes there when a round begins.
_Steady = tuple[SimulatedMachine, float | None]


class Called(NamedTuple):
    """A device that has a plan; its name is its number."""

    name: str
    part: int
    plan: Plan


class Compute(Protocol):
    """A way to compute what the called devices answer."""

    def train(
        self,
        called: Sequence[Called],
        image: ModelImage,
        *,
        run_id: int,
        timeout_seconds: float | None,
    ) -> Iterator[Update | UpdateOfMany | Dropout]:
        """Yield the devices' answers; a vector is valid until the next answer is asked for."""
        ...


class Devices:
    """N devices, named 0 to N-1; of each there is no more than was asked for."""

    def __init__(self, settings: Settings) -> None:
        """Load the task and build its model.

        Raises:
            SettingsError: there is no task.
            HeadwaterError: see ``headwater.common.task.load_task`` and ``common.model.parameters.build_model``.
        """
        if settings.task is None:
            raise SettingsError("no task is set", remedy="name it with --task FILE.py:Class")
        self.settings = settings
        self.num_devices = settings.simulation.clients
        self._rule = settings.partition.rule(seed=settings.seed)
        self.walks = Walks(self.num_devices)
        self._owned: Ints = np.zeros(self.num_devices, dtype=np.int64)
        self._steady: dict[tuple[int, bool], _Steady] = {}
        size = settings.cohort.size
        self.most_held = HELD if size is None else min(HELD, max(2 * size, LEAST_HELD))
        """Devices of which is kept what was looked up: of a sample nobody is back for long."""
        self.machines = Machines(
            self.num_devices, self._machine, run_seed=settings.seed, most_held=self.most_held
        )

    @functools.cached_property
    def resident(self) -> Resident:
        """The task, the model and the vector, which all devices share."""
        chosen = self.settings
        assert chosen.task is not None  # see __init__
        resident = resident_of(
            chosen.task,
            replace_batch_norm=chosen.model.replace_batch_norm,
            check_task=chosen.check_task,
        )
        resident.hold(self.most_held)
        return resident

    def identity(self, part: int) -> Identity:
        """Return who a device is."""
        return Identity(
            name=str(part), data=None, part=part, num_parts=self.num_devices, rule=self._rule
        )

    def examples(self, part: int) -> Examples:
        """Open a device's examples; those of the last ``most_held`` devices stay open."""
        return self.resident.examples(self.identity(part))

    def machine(self, part: int, *, round_number: int) -> Hardware:
        """Return a device's hardware in a round; it may be the one of another round, begun anew."""
        if self.has_slow_links or device_of(self.settings, part).jitter:
            return self._drawn_machine(part, round_number)
        is_weak = is_on_battery(self.settings, part, round_number=round_number)
        known = self._steady.get((part, is_weak))
        if known is not None:
            machine, bytes_per_example = known
            machine.begin_round(bytes_per_example)
            return machine
        machine = self._machine(part, is_weak)
        if len(self._steady) >= self.most_held:
            self._steady.clear()
        self._steady[part, is_weak] = machine, machine.memory.bytes_per_example
        return machine

    def _drawn_machine(self, part: int, round_number: int) -> Hardware:
        with at_round(round_number):
            return simulated_machine(self.identity(part), self.settings, self.resident.image.layout)

    def _machine(self, part: int, is_on_battery: bool) -> SimulatedMachine:
        layout = self.resident.image.layout
        return machine_of(self.identity(part), self.settings, layout, is_on_battery=is_on_battery)

    def training_examples(self, part: int, plan: Plan) -> Examples:
        """Return what a device trains on: all that it has, less what it holds out."""
        if plan.held_out_fraction == 0:
            return self.examples(part)
        kept, _ = self.resident.split(
            self.identity(part), run_seed=plan.run_seed, fraction=plan.held_out_fraction
        )
        return kept

    def owned(self, parts: Ints, plan: Plan) -> Ints:
        """Return how many examples devices train on."""
        for part in parts[self._owned[parts] == 0].tolist():
            self._owned[part] = len(self.training_examples(part, plan))
        return self._owned[parts]

    @functools.cached_property
    def has_slow_links(self) -> bool:
        """Whether links are slower in some rounds than in others."""
        return bool(faults_of(self.settings).slow_link)

    @functools.cached_property
    def has_liars(self) -> bool:
        """Whether some devices lie in some rounds."""
        return bool(faults_of(self.settings).liar)

    def lies(self, part: int, *, round_number: int) -> tuple[LiarFault, ...]:
        """Return the lies that a device tells in a round."""
        if not self.has_liars:
            return ()
        return lies(
            faults_of(self.settings), moment_of(self.settings, part, round_number=round_number)
        )

    def describe(self, part: int, request: DescribeRequest, *, round_number: int) -> DeviceReport:
        """Let a device say what it is.

        Raises:
            HeadwaterError: see ``Resident.describe``.
        """
        if request.left_out is not None:
            log.info("%d has no part in this round: %s", part, request.left_out)
        machine = self.machine(part, round_number=round_number)
        return self.resident.describe(self.identity(part), machine, request)
