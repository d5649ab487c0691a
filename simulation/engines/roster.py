"""The connected devices of the simulated fleet, and their descriptions of themselves.

A device describes itself when its report is looked up, and not before: of a million devices of
which a thousand are invited, only these are ever made. Its report is the one that it would have
sent in the first round in which it was connected.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, KeysView, Mapping
from itertools import islice
from typing import Any

from headwater.common.errors import TASK_MISTAKES, HeadwaterError, without_frames
from headwater.common.messages import DescribeRequest, DeviceReport
from headwater.common.settings.schema import Settings
from headwater.server.fleet import Counts
from headwater.server.planning.cohort import ConnectedClients
from headwater.server.refused_devices import RefusedDevices
from headwater.simulation.fleet.devices import (
    DESCRIBED,
    FIRST_DESCRIBED,
    Devices,
    by_round,
    described_in,
)
from headwater.simulation.fleet.random_events import is_connected

log = logging.getLogger(__name__)


class FleetRoster(Mapping[str, DeviceReport]):
    """The connected devices' reports by name, without devices that cannot describe themselves."""

    def __init__(self, settings: Settings, devices: Devices) -> None:
        self.refused: dict[int, HeadwaterError] = {}
        """Why each device that could not describe itself failed."""
        self._settings = settings
        self._devices = devices
        self._request: DescribeRequest | None = None
        self._connected: Collection[int] = range(0)
        self._keys = KeysView(self)
        self._names: list[str] | None = None
        """The names, once they have been iterated over."""
        self._since: dict[int, int] = {}
        """The round in which a device described itself, if it was not ``_first_round``."""
        self._first_round = 0
        self._reports: dict[int, DeviceReport] = {}
        size = settings.cohort.size
        self._cache_size = (
            devices.num_devices if size is None else max(devices.cache_size, 2 * size)
        )
        """The number of reports that are kept; a device makes a dropped report again."""
        self._requests: Mapping[str, DescribeRequest] = {}
        self._refusals = RefusedDevices()
        self._absent: set[int] = set()
        """Devices that were not connected in a look since the last call of ``clients``."""
        self._described: set[str] = set()

    def state(self) -> dict[str, Any]:
        """Return when the devices described themselves, for a checkpoint."""
        return {FIRST_DESCRIBED: self._first_round, DESCRIBED: by_round(self._since)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned: each device says again what it said then."""
        self._first_round, self._since = state.get(FIRST_DESCRIBED, 0), described_in(state)

    def look(self, request: DescribeRequest, *, round_number: int, look: int) -> None:
        """Find the devices that are connected for a round, at its n-th look from 0."""
        self._request = request
        self._first_round = self._first_round or round_number
        population = range(self._devices.num_devices)
        if self._devices.fleet.fleet_file is None:
            self._connected = population
        else:
            self._keys, self._names = KeysView(self), None
            before = self._since
            self._connected = self._since = {
                part: before.get(part, round_number)
                for part in population
                if is_connected(self._devices.fleet, part, round_number=round_number, look=look)
            }
            self._absent |= before.keys() - self._since.keys()
            for known in (self._reports, self.refused):
                for part in known.keys() - self._since.keys():
                    del known[part]
        self._describe_again(round_number)

    def clients(self) -> ConnectedClients:
        """Return the connected clients, and what changed since the last call."""
        name_of = self._devices.identities.name
        gone = {part for part in self._absent if name_of(part) not in self}
        described = self._described | {name_of(part) for part in self._absent - gone}
        self._absent, self._described = set(), set()
        return ConnectedClients(
            reports=self, described=described, disconnected={name_of(part) for part in gone}
        )

    def ask_again(self, requests: Mapping[str, DescribeRequest]) -> None:
        """Let devices describe themselves again at the next look, if they are connected then."""
        self._requests = requests

    def _describe_again(self, round_number: int) -> None:
        requests, self._requests = self._requests, {}
        for name, request in requests.items():
            part = self._devices.identities.part(name)
            if name not in self:
                continue
            try:
                report = self._devices.describe(part, request, round_number=round_number)
            except HeadwaterError as error:
                log.warning("a device keeps its old description: %s: %s", error.code, error)
            else:
                self._since[part] = round_number
                self._keep(part, report)
                self._described.add(name)

    def _keep(self, part: int, report: DeviceReport) -> None:
        if len(self._reports) >= self._cache_size:
            self._reports.clear()
        self._reports[part] = report

    def has(self, number: int, counts: Counts) -> bool:
        """Whether at least so many connected devices can describe themselves, and count."""
        reports = (self.get(name) for name in self)
        able = (report for report in reports if report is not None and counts(report))
        return sum(1 for _ in islice(able, number)) == number

    def log_refusals(self) -> None:
        """Log the devices that could not describe themselves since the last call, and why."""
        self._refusals.log()

    def take_error(self) -> HeadwaterError | None:
        """Return the first reason why devices cannot describe themselves; None if all can."""
        return self._refusals.take_error() or next(iter(self.refused.values()), None)

    def keys(self) -> KeysView[str]:
        """Return the names: the same object as long as they are the same."""
        return self._keys

    def __len__(self) -> int:
        return len(self._connected) - len(self.refused)

    def __iter__(self) -> Iterator[str]:
        if self._names is None:
            name_of = self._devices.identities.name
            self._names = [name_of(part) for part in self._connected if part not in self.refused]
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        part = self._devices.identities.part(str(name))
        return part in self._connected and part not in self.refused

    def __getitem__(self, name: str) -> DeviceReport:
        part = self._devices.identities.part(name)
        report = self._reports.get(part)
        if report is not None:
            return report
        if self._request is None or name not in self:
            raise KeyError(name)
        since = self._since.get(part, self._first_round)
        try:
            report = self._devices.describe(part, self._request, round_number=since)
        except TASK_MISTAKES:
            raise
        except HeadwaterError as error:
            self._refusals.add(name, error)
            self.refused[part] = without_frames(error)
            self._absent.add(part)
            self._keys, self._names = KeysView(self), None
            raise KeyError(name) from None
        self._keep(part, report)
        return report
