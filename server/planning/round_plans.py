"""A round's plans: which clients are invited or left out, and what each invited client does.

The decisions are pure functions in other modules: ``cohort`` selects the clients, ``planner``
assigns their work, ``plan_messages`` writes it down, ``device_estimates`` and ``exclusions`` follow
what is known of each client.
``RoundPlanner`` holds a run's state from round to round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headwater.common.errors import HeadwaterError, TooFewClients
from headwater.common.messages import (
    DescribeRequest,
    DeviceReport,
    Plan,
    ReadyReport,
    ReportFields,
)
from headwater.common.model.parameters import ModelLayout
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
    UNKNOWN_DEVICE,
    UNTOLD_EXAMPLES,
    DeviceEstimate,
)
from headwater.server.planning.exclusions import Exclusion, exclude, excluded_in
from headwater.server.planning.plan_messages import held_out_fraction, plans_of
from headwater.server.planning.planner import Assignment, TransferCosts, assign
from headwater.server.planning.share_limit import limited_quotas, limited_weights
from headwater.server.planning.target_batch import Target

log = logging.getLogger(__name__)

MAX_NAMES = 3  # clients that a log line names


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlans:
    """A round's plans, and the clients without one."""

    plans: dict[str, Plan]
    owned: dict[str, int]
    """The number of examples that each invited client owns."""
    left_out: dict[str, str]
    """Why a client is left out: it is too slow for the deadline, or made a secure session fail."""
    exceptions: dict[str, str]
    """Why a client is invited for one example although it is too slow."""
    num_too_slow: int
    num_bounded: int
    """Clients that claim more than is believed: more speed, or more examples."""
    metrics: tuple[str, ...] = ()
    """The names of the metrics that most of the invited clients have; for masked rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decisions:
    """The pure functions that a simulator may replace by the same functions with a cache."""

    order: PopulationOrder = population_order
    assign: Callable[..., dict[str, Assignment]] = assign


@dataclass(slots=True)
class RoundPlanner:
    """What a run knows of its clients, and the plans that follow from it."""

    settings: Settings
    target: Target
    layout: ModelLayout
    decisions: Decisions = field(default_factory=Decisions)
    estimates: dict[str, DeviceEstimate] = field(default_factory=dict)
    excluded: dict[str, Exclusion] = field(default_factory=dict)
    _awaited: set[str] = field(default_factory=set)
    """Clients that were left out and asked to describe themselves again, and have not yet."""
    _bounded: set[str] = field(default_factory=set)
    """Clients of the last round that claim more than is believed."""
    _untold: set[str] = field(default_factory=set)
    """Clients without a number of examples, in a run that weighs updates by it."""
    _has_logged_target: bool = False
    """Whether the log says that the target is more than the clients' data allow."""
    _is_resumed: bool = False
    """Whether the next round is the first one after ``restore``."""

    @property
    def _is_k_set(self) -> bool:
        return self.settings.plan.accumulation_steps is not None

    def restore(
        self, estimates: Mapping[str, DeviceEstimate], excluded: Mapping[str, Exclusion]
    ) -> None:
        """Take the state of a checkpoint. Every client that is not connected counts as gone."""
        self.estimates = dict(estimates)
        self.excluded = dict(excluded)
        self._is_resumed = True

    def exclude(self, at_fault: Mapping[str, str], *, round_number: int) -> None:
        """Exclude clients that made a secure session fail from the following rounds."""
        self.excluded = exclude(self.excluded, at_fault, round_number=round_number)
        for name, why in at_fault.items():
            through = self.excluded[name].through_round
            log.warning("%s is left out through round %d: %s", name, through, why)

    def describe_request(self, *, left_out: str | None = None) -> DescribeRequest:
        """Return the request for a client's description of itself, when it joins or is left out."""
        return DescribeRequest(
            run_seed=self.settings.seed,
            wants_speed=not self._is_k_set,
            layout_digest=self.layout.digest,
            num_parameters=self.layout.num_parameters,
            layout=self.layout.text,
            held_out_fraction=held_out_fraction(self.settings.evaluation),
            algorithm=self.settings.algorithm.label,
            left_out=left_out,
        )

    def plan(
        self,
        clients: ConnectedClients,
        *,
        round_number: int,
        counted: Mapping[str, int],
        turn_seconds: float,
    ) -> RoundPlans:
        """Select a round's cohort and plan each member's work.

        ``counted`` is the last round whose sum includes a client's update.

        Raises:
            TooFewClients: --cohort-size is below --min-clients.
        """
        costs = TransferCosts(
            image_bytes=self.layout.num_bytes,
            update_bytes=4 * self.layout.num_parameters,
            turn_seconds=turn_seconds,
        )
        self._note_changes(clients)
        excluded = excluded_in(self.excluded, clients.reports, round_number=round_number)
        waiting_since = {
            name: one.waiting_since
            for name, one in self.estimates.items()
            if one.waiting_since is not None and name in clients.reports
        }
        selection = self._select(clients.reports, excluded, waiting_since, costs, round_number)
        names, exceptions = selection.names, selection.exceptions
        self._check_enough(names, excluded, round_number)
        estimates = [self.estimates[name] for name in names]
        owned = {name: one.num_examples for name, one in zip(names, estimates, strict=True)}
        target = self.target.open(num_invited=len(names))
        self._log_target(round_number, target, owned)
        assigned: Mapping[str, Assignment] = self.decisions.assign(
            names,
            estimates,
            exceptions,
            self.settings.plan,
            target=target,
            deadline_seconds=self.settings.cohort.deadline_seconds,
            costs=costs,
        )
        is_by_data = self.settings.cohort.weighting == "dataset"
        weights: Mapping[str, int] = dataset_weights(owned) if is_by_data else {}
        bounded = {name for name, one in assigned.items() if one.speed_cut > 1}
        bounded |= {name for name, weight in weights.items() if weight < owned[name]}
        is_masked = self.settings.secure.aggregation != "off"
        if is_masked:
            secure = self.settings.secure
            assigned = limited_quotas(
                assigned, max_share=secure.max_share, min_quota=secure.min_quota
            )
            weights = limited_weights(weights, max_share=secure.max_share)
        self._log(round_number, selection, bounded)
        self._note_selection(selection, waiting_since, round_number)
        return RoundPlans(
            plans=plans_of(
                assigned,
                self.settings,
                round_number=round_number,
                counted=counted,
                weights=weights,
                micro_batch_size=self.target.micro_batch_size,
            ),
            owned=owned,
            left_out=selection.left_out | excluded,
            exceptions=exceptions,
            num_too_slow=len(selection.left_out),
            num_bounded=len(bounded),
            metrics=_common_metrics([clients.reports[name] for name in names]) if is_masked else (),
        )

    def _note_changes(self, clients: ConnectedClients) -> None:
        """Mark the estimates of clients that left, or that have described themselves again."""
        known = self.estimates
        if self._is_resumed:
            self._is_resumed = False
            for name in known.keys() - set(clients.reports):
                known[name] = known[name].after_disconnect()
        for name in clients.disconnected:
            self._awaited.discard(name)
            if name in known:
                known[name] = known[name].after_disconnect()
        for name in clients.described:
            self._awaited.discard(name)
            if name in known:  # the new number of examples is read in its next turn
                known[name] = replace(known[name], num_examples=0)

    def _select(
        self,
        reports: Mapping[str, DeviceReport],
        excluded: Mapping[str, str],
        waiting_since: Mapping[str, int],
        costs: TransferCosts,
        round_number: int,
    ) -> Selection:
        """Select the cohort; reads the descriptions of the clients whose turn comes."""
        cohort, estimates = self.settings.cohort, self.estimates
        # With K set no speeds are known, and no client is too slow.
        deadline = None if self._is_k_set else cohort.deadline_seconds

        def judge(names: Sequence[str]) -> tuple[Sequence[str], dict[str, Slowness]]:
            able = self._describable(names, reports, excluded)
            slow: dict[str, Slowness] = {}
            for name in able:
                known = estimates[name]
                if known.times_late or deadline is not None:
                    found = slowness(known, deadline_seconds=deadline, costs=costs)
                    if found is not None:
                        slow[name] = found
            return [name for name in able if name not in slow] if slow else able, slow

        return select(
            reports.keys(),
            size=cohort.size,
            seed=self.settings.seed,
            round_number=round_number,
            judge=judge,
            waiting_since=waiting_since,
            within_rounds=cohort.invite_within_rounds,
            min_clients=cohort.min_clients,
            order=self.decisions.order,
        )

    def _describable(
        self, names: Sequence[str], reports: Mapping[str, DeviceReport], excluded: Container[str]
    ) -> list[str]:
        """Return the clients with an estimate, and not excluded; reads their new descriptions.

        A client may turn out to be unable to describe itself; it has no estimate.
        """
        estimates, awaited = self.estimates, self._awaited
        is_by_data = self.settings.cohort.weighting == "dataset"
        able = []
        for name in names:
            if name in excluded:
                continue
            known = estimates.get(name, UNKNOWN_DEVICE)
            if not known.num_examples or (known.is_outdated and name not in awaited):
                try:
                    estimates[name] = known.after_description(reports[name])
                except KeyError:
                    continue
            if is_by_data and estimates[name].num_examples == UNTOLD_EXAMPLES:
                if name not in self._untold:
                    log.warning(
                        "%s: it does not tell its number of examples, by which its update "
                        "would be weighed (--declared-examples); it is not invited",
                        name,
                    )
                    self._untold.add(name)
                continue
            able.append(name)
        return able

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

    def _note_selection(
        self, selection: Selection, waiting: Collection[str], round_number: int
    ) -> None:
        """Mark the clients that are left out, and those of the waiting that are invited."""
        known = self.estimates
        for name in set(waiting).intersection(selection.names):
            known[name] = known[name].after_invitation()
        for name in selection.left_out:
            known[name] = known[name].after_leaving_out(round_number)
            self._awaited.add(name)

    def _log(self, round_number: int, selection: Selection, bounded: set[str]) -> None:
        """Log the clients that are newly left out or bounded; the round log has all of them."""
        slow = [
            f"{name}: {why}"
            for name, why in selection.left_out.items()
            if self.estimates[name].waiting_since is None
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

    def _log_target(self, round_number: int, target: int, owned: Mapping[str, int]) -> None:
        """Log, once in a run, that the target is more than all examples of the cohort."""
        num_owned = sum(owned.values())
        if self._is_k_set or self._has_logged_target or target <= num_owned:
            return
        self._has_logged_target = True
        log.warning(
            "round %d: the target is %s; the data of %s allow %s",
            round_number,
            counted(target, "example"),
            counted(len(owned), "client"),
            f"{num_owned:,}",
        )

    def learn(
        self,
        planned: RoundPlans,
        *,
        accepted: Mapping[str, ReportFields],
        ready: Mapping[str, ReadyReport],
        refused: Mapping[str, HeadwaterError],
    ) -> None:
        """Follow the invited clients' speed, vitals and lateness, whether or not the round counts.

        ``accepted`` are the reports of the updates, ``ready`` those of masked updates, ``refused``
        the errors of the clients without an update.
        """
        is_k_set, estimates = self._is_k_set, self.estimates
        for name in planned.plans:
            known, report, error = estimates[name], accepted.get(name), refused.get(name)
            if is_k_set and report is not None and error is None and known.is_confirmed_by(report):
                continue
            estimates[name] = known.after_round(
                report,
                ready.get(name),
                error,
                is_k_set=is_k_set,
                was_expected_late=name in planned.exceptions,
            )


def _common_metrics(reports: Sequence[DeviceReport]) -> tuple[str, ...]:
    """Return the names of metrics that most devices told; all members mask the same numbers."""
    kinds = [report.metrics for report in reports]
    return max(sorted(set(kinds)), key=kinds.count, default=())
