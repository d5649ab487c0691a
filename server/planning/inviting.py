"""Who is invited to a round: those who are here, as far as what is known of them lets them.

How a cohort is chosen is ``headwater.server.planning.round_plans.cohort``'s; here a run's devices are met: what they tell is taken
over, and who is too slow is found.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import compress

from headwater.common.messages import DeviceReport
from headwater.common.settings.schema import Settings
from headwater.server.planning import plan_reasons as reasons
from headwater.server.planning.cohort import Invited, Laps, invite
from headwater.server.planning.device_estimates import MOST_TIMES_LATE, NOTHING, Learned
from headwater.server.planning.planner import Device, Link, too_slow


@dataclass(frozen=True, kw_only=True, slots=True)
class Guests:
    """A round's cohort. ``news`` are those who are other than in the round before; None: all."""

    invited: Invited
    devices: Mapping[str, Device]
    news: Collection[str] | None = None


class Inviting:
    """The devices that a run has met."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # With K set no speed is asked for, and nobody is too slow.
        is_k_set = settings.plan.accumulation_steps is not None
        self._deadline_seconds = None if is_k_set else settings.cohort.deadline_seconds
        self._met: dict[str, tuple[DeviceReport, Device]] = {}
        self._laps = Laps()
        self._names: Collection[str] = ()
        self._all: Guests | None = None
        """The guests of the last round, if all who were here were invited."""

    def guests(
        self,
        here: Mapping[str, DeviceReport],
        learned: dict[str, Learned],
        *,
        culprits: Collection[str],
        link: Link,
        round_number: int,
    ) -> Guests:
        """Choose the cohort, and meet those who come into question: ``learned`` has them then."""
        names = here.keys()
        is_same = names is self._names  # the same object tells that nobody came or went
        self._names = names
        if not is_same:
            self._miss(here, learned)
        elif self._all is not None and not culprits:
            again = self._again(self._all, here, learned, link)
            if again is not None:
                return again
        devices: dict[str, Device] = {}
        why: dict[str, str] = {}

        def slowness(name: str) -> float | None:
            if name in culprits:
                return None
            try:
                report = here[name]
            except KeyError:  # it turns out to be unable to describe itself
                return None
            device = devices[name] = self._meet(name, report, learned)
            found, said = self._slowness(device, link)
            if said is not None:
                why[name] = said
            return found

        cohort = self._settings.cohort
        invited = invite(
            names,
            size=cohort.size,
            seed=self._settings.seed,
            round_number=round_number,
            slowness=slowness,
            explain=why.__getitem__,
            waiting_since={
                name: one.waiting_since
                for name, one in learned.items()
                if one.waiting_since is not None and name in here
            },
            within_rounds=cohort.invite_within_rounds,
            min_clients=cohort.min_clients,
            laps=self._laps,
        )
        anyway = invited.asked_anyway
        guests = Guests(
            invited=invited,
            devices={
                name: replace(devices[name], asked_anyway=anyway[name])
                if name in anyway
                else devices[name]
                for name in invited.names
            },
        )
        # The others may be a million; but who is asked again is met with another report.
        self._met = {
            name: met
            for name, met in self._met.items()
            if name in devices or learned[name].is_outdated
        }
        is_all = not why and len(guests.devices) == len(here)
        self._all = guests if is_all else None
        return guests

    def _again(
        self,
        last: Guests,
        here: Mapping[str, DeviceReport],
        learned: dict[str, Learned],
        link: Link,
    ) -> Guests | None:
        """Invite all again, unless one has become too slow; nobody was asked to speak anew."""
        before = (device.learned for device in last.devices.values())
        now = map(learned.__getitem__, last.devices)
        news = list(compress(last.devices, map(operator.is_not, now, before)))
        met = {name: self._meet(name, here[name], learned) for name in news}
        if any(self._slowness(device, link)[1] is not None for device in met.values()):
            return None
        self._all = replace(last, devices={**last.devices, **met}, news=news)
        return self._all

    def _miss(self, here: Mapping[str, DeviceReport], learned: dict[str, Learned]) -> None:
        """Take note of who is gone."""
        for name, one in learned.items():
            if name not in here:
                learned[name] = one.gone()
                self._met.pop(name, None)

    def _meet(self, name: str, report: DeviceReport, learned: dict[str, Learned]) -> Device:
        """Take over what a device that is here tells, as far as it is news."""
        known, met = learned.get(name, NOTHING), self._met.get(name)
        # One that is asked again stands with its old report until the answer is here.
        if met is None or met[0] is not report:
            learned[name] = known = known.told(report)
        elif met[1].learned is known:
            return met[1]
        device = Device(name=name, num_examples=report.num_examples, learned=known)
        self._met[name] = report, device
        return device

    def _slowness(self, device: Device, link: Link) -> tuple[float, str | None]:
        """Return by how much a device is too slow, and the reason; 0 and None if it is not.

        Who comes too late time and again is left out like who is too slow, or a device that never
        answers would hold up every round.
        """
        times_late = device.learned.times_late
        if times_late >= MOST_TIMES_LATE:
            return float(times_late), reasons.of_coming_late(times_late)
        found = too_slow(device, deadline_seconds=self._deadline_seconds, link=link)
        if found is None:
            return 0.0, None
        return found.seconds / found.of_seconds, reasons.of_leaving_out(found)
