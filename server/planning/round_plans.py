"""A round's plans, from what the devices tell: who is invited, who is left out, who does how much.

The decisions are pure functions elsewhere (``headwater.server.planning.round_plans.cohort`` who, ``headwater.server.planning.round_plans.planner`` how much,
``headwater.server.planning.round_plans.device_estimates`` what is known of each); here they meet the state of a run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headwater.common.errors import EmptyUpdate, HeadwaterError, LateUpdate, TooFewClients
from headwater.common.messages import DescribeRequest, DeviceReport, Plan, ReadyReport, ReportFields
from headwater.common.model.parameters import ModelLayout
from headwater.common.settings.schema import EvaluationSettings, Settings
from headwater.server.planning import plan_reasons as reasons
from headwater.server.planning.cohort import Invited, dataset_weights
from headwater.server.planning.device_estimates import Learned
from headwater.server.planning.exclusions import Exclusion, exclude, excluded_in
from headwater.server.planning.inviting import Guests, Inviting
from headwater.server.planning.planner import Assignment, Kind, Link, assign
from headwater.server.planning.target_batch import Target

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
        self._inviting = Inviting(settings)
        self._is_k_set = settings.plan.accumulation_steps is not None
        self._assigned: dict[str, Assignment] = {}
        self._of_kind: dict[Kind, Assignment] = {}
        self._bounded: set[str] = set()
        self._unbelieved: set[str] = set()
        self._asked_anyway: set[str] = set()
        self.excluded: dict[str, Exclusion] = {}

    def leave_out(self, found: Mapping[str, str], *, round_number: int) -> None:
        """Leave who made a secure session fail out of what follows (``server.secagg.blame``)."""
        self.excluded = exclude(self.excluded, found, round_number=round_number)
        for name, why in found.items():
            through = self.excluded[name].through_round
            log.warning("%s is left out through round %d: %s", name, through, why)

    def describe_request(self, *, left_out: str | None = None) -> DescribeRequest:
        """Return what every device is asked when it is first seen, and when it is left out."""
        return DescribeRequest(
            run_seed=self._settings.seed,
            wants_speed=not self._is_k_set,
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
        culprits = excluded_in(self.excluded, reports, round_number=round_number)
        guests = self._inviting.guests(
            reports, self.learned, culprits=culprits, link=link, round_number=round_number
        )
        invited = guests.invited
        if len(invited.names) < cohort.min_clients:
            why = "".join(f"; {name} is left out {said}" for name, said in culprits.items())
            raise TooFewClients(
                f"round {round_number}: {len(invited.names)} clients are invited, at least "
                f"{cohort.min_clients} are needed{why}",
                remedy="raise --cohort-size, or lower --min-clients",
            )
        assigned = self._assign(guests, link)
        if guests.news is None:
            self.owned = {name: one.num_examples for name, one in guests.devices.items()}
        weights = dataset_weights(self.owned) if cohort.weighting == "dataset" else {}
        unbelieved = self._bounded | {
            name for name, weight in weights.items() if weight < self.owned[name]
        }
        self._log(round_number, invited, unbelieved)
        self._asked_anyway = set(invited.asked_anyway)
        if guests.news is None:
            for name in invited.names:
                self.learned[name] = self.learned[name].asked()
        for name in invited.left_out:
            self.learned[name] = self.learned[name].left_out(round_number)
        common = self._common_plan(round_number)
        made: dict[tuple[int, int | None, int | None], Plan] = {}
        plans = {}
        for name in invited.names:
            assignment = assigned[name]
            key = (id(assignment), counted.get(name), weights.get(name))
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

    def _assign(self, guests: Guests, link: Link) -> dict[str, Assignment]:
        """Assign a quota to every device of a cohort; those of a kind have the same assignment.

        With K set what a device is asked depends on it alone, so only news are assigned anew.
        """
        devices, news = guests.devices, guests.news
        target = self._target.open(num_invited=len(devices))
        if news is None or not self._is_k_set:
            self._assigned, self._of_kind, news = {}, {}, devices
        elif not news:
            return self._assigned
        made = assign(
            [devices[name] for name in news],
            self._settings.plan,
            target=target,
            deadline_seconds=self._settings.cohort.deadline_seconds,
            link=link,
        )
        self._assigned |= {
            name: self._of_kind.setdefault(one.kind, one) for name, one in made.items()
        }
        self._bounded = {name for name, one in made.items() if one.is_bounded}
        return self._assigned

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

    def learn(
        self,
        names: Iterable[str],
        *,
        accepted: Mapping[str, ReportFields],
        ready: Mapping[str, ReadyReport],
        refused: Mapping[str, HeadwaterError],
    ) -> None:
        """Follow the invited clients' speed, vitals and lateness, whether or not the round counts.

        ``accepted`` are the reports of the updates, ``ready`` those of masked updates, ``refused``
        the errors of the clients without an update.
        """
        for name in names:
            learned = before = self.learned[name]
            report, error = accepted.get(name), refused.get(name)
            if report is not None:
                if not self._is_k_set or not learned.holds_as_much(report.vitals):
                    learned = learned.trained(report)
            elif name in ready:
                learned = learned.shown(ready[name])
            elif isinstance(error, EmptyUpdate):
                learned = learned.skipped()
            if not isinstance(error, LateUpdate):
                learned = learned.in_time()
            # A client that is too slow for one example was expected to be late: its lateness says
            # nothing of its link.
            elif name not in self._asked_anyway:
                learned = learned.late()
            if learned is not before:
                self.learned[name] = learned

    def count(self, accepted: Mapping[str, ReportFields]) -> None:
        """Move on in the epochs of the devices whose updates were committed."""
        for name, report in accepted.items():
            before = self.learned[name]
            after = before.counted(report)
            if after is not before:
                self.learned[name] = after


def held_out_fraction(chosen: EvaluationSettings) -> float:
    """Return the fraction of its examples that each device holds out."""
    return chosen.held_out_fraction if chosen.on_devices else 0.0
