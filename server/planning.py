"""A round's plans, from what the devices tell: who is invited, who is left out, who does how much.

The decisions are pure functions elsewhere (``server.cohort`` who, ``server.planner`` how much,
``server.learned`` what is known of each); here they meet the state of a run.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.errors import EmptyUpdate, LateUpdate, TooFewClients
from common.parameters import ModelLayout
from common.settings import Evaluation, Settings
from common.update import DescribeRequest, DeviceReport, Plan, Reported
from server import reasons
from server.cohort import Invited, Laps, dataset_weights, invite
from server.culprits import LeftOut, convicted, left_out
from server.learned import MOST_TIMES_LATE, NOTHING, Learned
from server.open_round import OpenRound
from server.planner import Assignment, Device, Kind, Link, assign, too_slow
from server.target import Target

log = logging.getLogger(__name__)

SHOWN = 3  # devices that a line of the log names


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A round's plans, and who has none."""

    plans: dict[str, Plan]
    left_out: dict[str, str]
    """Who is too slow for the deadline, or made a secure session fail, and why."""
    num_too_slow: int
    num_bounded: int
    """Devices that claim more than is believed: of their speed, or of what they own."""


class Planning:
    """What a run knows of its devices, and the plans that follow from it."""

    def __init__(self, settings: Settings, target: Target, layout: ModelLayout) -> None:
        self.learned: dict[str, Learned] = {}
        self.owned: dict[str, int] = {}
        """The examples of each device in the round that was planned last."""
        self._settings = settings
        self._target = target
        self._layout = layout
        self._met: dict[str, tuple[DeviceReport, Device]] = {}
        self._laps = Laps()
        self._assigned: dict[str, tuple[Assignment, Kind]] = {}
        self._names: Collection[str] = ()
        self._unbelieved: set[str] = set()
        self._asked_anyway: set[str] = set()
        self.culprits: dict[str, LeftOut] = {}

    def leave_out(self, found: Mapping[str, str], *, round_number: int) -> None:
        """Leave who made a secure session fail out of what follows (``server.culprits``)."""
        self.culprits = convicted(self.culprits, found, round_number=round_number)
        for name, why in found.items():
            through = self.culprits[name].through_round
            log.warning("%s is left out through round %d: %s", name, through, why)

    def describe_request(self, *, left_out: str | None = None) -> DescribeRequest:
        """Return what every device is asked when it is first seen, and when it is left out."""
        return DescribeRequest(
            run_seed=self._settings.seed,
            wants_speed=self._settings.plan.accumulation_steps is None,
            layout_digest=self._layout.digest,
            num_parameters=self._layout.num_parameters,
            held_out_fraction=held_out_fraction(self._settings.evaluation),
            left_out=left_out,
        )

    def plan(
        self,
        reports: Mapping[str, DeviceReport],
        *,
        round_number: int,
        counted: Mapping[str, int],
        turn_seconds: float,
    ) -> Planned:
        """Choose a round's cohort and what each member is asked to do.

        ``counted`` is the last round that each device's update was part of.

        Raises:
            TooFewClients: --cohort-size is below --min-clients.
        """
        cohort = self._settings.cohort
        link = Link(
            image_bytes=self._layout.num_bytes,
            update_bytes=4 * self._layout.num_parameters,
            turn_seconds=turn_seconds,
        )
        self._miss(reports)
        devices: dict[str, Device] = {}
        culprits = left_out(self.culprits, reports, round_number=round_number)
        invited = self._invite(reports, devices, culprits, link, round_number)
        if len(invited.names) < cohort.min_clients:
            why = "".join(f"; {name} is left out {said}" for name, said in culprits.items())
            raise TooFewClients(
                f"round {round_number}: {len(invited.names)} clients are invited, at least "
                f"{cohort.min_clients} are needed{why}",
                remedy="raise --cohort-size, or lower --min-clients",
            )
        devices |= {
            name: replace(devices[name], asked_anyway=why)
            for name, why in invited.asked_anyway.items()
        }
        asked = [devices[name] for name in invited.names]
        assigned = self._assign(asked, link)
        self.owned = {device.name: device.num_examples for device in asked}
        weights = dataset_weights(self.owned) if cohort.weighting == "dataset" else {}
        unbelieved = {name for name, (one, _) in assigned.items() if one.is_bounded}
        unbelieved |= {name for name, weight in weights.items() if weight < self.owned[name]}
        self._log(round_number, invited, unbelieved)
        self._asked_anyway = set(invited.asked_anyway)
        for name in invited.names:
            if self.learned[name].waiting_since is not None:
                self.learned[name] = self.learned[name].asked()
        for name in invited.left_out:
            self.learned[name] = self.learned[name].left_out(round_number)
        common = self._common_plan(round_number)
        made: dict[tuple[Kind, int | None, int | None], Plan] = {}
        plans = {}
        for name in invited.names:
            assignment, kind = assigned[name]
            key = (kind, counted.get(name), weights.get(name))
            plan = made.get(key)
            if plan is None:  # devices that are asked the same share one
                plan = self._plan(assignment, common, counted=key[1], weigh_as=key[2])
                made[key] = plan
            plans[name] = plan
        return Planned(
            plans=plans,
            left_out=invited.left_out | culprits,
            num_too_slow=len(invited.left_out),
            num_bounded=len(unbelieved),
        )

    def _assign(self, asked: Sequence[Device], link: Link) -> dict[str, tuple[Assignment, Kind]]:
        """Assign a quota to every device of a cohort; beside it the kind of the assignment.

        With K set what a device is asked depends on it alone, and stays as long as it is the same.
        """
        target = self._target.open(num_invited=len(asked))
        is_k_set = self._settings.plan.accumulation_steps is not None
        last = self._assigned if is_k_set else {}
        kept = {}
        for device in asked:
            was = last.get(device.name)
            if was is not None and was[0].device is device:
                kept[device.name] = was
        made = assign(
            [device for device in asked if device.name not in kept] if kept else asked,
            self._settings.plan,
            target=target,
            deadline_seconds=self._settings.cohort.deadline_seconds,
            link=link,
        )
        self._assigned = kept | {name: (one, one.kind) for name, one in made.items()}
        return self._assigned

    def _miss(self, here: Mapping[str, DeviceReport]) -> None:
        """Take note of who is gone; the same object of names tells that nobody is."""
        names = here.keys()
        if names is self._names:
            return
        self._names = names
        for name, learned in self.learned.items():
            if name not in here:
                self.learned[name] = learned.gone()
                self._met.pop(name, None)

    def _meet(self, name: str, report: DeviceReport) -> Device:
        """Take over what a device that is here tells, as far as it is news."""
        learned, met = self.learned.get(name, NOTHING), self._met.get(name)
        # One that is asked again stands with its old report until the answer is here.
        if met is None or met[0] is not report:
            self.learned[name] = learned = learned.told(report)
        elif met[1].learned is learned:
            return met[1]
        device = Device(name=name, num_examples=report.num_examples, learned=learned)
        self._met[name] = report, device
        return device

    def _invite(
        self,
        here: Mapping[str, DeviceReport],
        devices: dict[str, Device],
        culprits: Container[str],
        link: Link,
        round_number: int,
    ) -> Invited:
        """Choose the cohort, and meet those who come into question: they are then in ``devices``.

        With K set no speed is asked for, and nobody is too slow. Who comes too late time and again
        is left out like who is too slow, or a device that never answers would hold up every round.
        """
        cohort = self._settings.cohort
        is_k_set = self._settings.plan.accumulation_steps is not None
        deadline = None if is_k_set else cohort.deadline_seconds
        why: dict[str, str] = {}

        def slowness(name: str) -> float | None:
            if name in culprits:
                return None
            try:
                report = here[name]
            except KeyError:  # it turns out to be unable to describe itself
                return None
            device = devices[name] = self._meet(name, report)
            if device.learned.times_late >= MOST_TIMES_LATE:
                why[name] = reasons.of_coming_late(device.learned.times_late)
                return float(device.learned.times_late)
            found = too_slow(device, deadline_seconds=deadline, link=link)
            if found is None:
                return 0.0
            why[name] = reasons.of_leaving_out(found)
            return found.seconds / found.of_seconds

        return invite(
            here.keys(),
            size=cohort.size,
            seed=self._settings.seed,
            round_number=round_number,
            slowness=slowness,
            explain=why.__getitem__,
            waiting_since={
                name: learned.waiting_since
                for name, learned in self.learned.items()
                if learned.waiting_since is not None and name in here
            },
            within_rounds=cohort.invite_within_rounds,
            min_clients=cohort.min_clients,
            laps=self._laps,
        )

    def _log(self, round_number: int, invited: Invited, unbelieved: set[str]) -> None:
        """Tell who is left out, or claims too much, from this round on; the journal tells all."""
        slow = [
            f"{name}: {why}"
            for name, why in invited.left_out.items()
            if self.learned[name].waiting_since is None
        ]
        claims = sorted(unbelieved - self._unbelieved)
        self._unbelieved = unbelieved
        if slow:
            some = "; ".join(slow[:SHOWN])
            log.warning("round %d: %d more left out (%s)", round_number, len(slow), some)
        if claims:  # a machine that is far faster than the others looks the same, and is no fault
            some = ", ".join(claims[:SHOWN])
            text = "round %d: %d more not believed in all that they claim (%s)"
            log.info(text, round_number, len(claims), some)

    def _common_plan(self, round_number: int) -> dict[str, Any]:
        """Return what all plans of a round say."""
        chosen = self._settings.plan
        return {
            "round": round_number,
            "run_seed": self._settings.seed,
            "model_version": round_number - 1,
            "local_steps": chosen.local_steps,
            "local_learning_rate": chosen.local_learning_rate,
            "precision": chosen.precision,
            "held_out_fraction": held_out_fraction(self._settings.evaluation),
            "is_masked": self._settings.secure.aggregation != "off",
        }

    def _plan(
        self,
        assignment: Assignment,
        common: Mapping[str, Any],
        *,
        weigh_as: int | None,
        counted: int | None,
    ) -> Plan:
        """Return the plan of a device, and of all that have an assignment of this kind."""
        chosen, deadline = self._settings.plan, self._settings.cohort.deadline_seconds
        share = assignment.device.learned.deadline_share
        size = self._target.micro_batch_size(assignment.quota, assignment.micro_batch_size)
        evened = ""
        if size != assignment.micro_batch_size:
            evened = f", cut to {size} each to tell the noise"
        # Local steps move the model: their number is not the device's to choose.
        finish = assignment.finish_seconds(size) if chosen.local_steps == 1 else None
        return Plan(
            **common,
            quota=assignment.quota,
            micro_batch_size=size,
            # To train in; the rest is for the transfers.
            deadline_seconds=None if deadline is None else deadline * share,
            finish_seconds=finish,
            counted_round=counted,
            share=assignment.share,
            weigh_as=weigh_as,
            reason=reasons.of_plan(assignment, finish_seconds=finish) + evened,
        )

    def learn(self, opened: OpenRound) -> None:
        """Follow the devices' pace, vitals and lateness, whether or not the round will count."""
        accepted, refused = opened.accepted, opened.refused
        for name in opened.plans:
            learned = before = self.learned[name]
            report, error = accepted.get(name), refused.get(name)
            if report is not None:
                learned = learned.trained(report)
            elif name in opened.ready:
                learned = learned.shown(opened.ready[name])
            elif isinstance(error, EmptyUpdate):
                learned = learned.skipped()
            if not isinstance(error, LateUpdate):
                learned = learned.in_time()
            # Who is too slow for one example was foreseen to be late: it says nothing of its link.
            elif name not in self._asked_anyway:
                learned = learned.late()
            if learned is not before:
                self.learned[name] = learned

    def count(self, accepted: Mapping[str, Reported]) -> None:
        """Move on in the epochs of the devices whose updates were committed."""
        for name, report in accepted.items():
            before = self.learned[name]
            after = before.counted(report)
            if after is not before:
                self.learned[name] = after


def held_out_fraction(chosen: Evaluation) -> float:
    """Return the fraction of its examples that each device holds out."""
    return chosen.held_out_fraction if chosen.on_devices else 0.0
