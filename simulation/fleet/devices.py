"""The simulated devices of one process: they share one trainer; each has its data and position."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

import numpy as np

from headwater.client.device.interfaces import Hardware
from headwater.client.flower.state_file import local_file
from headwater.client.trainer.client_examples import MAX_OPEN_DATASETS
from headwater.client.trainer.run_trainer import run_trainer
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.common.errors import SettingsError
from headwater.common.messages import DescribeRequest, DeviceReport, Plan, Update
from headwater.common.model.local_state import LocalStore
from headwater.common.settings.schema import Settings
from headwater.common.task import Examples
from headwater.server.fleet import Dropout, UpdateBlock
from headwater.server.planning.plan_table import PlanTable
from headwater.simulation.fleet.faults import LiarFault, absent_seconds, falsifications
from headwater.simulation.fleet.fleet_spec import fleet_spec
from headwater.simulation.fleet.hardware_columns import HardwareColumns, Ints
from headwater.simulation.fleet.identities import identities_of
from headwater.simulation.fleet.position_columns import PositionColumns
from headwater.simulation.fleet.random_events import at_round, is_on_battery
from headwater.simulation.fleet.virtual_hardware import (
    VirtualHardware,
    build_hardware,
    virtual_hardware,
)

if TYPE_CHECKING:
    from headwater.client.compression.error_feedback import ErrorFeedback, ResidualSlots
    from headwater.common.flower.sent_model import SentModel

log = logging.getLogger(__name__)

# Device 0 is Flower's node 1000, which is also its key in checkpoints.
FIRST_NODE_ID = 1000
# The key of the fleet's own entry among the nodes' states in a checkpoint.
FLEET_STATE = "grid"
# In it: in which round each device described itself last, as a list of devices by round. A device
# that has not trained yet is known by its description, which a resumed run must make again as it
# was: on battery, or not.
DESCRIBED, FIRST_DESCRIBED = "described", "first_described"
# The folder in ``out`` with the parameters that stay on each device.
LOCAL_FOLDER = "local"
# After this many looks with too few devices, no round will ever find enough of them.
MAX_LOOKS = 1000
# The per-device caches hold at least this many devices (``Devices.cache_size``).
MIN_CACHE_SIZE = 4000

# Hardware without random draws, and its bytes per example at the start of a round.
_SteadyHardware = tuple[VirtualHardware, float | None]


def by_round(described: Mapping[int, int]) -> dict[str, list[int]]:
    """Return the rounds in which devices described themselves for a checkpoint."""
    found: dict[str, list[int]] = {}
    for part, number in described.items():
        found.setdefault(str(number), []).append(part)
    return found


def described_in(state: Mapping[str, Any]) -> dict[int, int]:
    """Return what ``by_round`` made of the fleet's state, by device."""
    rounds: Mapping[str, list[int]] = state.get(DESCRIBED, {})
    return {part: int(number) for number, parts in rounds.items() for part in parts}


class ClientPlan(NamedTuple):
    """A device with a plan for a round; ``part`` is the device's number."""

    name: str
    part: int
    plans: Mapping[str, Plan]
    """The round's plans; that of the device is made when it is looked at."""

    @property
    def plan(self) -> Plan:
        """The device's plan."""
        return self.plans[self.name]

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: with the device's own plan alone."""
        return _client_plan, (self.name, self.part, self.plan)


def _client_plan(name: str, part: int, plan: Plan) -> ClientPlan:
    return ClientPlan(name, part, {name: plan})


@dataclass(frozen=True, slots=True, eq=False)
class ClientPlans(Sequence[ClientPlan]):
    """D devices with their plans for a round, as columns: one of them is made when it is read."""

    names: Sequence[str]
    parts: Ints
    plans: Mapping[str, Plan]

    @staticmethod
    def of(clients: Sequence[ClientPlan]) -> ClientPlans:
        """Return devices with their plans as columns."""
        if isinstance(clients, ClientPlans):
            return clients
        names, parts, tables = zip(*clients, strict=True) if clients else ((), (), ())
        plans = tables[0] if tables else {}
        if not all(map(operator.is_, tables, repeat(plans))):
            plans = {one.name: one.plan for one in clients}
        return ClientPlans(names, np.array(parts, dtype=np.int64), plans)

    @property
    def table(self) -> PlanTable:
        """The plans in columns."""
        return PlanTable.of(self.plans).some(self.names)

    def some(self, at: Ints) -> ClientPlans:
        """Return these devices."""
        names = self.names
        return ClientPlans([names[row] for row in at.tolist()], self.parts[at], self.plans)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[ClientPlan]:
        return map(ClientPlan, self.names, self.parts.tolist(), repeat(self.plans))

    @overload
    def __getitem__(self, at: int) -> ClientPlan: ...
    @overload
    def __getitem__(self, at: slice) -> ClientPlans: ...
    def __getitem__(self, at: int | slice) -> ClientPlan | ClientPlans:
        """Return a device, or those of a part of the columns."""
        if isinstance(at, slice):
            return ClientPlans(self.names[at], self.parts[at], self.plans)
        return ClientPlan(self.names[at], int(self.parts[at]), self.plans)


class Compute(Protocol):
    """A way to compute the updates of planned devices."""

    @property
    def num_nodes(self) -> int | None:
        """The machines of a cluster that compute; None: this one."""
        ...

    def train(
        self,
        called: Sequence[ClientPlan],
        image: SentModel,
        *,
        run_id: int,
        timeout_seconds: float | None,
    ) -> Iterator[Update | UpdateBlock | Dropout]:
        """Yield the devices' replies; a vector is valid until the next reply is requested."""
        ...

    def close(self) -> None:
        """End the processes that compute, if there are any."""
        ...


class Devices:
    """N devices, numbered 0 to N-1; their data and hardware are created when first needed."""

    def __init__(self, settings: Settings) -> None:
        """Prepare the devices; the task is loaded when it is first needed.

        Raises:
            SettingsError: there is no task.
        """
        if settings.task is None:
            raise SettingsError("no task is set", remedy="name it with --task FILE.py:Class")
        if settings.feature.name is not None:  # before a plan with its terms is read
            import_module("headwater.common.own_feature.found").own_features(settings.feature)
        self.settings = settings
        self.fleet = fleet_spec(settings)
        self.num_devices = settings.simulation.clients
        self.identities = identities_of(settings)
        self.positions = PositionColumns(self.num_devices)
        self._num_training_examples: Ints = np.zeros(self.num_devices, dtype=np.int64)
        self._local: dict[int, bytes] = {}
        self._residuals: dict[tuple[int, int], bytes] = {}
        self._feature_states: dict[tuple[int, str], bytes] = {}
        self._steady: dict[tuple[int, bool], _SteadyHardware] = {}
        size = settings.cohort.size
        self.cache_size = MAX_OPEN_DATASETS
        """Size of the per-device caches. With sampling a device rarely returns soon."""
        if size is not None:
            self.cache_size = min(MAX_OPEN_DATASETS, max(2 * size, MIN_CACHE_SIZE))
        self.hardware_columns = HardwareColumns(
            self.num_devices, self._build_hardware, run_seed=settings.seed
        )

    @functools.cached_property
    def trainer(self) -> Trainer:
        """The task, the model and the gradient vector, which all devices share."""
        trainer = run_trainer(self.settings)
        trainer.keep_open(self.cache_size)
        return trainer

    def identity(self, part: int) -> Identity:
        """Return a device's name and its part of the data."""
        return self.identities.of(part)

    def examples(self, part: int) -> Examples:
        """Open a device's examples; those of the last ``cache_size`` devices stay open."""
        return self.trainer.examples(self.identity(part))

    def local_store(self, part: int) -> LocalStore | None:
        """Return where a device keeps the parameters that stay on it; None if none do.

        In the run's folder, or in this process's memory if the run writes nothing.
        """
        if self.settings.model.local_parameters is None:
            return None
        name, out = self.identities.name(part), self.settings.out
        if out is not None:
            path = out / LOCAL_FOLDER / f"{name}.safetensors"
            return local_file(path, is_durable=False)
        kept = self._local
        return LocalStore(f"device {name}", lambda: kept.get(part), partial(kept.__setitem__, part))

    def feature_store(self, part: int, name: str) -> LocalStore:
        """Return where the state of a feature of the user's is kept, as ``local_store`` keeps."""
        device, out = self.identities.name(part), self.settings.out
        if out is not None:
            return local_file(out / LOCAL_FOLDER / f"{device}.{name}.safetensors", is_durable=False)
        kept, key = self._feature_states, (part, name)
        return LocalStore(f"device {device}", lambda: kept.get(key), partial(kept.__setitem__, key))

    def error_feedback(self, part: int) -> ErrorFeedback:
        """Return what a device's compressed updates left out; kept as ``local_store`` keeps."""
        name, out, kept = self.identities.name(part), self.settings.out, self._residuals
        from headwater.client.compression.error_feedback import ErrorFeedback
        from headwater.client.compression.residual_slots import ResidualFiles, ResidualsByCall

        slots: ResidualSlots = ResidualsByCall(
            f"device {name}",
            load=lambda slot: kept.get((part, slot)),
            save=lambda slot, data: kept.__setitem__((part, slot), data),
            delete=lambda slot: kept.pop((part, slot), None),
        )
        if out is not None:
            slots = ResidualFiles(out / LOCAL_FOLDER, name=name, run_id=0, is_durable=False)
        return ErrorFeedback(slots, self.trainer.image.layout.digest)

    def hardware(self, part: int, *, round_number: int) -> Hardware:
        """Return a device's hardware at the start of a round; a cached object may be reused."""
        if self.has_slow_links or self.fleet.device(part).jitter:
            with at_round(round_number):
                layout = self.trainer.image.layout
                return virtual_hardware(self.identity(part), self.settings, layout)
        on_battery = is_on_battery(self.fleet, part, round_number=round_number)
        cached = self._steady.get((part, on_battery))
        if cached is not None:
            hardware, bytes_per_example = cached
            hardware.begin_round(bytes_per_example)
            return hardware
        hardware = self._build_hardware(part, on_battery)
        if len(self._steady) >= self.cache_size:
            self._steady.clear()
        self._steady[part, on_battery] = hardware, hardware.memory.bytes_per_example
        return hardware

    def _build_hardware(self, part: int, on_battery: bool) -> VirtualHardware:
        layout = self.trainer.image.layout
        return build_hardware(self.identity(part), self.settings, layout, is_on_battery=on_battery)

    def training_examples(self, part: int, plan: Plan) -> Examples:
        """Return the examples that a device trains on: all without the held-out ones."""
        if plan.held_out_fraction == 0:
            return self.examples(part)
        training, _ = self.trainer.split(self.identity(part), plan)
        return training

    def num_training_examples(self, parts: Ints, plan: Plan) -> Ints:
        """Return the number of examples that each of these devices trains on."""
        for part in parts[self._num_training_examples[parts] == 0].tolist():
            self._num_training_examples[part] = len(self.training_examples(part, plan))
        return self._num_training_examples[parts]

    @functools.cached_property
    def has_slow_links(self) -> bool:
        """Whether a fault slows down some links in some rounds."""
        return bool(self.fleet.faults.slow_link)

    @functools.cached_property
    def changes_windows(self) -> bool:
        """Whether devices cut their micro-batches by length, or answer late, whatever is planned.

        A feature of the user's may act without terms in the plan.
        """
        settings, task = self.settings, self.trainer.task
        return (
            settings.asynchronous.is_on
            or settings.feature.name is not None
            or settings.local.keeps_state
            or bool(self.fleet.faults.absence)
            or hasattr(task, "lengths")
            or hasattr(task, "collate")
        )

    @functools.cached_property
    def has_liars(self) -> bool:
        """Whether some devices falsify their updates in some rounds."""
        return bool(self.fleet.faults.liar)

    def absent_seconds(self, part: int, *, round_number: int) -> float:
        """Return how much later a device answers in a round because it is away."""
        if not self.fleet.faults.absence:
            return 0.0
        moment = self.fleet.moment(part, round_number=round_number)
        return absent_seconds(self.fleet.faults, moment)

    def falsifications(self, part: int, *, round_number: int) -> tuple[LiarFault, ...]:
        """Return how a device falsifies its update in a round."""
        if not self.has_liars:
            return ()
        return falsifications(self.fleet.faults, self.fleet.moment(part, round_number=round_number))

    def describe(self, part: int, request: DescribeRequest, *, round_number: int) -> DeviceReport:
        """Return a device's report about itself.

        Raises:
            HeadwaterError: see ``Trainer.describe``.
        """
        if request.left_out is not None:
            log.info("device %d is not invited to this round: %s", part, request.left_out)
        hardware = self.hardware(part, round_number=round_number)
        return self.trainer.describe(self.identity(part), hardware, request)
