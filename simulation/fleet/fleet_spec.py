"""The part of the settings that determines a simulated fleet, and the checks of those settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings
from headwater.simulation.fleet.faults import (
    EVALUATE,
    NO_FAULTS,
    TRAIN,
    FleetFaults,
    Moment,
    read_faults,
)
from headwater.simulation.fleet.profiles import (
    SimulatedDevice,
    draw_device,
    read_fleet,
    read_fleet_file,
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
    is_masked: bool
    """Whether updates are masked, so that a device may vanish in a phase of that protocol."""

    def device(self, part: int) -> SimulatedDevice:
        """Return the device of this number: from the fleet's file if there is one, else drawn."""
        if self.fleet_file is None:
            return draw_device(self.seed, part)
        return read_fleet(self.fleet_file)[part]

    @property
    def faults(self) -> FleetFaults:
        """The faults of the fleet's file and those of the faults file."""
        faults = NO_FAULTS if self.fleet_file is None else read_fleet_file(self.fleet_file)[1]
        return faults if self.faults_file is None else faults + read_faults(self.faults_file)

    def moment(self, part: int, *, round_number: int) -> Moment:
        """Return what a device's faults in a round depend on."""
        return Moment(seed=self.seed, num_devices=self.num_devices, part=part, round=round_number)


def fleet_spec(settings: Settings) -> FleetSpec:
    """Return the fleet of settings that ``with_fleet`` has returned."""
    chosen = settings.simulation
    return FleetSpec(
        seed=settings.seed,
        num_devices=chosen.clients,
        fleet_file=chosen.fleet,
        faults_file=chosen.faults,
        dropout=chosen.dropout,
        is_masked=settings.secure.aggregation != "off",
    )


def with_fleet(settings: Settings) -> Settings:
    """Return the settings with the number of devices in the fleet's file, if there is a file.

    Raises:
        SettingsError: a file is wrong, another number of clients is set, a round needs more clients
            than there are, a fault affects no device, or the engine cannot simulate a file's
            content.
    """
    chosen = settings.simulation
    if chosen.fleet is not None:
        devices = read_fleet(chosen.fleet)
        if "clients" in chosen.model_fields_set and chosen.clients != len(devices):
            raise SettingsError(
                f"{chosen.fleet} has {len(devices)} devices, and simulation.clients is set to "
                f"{chosen.clients}",
                remedy="leave --clients out, or change the counts in the file",
            )
        if not all(device.availability.is_always for device in devices):
            _check_engine(settings, f"{chosen.fleet} sets availability")
        chosen = chosen.model_copy(update={"clients": len(devices)})
        settings = settings.model_copy(update={"simulation": chosen})
    if settings.cohort.min_clients > chosen.clients:
        raise SettingsError(
            f"a round needs {settings.cohort.min_clients} clients and the simulator has "
            f"{chosen.clients}",
            remedy="lower --min-clients, or raise --clients",
        )
    _check_faults(settings)
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
