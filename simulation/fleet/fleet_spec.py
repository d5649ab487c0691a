"""The part of the settings that determines a simulated fleet, and the checks of those settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.common.errors import SettingsError
from headwater.common.settings.fields import has_labels
from headwater.common.settings.rounds import MIN_MEMBERS
from headwater.common.settings.schema import Settings
from headwater.common.user_code.bundled_examples import existing_or_bundled
from headwater.common.wording import counted
from headwater.simulation.fleet.faults import (
    EVALUATE,
    NO_FAULTS,
    TRAIN,
    FleetFaults,
    Moment,
    read_faults,
)
from headwater.simulation.fleet.identities import EQUAL, device_names
from headwater.simulation.fleet.profiles import (
    EQUAL_DEVICE,
    SimulatedDevice,
    draw_device,
)

if TYPE_CHECKING:
    from headwater.simulation.fleet.fleet_file import FleetFile

COUNT = "leave --clients out, or change the fleet's file or the data"
ONE_PATH = (
    "give each device a path of its own with a pattern such as 'folder/*', in quotes; or split "
    "this data set over the devices with --partition iid; or leave --clients out"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSpec:
    """A fleet's seed, size and files: with a device's number and a round, all that chance needs."""

    seed: int
    num_devices: int
    fleet_file: Path | None
    faults_file: Path | None
    dropout: float
    """The probability that an invited device vanishes in a round."""
    is_equal: bool = False
    """Whether all devices are ``EQUAL_DEVICE``; there is no fleet file then."""
    is_masked: bool
    """Whether updates are masked, so that a device may vanish in a phase of that protocol."""

    def device(self, part: int) -> SimulatedDevice:
        """Return the device of this number: from the fleet's file if there is one, else drawn."""
        if self.is_equal:
            return EQUAL_DEVICE
        if self.fleet_file is None:
            return draw_device(self.seed, part)
        return _fleet_file(self.fleet_file).devices[part]

    @property
    def faults(self) -> FleetFaults:
        """The faults of the fleet's file and those of the faults file."""
        faults = NO_FAULTS if self.fleet_file is None else _fleet_file(self.fleet_file).faults
        return faults if self.faults_file is None else faults + read_faults(self.faults_file)

    def moment(self, part: int, *, round_number: int) -> Moment:
        """Return what a device's faults in a round depend on."""
        return Moment(seed=self.seed, num_devices=self.num_devices, part=part, round=round_number)


def _fleet_file(path: Path) -> FleetFile:
    from headwater.simulation.fleet.fleet_file import read_fleet_file

    return read_fleet_file(path)


def fleet_spec(settings: Settings) -> FleetSpec:
    """Return the fleet of settings that ``with_fleet`` has returned."""
    chosen = settings.simulation
    is_equal = _is_equal(settings)
    return FleetSpec(
        seed=settings.seed,
        num_devices=chosen.clients,
        fleet_file=None if is_equal else chosen.fleet,
        is_equal=is_equal,
        faults_file=chosen.faults,
        dropout=chosen.dropout,
        is_masked=settings.secure.aggregation != "off",
    )


def with_fleet(settings: Settings) -> Settings:
    """Return the settings with the devices of the fleet's file, and those of their own data.

    The result names each device's path. It is the same for settings that have been through here.

    Raises:
        SettingsError: a file is wrong, nothing matches ``simulation.data``, it contradicts another
            setting, another number of clients is set, a round needs more clients than there are, a
            fault affects no device, or the engine cannot simulate a file's content.
    """
    if settings.simulation.faults is not None:
        settings = _with(settings, faults=existing_or_bundled(settings.simulation.faults))
    chosen = settings.simulation
    if chosen.fleet is not None and not _is_equal(settings):
        path = existing_or_bundled(chosen.fleet)
        fleet = _fleet_file(path)
        if not all(device.availability.is_always for device in fleet.devices):
            _check_engine(settings, f"{path} sets availability")
        settings = _with(settings, fleet=path)
        number = len(fleet.devices)
        settings = _with_clients(
            settings, number, f"{path} has {counted(number, 'device')}", remedy=COUNT
        )
        if fleet.data and chosen.data not in (None, fleet.data):
            raise SettingsError(
                f"{path} names the data of its devices, and simulation.data (--data) names others",
                remedy="leave --data out, or the key data in the file",
            )
        settings = _with(settings, data=fleet.data or chosen.data)
    if settings.simulation.data is not None:
        settings = _with_data(settings, settings.simulation.data)
    num_clients = settings.simulation.clients
    if settings.num_clients_needed > num_clients:
        raise too_few_simulated(settings)
    size = settings.cohort.size
    if size is not None and size > num_clients:
        raise SettingsError(
            f"a cohort of {size} clients is set, and the simulator has {num_clients}",
            remedy=f"raise --clients to {size}, or lower --cohort-size; without it a round invites "
            "all",
        )
    _check_labels(settings)
    _check_faults(settings)
    return settings


def _check_labels(settings: Settings) -> None:
    """Check that enough simulated devices have the labels of the run.

    Raises:
        SettingsError: there are fewer than a round needs.
    """
    wanted, needed = settings.cohort.devices, settings.num_clients_needed
    if wanted is None:
        return
    fleet = fleet_spec(settings)
    own = [fleet.device(part).labels for part in range(fleet.num_devices)]
    number = sum(has_labels(one, wanted) for one in own)
    if number < needed:
        known = sorted({label for one in own if one is not None for label in one.split(",")})
        raise SettingsError(
            f"--devices {wanted} fits {number} of {counted(fleet.num_devices, 'device')}, and a "
            f"round needs {needed}",
            remedy=f"choose by the labels that there are: {', '.join(known[:20])}"
            if known
            else "give the devices of a --fleet file labels: labels = 'site=lab'",
        )


def _is_equal(settings: Settings) -> bool:
    return settings.simulation.fleet == EQUAL and not EQUAL.is_file()


def too_few_simulated(settings: Settings) -> SettingsError:
    """Return the error for a round that needs more clients than are simulated."""
    needed, secure = settings.num_clients_needed, settings.secure
    remedy = f"raise --clients to {needed}"
    if secure.aggregation == "off" or secure.min_members < needed:
        remedy = f"lower --min-clients, or {remedy}"
    elif secure.min_members > MIN_MEMBERS:
        remedy = f"lower --min-members, on the server and on every device, or {remedy}"
    else:
        remedy = f"{remedy}: a masked session has at least {MIN_MEMBERS} members"
    return SettingsError(
        f"a round needs {needed} clients and the simulator has {settings.simulation.clients}",
        remedy=remedy,
    )


def _with(settings: Settings, **changed: Any) -> Settings:
    return settings.model_copy(
        update={"simulation": settings.simulation.model_copy(update=changed)}
    )


def _with_clients(settings: Settings, number: int, source: str, *, remedy: str) -> Settings:
    """Set the number of clients that a source determines; refuse another one."""
    chosen = settings.simulation
    if "clients" in chosen.model_fields_set and chosen.clients != number:
        raise SettingsError(
            f"{source}, and simulation.clients is set to {chosen.clients}", remedy=remedy
        )
    return _with(settings, clients=number)


def _with_data(settings: Settings, data: str | tuple[str, ...]) -> Settings:
    """Set the devices' own paths and their number; with a partition, the one path to split."""
    from headwater.common.data.data_paths import find_data

    found = find_data(data, source="simulation.data (--data)", folder=Path())
    settings = _with(settings, data=found)
    if settings.partition.kind == "task":
        device_names(found)  # raises an error if two are the same
        if len(found) == 1:
            source, remedy = f"--data names one path, {found[0]}, the data of 1 device", ONE_PATH
        else:
            source, remedy = f"--data matches the data of {counted(len(found), 'device')}", COUNT
        return _with_clients(settings, len(found), source, remedy=remedy)
    if len(found) > 1:
        raise SettingsError(
            f"--data matches {len(found)} files and folders, one a device, and --partition "
            f"{settings.partition.kind} splits one data set over all devices",
            remedy="leave --partition out, or name the one data set that it splits",
        )
    return settings


def _check_engine(settings: Settings, reason: str) -> None:
    """Refuse the engine flower-ray, which simulates neither availability nor liars."""
    engine = settings.simulation.engine
    if engine == "flower-ray":
        raise SettingsError(
            f"{reason}, which the engine {engine} does not simulate",
            remedy="take --engine in-process or grpc, or a file without it",
        )


def _check_faults(settings: Settings) -> None:
    """Refuse faults that could not affect any device in this run.

    Raises:
        SettingsError: a device does not exist, the run has no such phase, or the engine does not
            simulate the fault.
    """
    fleet = fleet_spec(settings)
    faults, num_devices = fleet.faults, fleet.num_devices
    for fault in faults.all:
        missing = [part for part in fault.devices or () if part >= num_devices]
        if missing:
            raise SettingsError(
                f"a fault names device {missing[0]}, and there are {num_devices}, 0 to "
                f"{num_devices - 1}",
                remedy="name existing devices, or a share of all",
            )
    for dropout in faults.dropout:
        is_secure = dropout.phase not in (TRAIN, EVALUATE)
        if is_secure and not fleet.is_masked:
            raise SettingsError(
                f"a dropout at {dropout.phase}, a phase of secure aggregation, which is off",
                remedy="set --secure-aggregation, or take the phase train",
            )
        if dropout.phase == EVALUATE and not settings.evaluation.on_devices:
            raise SettingsError(
                "a dropout at evaluate, and nothing is evaluated on devices",
                remedy="set --evaluate-on-devices, or take the phase train",
            )
    if faults.liar:
        _check_engine(settings, "there are liars")
    is_masked = fleet.is_masked and not settings.asynchronous.is_on
    is_simulated_here = settings.simulation.engine in ("in-process", "ray")
    if faults.absence and (not is_simulated_here or is_masked):
        raise SettingsError(
            "there are absences, which only --engine in-process simulates, and under masks only in "
            "asynchronous rounds",
            remedy="leave out --engine, add --asynchronous or leave out --secure-aggregation, or "
            "leave out the tables [[absence]]",
        )
