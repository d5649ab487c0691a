"""The virtual hardware of a simulated device: clock, memory, link and battery of its profile.

The gradients are real. A micro-batch takes virtual seconds and bytes that are linear in its size,
and fails if it would exceed the memory limit. The device reports the same vitals as a real one, so
the planner cannot distinguish them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from headwater.client.device.interfaces import Hardware, Speed, SpeedProbe, TimeShare
from headwater.client.energy.time_share import time_share
from headwater.client.memory.peak_model import WORKING_FACTOR
from headwater.client.trainer.client_examples import MAX_OPEN_DATASETS
from headwater.client.trainer.run_trainer import run_trainer
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.common.data.batches import BatchForm, batch_of
from headwater.common.errors import TaskFailed
from headwater.common.estimates.linear_fit import Line
from headwater.common.messages import Vitals
from headwater.common.model.layout import ModelLayout
from headwater.common.settings.schema import ClientSettings, Settings
from headwater.common.user_code.named_objects import part_of
from headwater.common.user_code.run_scope import cached_in_scope
from headwater.simulation.fleet.faults import link_slowdown
from headwater.simulation.fleet.fleet_spec import fleet_spec
from headwater.simulation.fleet.identities import identities_of
from headwater.simulation.fleet.profiles import MIB, SimulatedDevice
from headwater.simulation.fleet.random_events import Jitter, is_on_battery, jitter_seed, round_now
from headwater.simulation.fleet.virtual_memory import VirtualMemory

# Memory of Python, torch and the client without a model: about 250 MB on amd64 and arm64.
IDLE_BYTES = 250 * MIB

# A laptop's seconds per example on a model of P parameters: 6 P operations at 5e9 per second, and
# the dispatch of about fifty operators per micro-batch.
OPERATIONS_PER_PARAMETER = 6
OPERATIONS_PER_SECOND = 5e9
DISPATCH_SECONDS = 4e-4

# Activation checkpointing repeats the forward pass, a third of the work.
CHECKPOINTING_SLOWDOWN = 4 / 3

FULL_TIME, ON_BATTERY = TimeShare(), Vitals(is_on_battery=True)


class VirtualClock:
    """A clock that advances only when a micro-batch is done."""

    def __init__(
        self,
        speed: Speed,
        jitter: Jitter | None = None,
        *,
        transfer_seconds: float = 0.0,
        slowdown: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """``slowdown`` and ``jitter`` return factors of the seconds that ``speed`` gives."""
        self._line = Line(base=speed.seconds_per_micro_batch, each=speed.seconds_per_example)
        self._jitter = jitter
        self._seconds = 0.0
        self._transfer_seconds = self._remaining_transfer_seconds = transfer_seconds
        self._slowdown = slowdown

    def begin_round(self) -> None:
        """Reset to zero seconds; the jitter is not reset."""
        self._seconds, self._remaining_transfer_seconds = 0.0, self._transfer_seconds

    def seconds(self) -> float:
        """Return the time; after the first call it includes the transfer of model and update.

        So a round's seconds contain the transfer, as the server measures them, and a step's do not.
        """
        now = self._seconds
        self._seconds += self._remaining_transfer_seconds
        self._remaining_transfer_seconds = 0.0
        return now

    def worked(self, size: float) -> None:
        seconds = self._line.at(size) * self._slowdown()
        self._seconds += seconds * (self._jitter.next_factor() if self._jitter else 1.0)


class VirtualHardware:
    """Implements ``client.device.interfaces.Hardware`` for one simulated device in one round."""

    def __init__(
        self,
        device: SimulatedDevice,
        num_parameters: int,
        *,
        num_local: int = 0,
        transfer_bytes: int | None = None,
        jitter_seed: int = 0,
        is_on_battery: bool = False,
        client_settings: ClientSettings | None = None,
    ) -> None:
        """Take the device's figures, the random draws of the round, and its owner's settings.

        ``transfer_bytes`` are those of a model down and an update up; not given: in float32.
        """
        self._device = device
        self._transfer_bytes = 8 * num_parameters if transfer_bytes is None else transfer_bytes
        self._num_parameters = num_parameters
        self._num_local = num_local
        self._is_on_battery = is_on_battery
        self._vitals: tuple[float | None, Vitals] | None = None
        self._client_settings = client_settings or ClientSettings()
        self.memory = VirtualMemory(
            limit_bytes=device.memory_bytes,
            base_bytes=IDLE_BYTES + 2 * 4 * (num_parameters + num_local),
        )
        self.clock = VirtualClock(
            self.constant_speed(),
            Jitter(device.jitter, jitter_seed) if device.jitter else None,
            transfer_seconds=self.transfer_seconds,
            slowdown=lambda: CHECKPOINTING_SLOWDOWN if self.memory.uses_checkpointing else 1.0,
        )

    def begin_round(self, bytes_per_example: float | None) -> None:
        """Reset to the state at a round's start, with this many bytes per example.

        Only for a device without jitter: its draws belong to one round.
        """
        self.clock.begin_round()
        self.memory.begin_round(bytes_per_example)

    @property
    def is_steady(self) -> bool:
        """Whether a micro-batch of a given size always takes the same time."""
        return self._device.jitter == 0

    @property
    def on_battery(self) -> float:
        """The share of rounds in which the device runs on its battery."""
        return self._device.on_battery

    @property
    def transfer_seconds(self) -> float:
        """The seconds in which the model arrives and the update leaves."""
        return self._transfer_bytes / self._device.upload_bytes_per_second

    def cores(self) -> float:
        return self._device.cores

    def vitals(self) -> Vitals:
        each = self.memory.bytes_per_example
        if self._vitals is not None and self._vitals[0] == each:
            return self._vitals[1]
        # A device that is never on battery has no battery sensor, and reports None.
        battery = self._is_on_battery if self._device.on_battery else None
        line, share = self.memory.line, self.time_share().share
        limit, rate = self._device.memory_bytes, self._device.upload_bytes_per_second
        vitals = _vitals(limit, line, battery, rate, share)
        self._vitals = each, vitals
        return vitals

    def time_share(self) -> TimeShare:
        if not self._is_on_battery:
            return FULL_TIME
        return time_share(ON_BATTERY, self._client_settings)

    def bounded(self) -> AbstractContextManager[None]:
        return nullcontext()  # its limit is not that of this process

    def speed(self, probe: SpeedProbe) -> Speed:
        """Return the profile's speed; count the bytes per example first if they are unknown.

        Raises:
            TaskFailed: the task fails on each of the first examples.
        """
        if self.memory.bytes_per_example is None:
            self.memory.bytes_per_example = _activation_bytes(probe) * WORKING_FACTOR
        return self.constant_speed()

    def constant_speed(self) -> Speed:
        """Return the device's speed without jitter and slowdown."""
        device = self._device
        dispatch, rate = device.micro_batch_seconds, device.examples_per_second
        if dispatch is None:
            dispatch = DISPATCH_SECONDS / device.relative_speed
        operations = OPERATIONS_PER_PARAMETER * (self._num_parameters + self._num_local)
        each = operations / OPERATIONS_PER_SECOND / device.relative_speed
        return Speed(
            seconds_per_micro_batch=dispatch,
            seconds_per_example=each if rate is None else 1 / rate,
        )


def moved_bytes(settings: Settings, layout: ModelLayout) -> tuple[int, int]:
    """Return the bytes that a round moves for a device, down and up, as planned."""
    down = up = 4 * layout.num_parameters
    modes = settings.compression.down, settings.compression.up, settings.secure.aggregation
    if any(mode != "off" for mode in modes):
        planned = part_of("headwater.common.compression.planned_bytes")
        down = planned.download_bytes(settings, layout)
        up = planned.upload_bytes(settings, layout)
    if settings.local.algorithm == "scaffold":
        more = part_of("headwater.common.local_state.terms").moved_bytes(layout.num_parameters)
        down, up = down + more[0], up + more[1]
    return down, up


@functools.lru_cache(maxsize=MAX_OPEN_DATASETS)
def _vitals(
    limit_bytes: int, line: Line | None, is_on_battery: bool | None, rate: float, share: float
) -> Vitals:
    """Return a device's vitals: the same object for equal arguments."""
    return Vitals(
        memory_limit_bytes=limit_bytes,
        base_bytes=None if line is None else int(line.base),
        bytes_per_example=None if line is None else line.each,
        is_on_battery=is_on_battery,
        upload_bytes_per_second=rate,
        download_bytes_per_second=rate,
        share=share,
    )


@cached_in_scope()
def _activation_bytes_of_shapes() -> dict[tuple[object, ...], float]:
    """Return what was counted in this run; the caller adds to it."""
    return {}


def _activation_bytes(probe: SpeedProbe) -> float:
    """Return the bytes that autograd keeps per example: counted once per shape of two examples."""
    positions = probe.spread()[:2]
    try:
        batches = [
            batch_of(probe.task, probe.examples, some) for some in (positions[:1], positions)
        ]
        tensors = [one for batch in batches for one in BatchForm.of(batch).tensors(batch)]
    except Exception:  # no rows of tensors, or an example that cannot be read: it is passed over
        return probe.activation_bytes()
    shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
    key = (id(probe.task), id(probe.image), shapes)
    counted = _activation_bytes_of_shapes()
    if key not in counted:
        counted[key] = probe.activation_bytes()
    return counted[key]


def virtual_hardware(identity: Identity, settings: Settings, layout: ModelLayout) -> Hardware:
    """Return a simulated device's hardware in the round of ``random_events.round_now``."""
    fleet, number = fleet_spec(settings), round_now()
    part = identities_of(settings).part(identity.name)
    has_jitter = fleet.device(part).jitter > 0
    return build_hardware(
        identity,
        settings,
        layout,
        is_on_battery=is_on_battery(fleet, part, round_number=number),
        jitter_seed=jitter_seed(fleet, part, round_number=number) if has_jitter else 0,
        slowdown=link_slowdown(fleet.faults, fleet.moment(part, round_number=number)),
    )


def build_hardware(
    identity: Identity,
    settings: Settings,
    layout: ModelLayout,
    *,
    is_on_battery: bool,
    jitter_seed: int = 0,
    slowdown: float = 1.0,
) -> VirtualHardware:
    """Return a device's hardware with the random draws of a round.

    ``slowdown`` is how many times as long a transfer takes.
    """
    device = fleet_spec(settings).device(identities_of(settings).part(identity.name))
    current = device
    if slowdown != 1:
        rate = device.upload_bytes_per_second / slowdown
        current = replace(device, upload_bytes_per_second=rate)
    hardware = VirtualHardware(
        current,
        layout.num_parameters,
        num_local=layout.num_local,
        transfer_bytes=sum(moved_bytes(settings, layout)),
        jitter_seed=jitter_seed,
        is_on_battery=is_on_battery,
        client_settings=settings.client,
    )
    hardware.memory.bytes_per_example = _bytes_per_example(
        device, layout.num_parameters, layout.num_local, identity, run_trainer(settings)
    )
    return hardware


@cached_in_scope(maxsize=MAX_OPEN_DATASETS)
def _bytes_per_example(
    device: SimulatedDevice,
    num_parameters: int,
    num_local: int,
    identity: Identity,
    trainer: Trainer,
) -> float | None:
    """Return the bytes of one more example, by the device's first ones; None if all of them fail.

    Counted and not measured, so it is the same on every machine; once per device and process.
    """
    hardware = VirtualHardware(device, num_parameters, num_local=num_local)
    try:
        trainer.measure(identity, hardware)
    except TaskFailed:
        return None
    return hardware.memory.bytes_per_example
