"""A simulated device at work: clock, memory and battery of its own, and real gradients.

The planner cannot tell it from a real one: it tells the same vitals, its micro-batches take seconds
and bytes by a line in their size, and one that would cross its memory limit fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from headwater.client.device.hardware import Hardware
from headwater.client.device.throttle import time_share
from headwater.client.memory.peak_model import GUARD_SHARE, PeakModel
from headwater.client.training.context import TimeShare, TrainingContext
from headwater.client.training.probe import MAX_EXAMPLES, activation_bytes
from headwater.client.training.probe_fit import WORKING_FACTOR, Speed
from headwater.client.training.trainer import MAX_OPEN_DATASETS, Identity, trainer_of
from headwater.common.data.batches import UnsupportedBatch, batch_of, split_batch
from headwater.common.errors import TaskFailed
from headwater.common.messages import Vitals
from headwater.common.model.parameters import ModelLayout
from headwater.common.settings import schema as settings
from headwater.common.settings.schema import Settings
from headwater.common.stats.linear_fit import Line
from headwater.simulation.fleet.faults import slowed
from headwater.simulation.fleet.profiles import (
    MIB,
    SimulatedDevice,
    device_of,
    faults_of,
    moment_of,
)
from headwater.simulation.fleet.random_events import Jitter, is_on_battery, jitter_seed, round_now

# What Python, torch and this client hold before any model: about 250 MB on amd64 and arm64.
IDLE_BYTES = 250 * MIB

# A laptop's seconds per example on a model of P parameters: 6 P operations at 5e9 a second, and
# the dispatch of some fifty operators per micro-batch.
OPERATIONS_PER_PARAMETER = 6
OPERATIONS_PER_SECOND = 5e9
DISPATCH_SECONDS = 4e-4

# With activation checkpointing the forward pass, a third of the work, is done twice.
CHECKPOINTED_SECONDS = 4 / 3


class VirtualClock:
    """Seconds that pass only when a micro-batch is done."""

    def __init__(
        self,
        speed: Speed,
        jitter: Jitter | None = None,
        *,
        transfer_seconds: float = 0.0,
        slowed: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """Take the line of seconds, what disturbs it, and how much longer a micro-batch takes."""
        self._line = Line(base=speed.seconds_per_micro_batch, each=speed.seconds_per_example)
        self._jitter = jitter
        self._seconds = 0.0
        self._all_transfer_seconds = self._transfer_seconds = transfer_seconds
        self._slowed = slowed

    def begin_round(self) -> None:
        """Be as at the start; what disturbs it goes on."""
        self._seconds, self._transfer_seconds = 0.0, self._all_transfer_seconds

    def seconds(self) -> float:
        """Return the time; the model and the update travel behind the first look at the clock.

        So a round's seconds hold the transfer, as they do for the server, and a step's do not.
        """
        now = self._seconds
        self._seconds += self._transfer_seconds
        self._transfer_seconds = 0.0
        return now

    def worked(self, num_examples: int) -> None:
        seconds = self._line.at(num_examples) * self._slowed()
        self._seconds += seconds * (self._jitter.next_factor() if self._jitter else 1.0)


class VirtualMemory:
    """The memory of a simulated device: peaks by a line in the micro-batch size, and a limit.

    The line is the truth here, so nothing is learned from what happens. It may be unknown, where
    none of the task's examples could be measured: then every micro-batch fits.
    """

    def __init__(self, *, limit_bytes: int, base_bytes: int) -> None:
        self.bytes_per_example: float | None = None
        self.is_relieved = False
        self._limit_bytes = limit_bytes
        self.base_bytes = base_bytes
        self._failed_at = 0
        self._fits: tuple[float | None, int | None] = (None, None)

    @property
    def line(self) -> Line | None:
        if self.bytes_per_example is None:
            return None
        return Line(base=float(self.base_bytes), each=self.bytes_per_example)

    def begin_round(self, bytes_per_example: float | None) -> None:
        """Be as at the start, where an example takes so many bytes."""
        self.bytes_per_example, self.is_relieved, self._failed_at = bytes_per_example, False, 0

    def limit_bytes(self) -> int | None:
        return self._limit_bytes

    def fitting(self, num_examples: int) -> int | None:
        """See ``client.training.context.Memory``; by the rule of a process (``headwater.client.memory.peak_model.peak_model``)."""
        each = self.bytes_per_example
        if each != self._fits[0]:  # asked before each micro-batch, and the line hardly ever moves
            self._fits = each, self._fitting()
        return self._fits[1]

    def _fitting(self) -> int | None:
        line = self.line
        if line is None:
            return None
        known = PeakModel(
            line=line, least_each=line.each, largest_size=1, rest_bytes=self.base_bytes
        )
        return known.fitting(self._limit_bytes * GUARD_SHARE)

    def begin(self, num_examples: int) -> None:
        """Take note that a micro-batch of this size begins.

        Raises:
            MemoryError: it would cross the limit.
        """
        peak_bytes = self._peak_bytes(num_examples)
        if peak_bytes > self._limit_bytes:
            self._failed_at = max(self._failed_at, peak_bytes)
            raise MemoryError(
                f"{num_examples} examples take {peak_bytes / MIB:.1f} MiB of a simulated limit of "
                f"{self._limit_bytes / MIB:.1f}"
            )

    def end(self, num_examples: int) -> int:
        """Return the peak of the micro-batch, or that of one that failed before, which is more."""
        peak_bytes = max(self._peak_bytes(num_examples), self._failed_at)
        self._failed_at = 0
        return peak_bytes

    def relieve(self, bytes_per_example: float | None) -> None:
        self.is_relieved = True
        if self.bytes_per_example is not None and bytes_per_example is not None:
            self.bytes_per_example = min(self.bytes_per_example, bytes_per_example)

    def _peak_bytes(self, num_examples: int) -> int:
        return int(self.base_bytes + (self.bytes_per_example or 0.0) * num_examples)


UNRESTRAINED, ON_BATTERY = TimeShare(), Vitals(is_on_battery=True)


@functools.lru_cache(maxsize=MAX_OPEN_DATASETS)
def _vitals(
    limit_bytes: int, line: Line | None, is_on_battery: bool | None, rate: float, share: float
) -> Vitals:
    """Return what a device tells of itself: the same object as long as it is the same."""
    return Vitals(
        memory_limit_bytes=limit_bytes,
        base_bytes=None if line is None else int(line.base),
        bytes_per_example=None if line is None else line.each,
        is_on_battery=is_on_battery,
        upload_bytes_per_second=rate,
        download_bytes_per_second=rate,
        share=share,
    )


class SimulatedMachine:
    """A device's hardware in one round: virtual clock and memory, and perhaps a battery."""

    def __init__(
        self,
        device: SimulatedDevice,
        num_parameters: int,
        *,
        jitter_seed: int = 0,
        is_on_battery: bool = False,
        chosen: settings.ClientSettings | None = None,
    ) -> None:
        """Take what was drawn of the device, and its owner's settings."""
        self._device = device
        self._num_parameters = num_parameters
        self._is_on_battery = is_on_battery
        self._vitals: tuple[float | None, Vitals] | None = None
        self._chosen = chosen or settings.ClientSettings()
        self.memory = VirtualMemory(
            limit_bytes=device.memory_bytes,
            base_bytes=IDLE_BYTES + 2 * 4 * num_parameters,
        )
        self.clock = VirtualClock(
            self.timing(),
            Jitter(device.jitter, jitter_seed) if device.jitter else None,
            transfer_seconds=self.transfer_seconds,
            slowed=lambda: CHECKPOINTED_SECONDS if self.memory.is_relieved else 1.0,
        )

    def begin_round(self, bytes_per_example: float | None) -> None:
        """Be as at the start of a round, where an example takes so many bytes.

        For a steady machine: of another the jitter of the round would be another's.
        """
        self.clock.begin_round()
        self.memory.begin_round(bytes_per_example)

    @property
    def is_steady(self) -> bool:
        """Whether a micro-batch of a size takes as long each time."""
        return self._device.jitter == 0

    @property
    def on_battery(self) -> float:
        """The share of rounds in which it has no mains."""
        return self._device.on_battery

    @property
    def transfer_seconds(self) -> float:
        """What the model takes to come and the update to go."""
        return 2 * 4 * self._num_parameters / self._device.upload_bytes_per_second

    def cores(self) -> float:
        return self._device.cores

    def vitals(self) -> Vitals:
        each = self.memory.bytes_per_example
        if self._vitals is not None and self._vitals[0] == each:
            return self._vitals[1]
        # A device that is never on battery has none, and no sensor that would say so.
        is_on_battery = self._is_on_battery if self._device.on_battery else None
        line, share = self.memory.line, self.restraint().share
        limit, rate = self._device.memory_bytes, self._device.upload_bytes_per_second
        told = _vitals(limit, line, is_on_battery, rate, share)
        self._vitals = each, told
        return told

    def restraint(self) -> TimeShare:
        if not self._is_on_battery:
            return UNRESTRAINED
        return time_share(ON_BATTERY, self._chosen)

    def speed(self, place: TrainingContext) -> Speed:
        """Look up the line of seconds, and count what an example more takes if that is not known.

        Raises:
            TaskFailed: none of the first examples can be trained on.
        """
        if self.memory.bytes_per_example is None:
            self.memory.bytes_per_example = _activation_bytes(place) * WORKING_FACTOR
        return self.timing()

    def timing(self) -> Speed:
        """Return the line of seconds."""
        device = self._device
        dispatch, rate = device.micro_batch_seconds, device.examples_per_second
        if dispatch is None:
            dispatch = DISPATCH_SECONDS / device.relative_speed
        operations = OPERATIONS_PER_PARAMETER * self._num_parameters
        each = operations / OPERATIONS_PER_SECOND / device.relative_speed
        return Speed(
            seconds_per_micro_batch=dispatch,
            seconds_per_example=each if rate is None else 1 / rate,
        )


_counted: dict[tuple[object, ...], float] = {}


def _activation_bytes(place: TrainingContext) -> float:
    """Count what autograd keeps of an example, once for all devices whose first two are alike."""
    num_examples = len(place.examples)
    second = max(num_examples // MAX_EXAMPLES, 1)
    some = (0, second) if second < num_examples else (0,)
    try:
        rows = [
            split_batch(batch_of(place.task, place.examples, part))[0] for part in (some[:1], some)
        ]
    except UnsupportedBatch:
        return activation_bytes(place)
    shapes = tuple((row.shape, row.dtype) for batch in rows for row in batch)
    key = (id(place.task), id(place.image), shapes)
    if key not in _counted:
        _counted[key] = activation_bytes(place)
    return _counted[key]


def simulated_machine(identity: Identity, settings: Settings, layout: ModelLayout) -> Hardware:
    """Return the hardware of a simulated device, in the round that the grid is at."""
    part, number = identity.part, round_now()
    return machine_of(
        identity,
        settings,
        layout,
        is_on_battery=is_on_battery(settings, part, round_number=number),
        jitter_seed=(
            jitter_seed(settings, part, round_number=number)
            if device_of(settings, part).jitter
            else 0
        ),
        slow=slowed(faults_of(settings), moment_of(settings, part, round_number=number)),
    )


def machine_of(
    identity: Identity,
    settings: Settings,
    layout: ModelLayout,
    *,
    is_on_battery: bool,
    jitter_seed: int = 0,
    slow: float = 1.0,
) -> SimulatedMachine:
    """Return a device's hardware in a round of which that was drawn.

    ``slow`` is how many times as slow its link is.
    """
    device = slowed_down = device_of(settings, identity.part)
    if slow != 1:
        rate = device.upload_bytes_per_second / slow
        slowed_down = replace(device, upload_bytes_per_second=rate)
    machine = SimulatedMachine(
        slowed_down,
        layout.num_parameters,
        jitter_seed=jitter_seed,
        is_on_battery=is_on_battery,
        chosen=settings.client,
    )
    assert settings.task is not None  # the app has it loaded
    machine.memory.bytes_per_example = _bytes_per_example(
        device,
        layout.num_parameters,
        identity,
        settings.task,
        settings.model.replace_batch_norm,
        settings.check_task,
    )
    return machine


@functools.lru_cache(maxsize=MAX_OPEN_DATASETS)
def _bytes_per_example(
    device: SimulatedDevice,
    num_parameters: int,
    identity: Identity,
    task: str,
    replace_batch_norm: bool,
    check_task: bool,
) -> float | None:
    """Return what an example more takes, by the device's first ones; None if none of them works.

    Counted and not measured, so it is the same on every machine; once a device and process.
    """
    machine = SimulatedMachine(device, num_parameters)
    resident = trainer_of(task, replace_batch_norm=replace_batch_norm, check_task=check_task)
    try:
        resident.measure(identity, machine)
    except TaskFailed:
        return None
    return machine.memory.bytes_per_example
