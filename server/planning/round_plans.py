"""A round's plans: which clients are invited or left out, and what each invited client does.

The decisions are pure functions in other modules: ``cohort`` selects the clients, ``planner``
assigns their work, ``plan_table`` holds it. ``RoundPlanner`` holds a run's state from
round to round: the known clients, those that are excluded, and the target batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

import numpy as np

from headwater.common.errors import (
    HeadwaterError,
    TooFewClients,
    TooFewPermitted,
    TooLittleTime,
)
from headwater.common.messages import DescribeRequest, DeviceReport
from headwater.common.model.layout import ModelLayout
from headwater.common.settings.schema import Settings
from headwater.common.wording import counted, natural
from headwater.server.planning.cohort import (
    ConnectedClients,
    PopulationOrder,
    Selection,
    Slowness,
    dataset_weights,
    population_order,
    select,
    slowness,
)
from headwater.server.planning.device_estimates import (
    UNTOLD_EXAMPLES,
    DeviceEstimate,
    EstimateColumns,
)
from headwater.server.planning.exclusions import (
    Exclusion,
    exclude,
    excluded_in,
    sit_out,
    without_owners,
)
from headwater.server.planning.features import PlanningMoments
from headwater.server.planning.known_clients import KnownClients
from headwater.server.planning.plan_table import PlanTable, held_out_fraction, plans_of
from headwater.server.planning.planner import Assigned, TransferCosts, assign
from headwater.server.planning.target_batch import Target
from headwater.server.planning.vitals_columns import Ints

log = logging.getLogger(__name__)

MAX_NAMES = 3  # clients that a log line names


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlans:
    """A round's plans, and the clients without one."""

    plans: PlanTable
    owned: dict[str, int]
    """The number of examples that each invited client owns."""
    left_out: dict[str, str]
    """Why a client is left out: it is too slow for the deadline, or made a secure session fail."""
    exceptions: dict[str, str]
    """Why a client is invited for one example although it is too slow."""
    num_too_slow: int
    num_epoch_examples: int | None
    """The examples of all connected clients, by those of the invited; None if one tells none."""
    num_bounded: int
    """Clients that claim more than is believed: more speed, or more examples."""
    below_share: tuple[str, ...] = ()
    """Clients whose quotas are below ``plan.least_share`` of an even share."""
    metrics: tuple[str, ...] = ()
    """The names of the metrics that most of the invited clients have; for masked rounds."""


@dataclass(slots=True)
class RoundPlanner:
    """What a run knows of its clients, and the plans that follow from it."""

    settings: Settings
    target: Target
    layout: ModelLayout
    order: PopulationOrder = population_order
    """A simulator replaces it by the same function with a cache."""
    frozen: str | None = None
    """The digest of the model's frozen part; None if it has none."""
    known: KnownClients = field(init=False)
    features: list[PlanningMoments] = field(default_factory=list)
    """What the settings ask for in planning, in order."""
    excluded: dict[str, Exclusion] = field(default_factory=dict)
    is_simulated: bool = False
    """Whether the clients' clocks are a simulator's: the fleet file then sets unlike speeds."""
    round_seconds: float = 0.0
    """What the last round's training took; 0 before the first and on a virtual clock."""
    _bounded: set[str] = field(default_factory=set)
    """Clients of the last round that claim more than is believed."""
    _has_logged_target: bool = False
    """Whether the log says that the target is more than the clients' data allow."""
    _has_logged_below: bool = False
    """Whether the log says which clients have hardly a share."""

    def __post_init__(self) -> None:
        """Begin without known clients."""
        self.known = KnownClients(is_by_data=self._is_by_data)

    @property
    def _is_k_set(self) -> bool:
        return self.settings.plan.accumulation_steps is not None

    @property
    def _is_by_data(self) -> bool:
        return self.settings.cohort.weighting == "dataset"

    def restore(
        self, estimates: Mapping[str, DeviceEstimate], excluded: Mapping[str, Exclusion]
    ) -> None:
        """Take the state of a checkpoint. Every client that is not connected counts as gone."""
        self.known.restore(estimates)
        self.excluded = without_owners(excluded)

    def exclude(
        self, reasons: Mapping[str, str], *, round_number: int, is_by_owner: bool = False
    ) -> None:
        """Exclude clients that made a secure session fail, or whose owners allow no more rounds."""
        self.excluded = exclude(
            self.excluded, reasons, round_number=round_number, is_by_owner=is_by_owner
        )
        for name, why in reasons.items():
            through = self.excluded[name].through_round
            log.warning("%s is left out through round %d: %s", name, through, why)

    def sit_out(self, names: Collection[str], *, round_number: int) -> None:
        """Leave clients out of a round's further attempts: they mask no more at its model.

        An aborted round leaves the model as it was, so they would refuse each attempt's plan.
        """
        self.excluded = sit_out(self.excluded, names, round_number=round_number)
        if names:
            log.warning(
                "round %d: %s left out until the model changes (%s), as they masked most of their "
                "examples at this model before, in a session that failed or in another run: a "
                "smaller quota lets a client mask twice, and another --seed begins with another "
                "model",
                round_number,
                counted(len(names), "client"),
                ", ".join(sorted(names, key=natural)[:MAX_NAMES]),
            )

    def sitting_out(self, *, round_number: int) -> set[str]:
        """Return the clients that are excluded from this round, if some of them sit it out.

        A round that was aborted then waits for as many others as it needs.
        """
        excluded = {n: one for n, one in self.excluded.items() if round_number <= one.through_round}
        return set(excluded) if any(one.is_for_model for one in excluded.values()) else set()

    def counts(self, *, round_number: int) -> Callable[[DeviceReport], bool]:
        """Return what says whether a client counts among those that a round waits for.

        One whose owner allows no further round does not, if enough others are known: they may be
        away for a while.
        """
        out = self.sitting_out(round_number=round_number)
        by_owners = {
            name
            for name, one in self.excluded.items()
            if one.is_by_owner and round_number <= one.through_round
        }
        if len(self.known) - len(by_owners) >= self.settings.num_clients_needed:
            out |= by_owners
        return lambda report: report.name not in out and self._admits(report)

    def _admits(self, report: DeviceReport) -> bool:
        return all(feature.admits(report) for feature in self.features)

    def admitted(self, clients: ConnectedClients) -> ConnectedClients:
        """Return the clients that the run is for, with the others apart."""
        if not any(feature.chooses_clients for feature in self.features):
            return clients  # of a million simulated ones most are never looked at
        found = {name: clients.reports.get(name) for name in clients.reports}
        reports = {name: one for name, one in found.items() if one and self._admits(one)}
        others = {name: one for name, one in found.items() if one and name not in reports}
        gone = {*clients.disconnected, *others}
        return replace(clients, reports=reports, disconnected=gone, others=others)

    def describe_request(self, *, left_out: str | None = None) -> DescribeRequest:
        """Return the request for a client's description of itself, when it joins or is left out."""
        request = DescribeRequest(
            run_seed=self.settings.seed,
            wants_speed=not self._is_k_set,  # with K set no quota follows from the speed
            precision=self.settings.plan.precision,
            layout_digest=self.layout.digest,
            num_parameters=self.layout.num_parameters,
            layout=self.layout.text,
            held_out_fraction=held_out_fraction(self.settings.evaluation),
            held_out=self.settings.evaluation.held_out,
            left_out=left_out,
            frozen=self.frozen,
        )
        for feature in self.features:
            request = feature.describe(request)
        return request

    def plan(
        self,
        clients: ConnectedClients,
        *,
        round_number: int,
        counted: Mapping[str, int],
        turn_seconds: float,
        due: Sequence[str] | None = None,
        busy: Collection[str] = (),
        num_updates: int | None = None,
    ) -> RoundPlans:
        """Select a round's cohort and plan each member's work.

        ``counted`` is the last round whose sum includes a client's update. ``due`` are
        the clients that may be in the round, in the order of their turns; None: all may be.

        Of an asynchronous step: ``busy`` clients work on earlier plans. They get none, and the
        others get what they would get beside them. ``num_updates`` of all sum the target.

        Raises:
            TooFewClients: --cohort-size is below --min-clients.
            TooFewPermitted: the owners of too many clients allow no further round.
        """
        costs = self._costs(turn_seconds)
        self.known.note_changes(clients, counted=counted, busy=busy)
        self.excluded = without_owners(self.excluded, clients.disconnected)
        excluded = excluded_in(self.excluded, clients.reports, round_number=round_number)
        self._check_permitted(clients.reports, excluded, round_number)
        waiting_since = self.known.waiting_since(clients.reports)
        selection = self._select(
            clients.reports, due, busy, excluded, waiting_since, costs, round_number
        )
        exceptions = selection.exceptions
        names = [*selection.names, *busy]
        self._check_enough(names, excluded, round_number)
        known = self.known.columns(names)
        owned = dict(zip(names, known.num_examples.tolist(), strict=True))
        assigned = self._assign(known, exceptions, owned, costs, num_updates, round_number)
        assigned = assigned if not busy else assigned.some(selection.names)
        weights: Mapping[str, int] = dataset_weights(owned) if self._is_by_data else {}
        bounded = set(compress(assigned, (assigned.speed_cut > 1).tolist()))
        bounded |= {name for name, weight in weights.items() if weight < owned[name]}
        for feature in self.features:
            assigned, weights = feature.limit(assigned, weights, round_number=round_number)
        below = self._below_share(assigned)
        self._log_below(round_number, below, assigned)
        self._log(round_number, selection, bounded)
        self.known.note_selection(selection, waiting_since, round_number)
        return RoundPlans(
            plans=plans_of(
                assigned,
                self.settings,
                round_number=round_number,
                counted=counted,
                weights=weights,
                micro_batch_size=self.target.micro_batch_size,
                frozen=self.frozen,
                features=self.features,
            ),
            owned=owned,
            left_out=selection.left_out | excluded,
            exceptions=exceptions,
            num_too_slow=len(selection.left_out),
            num_epoch_examples=_epoch_examples(known.num_examples, len(clients.reports)),
            num_bounded=len(bounded),
            below_share=below,
            # A busy client may have left.
            metrics=self._metrics(clients.reports, names),
        )

    def _costs(self, turn_seconds: float) -> TransferCosts:
        image_bytes, update_bytes = self.transfer_bytes()
        return TransferCosts(
            image_bytes=image_bytes,
            update_bytes=update_bytes,
            turn_seconds=turn_seconds,
            round_seconds=self.round_seconds,
        )

    def _assign(
        self,
        known: EstimateColumns,
        exceptions: Mapping[str, str],
        owned: Mapping[str, int],
        costs: TransferCosts,
        num_updates: int | None,
        round_number: int,
    ) -> Assigned:
        """Divide the round's target among the clients of ``owned``."""
        number = len(owned)
        target = self.target.open(num_invited=number, owned=owned.values())
        if num_updates is not None and self.target.demand is None:
            target = -(-target * number // min(num_updates, number))
        self._log_target(round_number, target, owned)
        return assign(
            list(owned),
            known,
            exceptions,
            self.settings.plan,
            target=target,
            deadline_seconds=self.settings.cohort.deadline_seconds,
            costs=costs,
            demand=self.target.demand,
        )

    def _select(
        self,
        reports: Mapping[str, DeviceReport],
        due: Sequence[str] | None,
        busy: Collection[str],
        excluded: Mapping[str, str],
        waiting_since: Mapping[str, int],
        costs: TransferCosts,
        round_number: int,
    ) -> Selection:
        """Select the cohort; reads the descriptions of the clients whose turn comes."""
        cohort = self.settings.cohort
        # With K set no speeds are known, and no client is too slow.
        deadline = None if self._is_k_set else cohort.deadline_seconds

        def judge(names: Sequence[str]) -> tuple[Sequence[str], dict[str, Slowness]]:
            able = self.known.describable(names, reports, excluded)
            known = self.known.columns(able)
            slow = slowness(able, known, deadline_seconds=deadline, costs=costs)
            return [name for name in able if name not in slow] if slow else able, slow

        names: Collection[str] = reports.keys() if due is None else frozenset(due)
        size, min_clients = cohort.size, cohort.min_clients
        if busy:
            names = dict.fromkeys(name for name in names if name not in busy).keys()
            size = None if size is None else max(size - len(busy), 0)
            min_clients = max(min_clients - len(busy), 0)
            if size == 0:
                return Selection(names=[])
        return select(
            names,
            size=size,
            seed=self.settings.seed,
            round_number=round_number,
            judge=judge,
            waiting_since=waiting_since,
            within_rounds=cohort.invite_within_rounds,
            min_clients=min_clients,
            order=self.order,
            turns=due,
        )

    def _check_permitted(
        self, names: Collection[str], excluded: Mapping[str, str], round_number: int
    ) -> None:
        by_owners = [name for name in excluded if self.excluded[name].is_by_owner]
        able, needed = len(names) - len(by_owners), self.settings.num_clients_needed
        if not by_owners or able >= needed:
            return
        why = "; ".join(f"{name}: {self.excluded[name].why}" for name in by_owners[:MAX_NAMES])
        raise TooFewPermitted(
            f"round {round_number} needs {counted(needed, 'client')}, and {able} of "
            f"{len(names)} may still take part ({why}"
            f"{'; ...' if len(by_owners) > MAX_NAMES else ''})"
        )

    def _check_enough(
        self, names: Sequence[str], excluded: Mapping[str, str], round_number: int
    ) -> None:
        needed = self.settings.cohort.min_clients
        if len(names) < needed:
            why = "".join(f"; {name} is left out {reason}" for name, reason in excluded.items())
            raise TooFewClients(
                f"round {round_number}: {counted(len(names), 'client')} invited, at least "
                f"{needed} are needed{why}",
                remedy="raise --cohort-size, or lower --min-clients",
            )

    def _log(self, round_number: int, selection: Selection, bounded: set[str]) -> None:
        """Log the clients that are newly left out or bounded; the round log has all of them."""
        slow = [
            f"{name}: {why}"
            for name, why in selection.left_out.items()
            if self.known[name].waiting_since is None
        ]
        claims = sorted(bounded - self._bounded, key=natural)
        self._bounded = bounded
        if slow:
            some = "; ".join(slow[:MAX_NAMES])
            log.warning("round %d: %d more left out (%s)", round_number, len(slow), some)
        if claims:  # an honest machine that is far faster than the median is bounded as well
            some = ", ".join(claims[:MAX_NAMES])
            text = "round %d: %d more not believed in all that they claim (%s)"
            log.info(text, round_number, len(claims), some)

    def transfer_bytes(self) -> tuple[int, int]:
        """Return the bytes of the model and of an update, as planned."""
        number = self.layout.num_parameters
        down = up = 4 * number
        for feature in self.features:
            down, up = feature.transfer_bytes(down, up, num_values=number)
        return down, up

    def _metrics(
        self, reports: Mapping[str, DeviceReport], names: Iterable[str]
    ) -> tuple[str, ...]:
        if not self.features:
            return ()
        known = [reports[name] for name in names if name in reports]
        found = (feature.metrics(known) for feature in self.features)
        return next((metrics for metrics in found if metrics), ())

    def _below_share(self, assigned: Assigned) -> tuple[str, ...]:
        """Return the clients with less than ``plan.least_share`` of an even share of the round.

        Not those that own no more examples, and none where K or the local epochs are set.
        """
        demand = self.target.demand
        if self._is_k_set or (demand is not None and demand.has_set_shares) or not assigned:
            return ()
        least, quotas = self.settings.plan.least_share, assigned.quota
        even = math.floor(least * (int(quotas.sum()) / len(assigned)))
        is_below = quotas < np.minimum(even, assigned.known.num_examples)
        below = compress(assigned, is_below.tolist())
        return tuple(name for name in below if name not in assigned.exceptions)

    def to_measure(self, planned: RoundPlans, *, round_number: int) -> dict[str, DescribeRequest]:
        """Return the requests to clients that are to measure their speed again."""
        if self._is_k_set or not planned.plans:
            return {}
        quotas = dict(zip(planned.plans, planned.plans.quota.tolist(), strict=True))
        slow = [name for feature in self.features for name in feature.to_measure(quotas)]
        due = self.known.to_measure(slow, round_number=round_number)
        return dict.fromkeys(due, self.describe_request())

    def note_refused(self, refused: Mapping[str, HeadwaterError]) -> None:
        """Take the speed that clients tell next which refused their plan as one of too little time.

        The server asks them for it before they are in another round.
        """
        short = (name for name, error in refused.items() if isinstance(error, TooLittleTime))
        self.known.await_speed(short)

    def _log_below(self, round_number: int, below: Sequence[str], assigned: Assigned) -> None:
        """Log, once in a run, which clients have hardly a share of the sums, and what to set."""
        if not below or self._has_logged_below:
            return
        self._has_logged_below = True
        total = int(assigned.quota.sum())
        parts = [
            f"{name} {assigned[name].quota / total:.1%}"
            for name in sorted(below, key=natural)[:MAX_NAMES]
        ]
        more = "" if len(below) <= MAX_NAMES else ", ..."
        log.log(
            logging.INFO if self.is_simulated else logging.WARNING,
            "round %d: %s of %s with less than %g of an even share of the examples (%s%s): as slow "
            "as they are, more would make the round over 5 %% longer; set K for equal shares "
            "(--accumulation-steps), a larger --effective-batch-size, or --weighting dataset",
            round_number,
            counted(len(below), "client"),
            f"{len(assigned):,}",
            self.settings.plan.least_share,
            ", ".join(parts),
            more,
        )

    def _log_target(self, round_number: int, target: int, owned: Mapping[str, int]) -> None:
        """Log, once in a run, that the target is more than all examples of the cohort."""
        num_owned = sum(owned.values())
        is_by_data = self._is_k_set or self.target.demand is not None
        if is_by_data or self._has_logged_target or target <= num_owned:
            return
        self._has_logged_target = True
        log.warning(
            "round %d: the target is %s; the data of %s allow %s",
            round_number,
            counted(target, "example"),
            counted(len(owned), "client"),
            f"{num_owned:,}",
        )


def _epoch_examples(owned: Ints, num_connected: int) -> int | None:
    if not len(owned) or not ((owned > 0) & (owned < UNTOLD_EXAMPLES)).all():
        return None
    return round(int(owned.sum()) / len(owned) * num_connected)
