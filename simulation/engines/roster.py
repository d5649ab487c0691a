"""Who of the simulated fleet is there, and what each says of itself once somebody asks.

A device describes itself when its turn comes, and not before: of a million of which a thousand are
invited, no more than those are ever made. What it says is what it would have said in the first
round in which it was there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, KeysView, Mapping
from itertools import islice

from headwater.common.errors import HeadwaterError
from headwater.common.messages import DescribeRequest, DeviceReport
from headwater.common.settings.schema import Settings
from headwater.simulation.fleet.devices import Devices
from headwater.simulation.fleet.random_events import is_there

log = logging.getLogger(__name__)


class Roster(Mapping[str, DeviceReport]):
    """The reports of those who are there, by name; none of who turns out unable to make one."""

    def __init__(self, settings: Settings, devices: Devices) -> None:
        self.refused: dict[int, HeadwaterError] = {}
        """Who could not describe itself, and why."""
        self._settings = settings
        self._devices = devices
        self._request: DescribeRequest | None = None
        self._here: Collection[int] = range(0)
        self._keys = KeysView(self)
        self._since: dict[int, int] = {}
        """The round in which a device said what it is, if it was not the first."""
        self._first_round = 0
        self._reports: dict[int, DeviceReport] = {}
        size = settings.cohort.size
        self._most_kept = devices.num_devices if size is None else max(devices.most_held, 2 * size)
        """Reports that are kept; of a dropped one the device says the same again."""
        self._again: Mapping[str, DescribeRequest] = {}

    def look(self, request: DescribeRequest, *, round_number: int, look: int) -> None:
        """See who is there for a round, at the n-th look from 0."""
        self._request = request
        self._first_round = self._first_round or round_number
        everybody = range(self._devices.num_devices)
        if self._settings.simulation.fleet is None:
            self._here = everybody
        else:
            self._keys = KeysView(self)
            self._since = {
                part: self._since.get(part, round_number)
                for part in everybody
                if is_there(self._settings, part, round_number=round_number, look=look)
            }
            self._here = self._since
            self._forget_who_is_gone()
        self._hear_again(round_number)

    def _forget_who_is_gone(self) -> None:
        for part in self._reports.keys() - self._since.keys():
            del self._reports[part]
        for part in self.refused.keys() - self._since.keys():
            del self.refused[part]

    def ask_again(self, requests: Mapping[str, DescribeRequest]) -> None:
        """Let devices describe themselves anew at the next look, as far as they are there."""
        self._again = requests

    def _hear_again(self, round_number: int) -> None:
        requests, self._again = self._again, {}
        for name, request in requests.items():
            part = int(name)
            if name in self:
                try:
                    found = self._devices.describe(part, request, round_number=round_number)
                except HeadwaterError as error:
                    log.warning("a device stays as it was: %s: %s", error.code, error)
                else:
                    self._since[part] = round_number
                    self._keep(part, found)

    def _keep(self, part: int, report: DeviceReport) -> None:
        if len(self._reports) >= self._most_kept:
            self._reports.clear()
        self._reports[part] = report

    def has(self, number: int) -> bool:
        """Whether so many are there who can describe themselves."""
        able = (name for name in self if self.get(name) is not None)
        return sum(1 for _ in islice(able, number)) == number

    def keys(self) -> KeysView[str]:
        """Return the names: the same object as long as they are the same."""
        return self._keys

    def __len__(self) -> int:
        return len(self._here) - len(self.refused)

    def __iter__(self) -> Iterator[str]:
        if not self.refused:
            return map(str, self._here)
        return (str(part) for part in self._here if part not in self.refused)

    def __contains__(self, name: object) -> bool:
        part = int(str(name))
        return part in self._here and part not in self.refused

    def __getitem__(self, name: str) -> DeviceReport:
        part = int(name)
        found = self._reports.get(part)
        if found is not None:
            return found
        if self._request is None or name not in self:
            raise KeyError(name)
        since = self._since.get(part, self._first_round)
        try:
            found = self._devices.describe(part, self._request, round_number=since)
        except HeadwaterError as error:
            log.warning("a device was refused: %s: %s", error.code, error)
            self.refused[part] = error
            self._keys = KeysView(self)
            raise KeyError(name) from error
        self._keep(part, found)
        return found
