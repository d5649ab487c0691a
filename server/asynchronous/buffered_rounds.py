"""Runs asynchronous rounds: each step takes the next B updates, of whichever models they are.

A free client is sent a plan with the newest model; a client at work keeps its plan while steps are
taken. When B updates are in the buffer, the server divides once, steps, commits, and sends new
plans to the clients that are free. An update names its plan's round, and so the model that it is
of (Nguyen et al. 2022). With ``--overlap`` a client has a second plan (``OverlappingPlans``).

Nothing is counted twice, and no example is lost: a client's place in its data moves on only when
the step with its update is committed. After a crash or an aborted step, the updates that were in
the buffer or still out are forgotten, and their examples are used again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from headwater.common.errors import CountOutOfRange, HeadwaterError, StaleUpdate, TooFewOfModel
from headwater.common.messages import Plan, ReadyReport, Update, UpdateReport
from headwater.common.offline.terms import OfflineTerms
from headwater.common.settings.schema import Settings
from headwater.server.asynchronous.dispatching_fleet import DispatchingFleet
from headwater.server.asynchronous.masked_buffer import (
    in_sessions,
    joined,
    masked_rounds,
    with_graphs,
    without_company,
)
from headwater.server.asynchronous.overlapping_plans import OverlappingPlans, overlapping
from headwater.server.asynchronous.plans_out import PlansOut
from headwater.server.asynchronous.staleness import StalenessRule, figures_of
from headwater.server.fleet import Dropout, Fleet, Traffic
from headwater.server.planning.cohort import ConnectedClients
from headwater.server.planning.plan_table import PlanTable
from headwater.server.planning.round_plans import RoundPlans
from headwater.server.rounds.checkpoint import saved_round
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.open_round import OpenRound
from headwater.server.rounds.round_loop import Stopwatch, connected_clients, finish_round
from headwater.server.rounds.round_row import RoundRow
from headwater.server.rounds.run_folder import save_checkpoint
from headwater.server.rounds.run_state import Training


def buffer_size(settings: Settings, num_present: int) -> int:
    """Return the updates of a step: as set, or three quarters of the present clients, rounded up.

    Not present are clients that have been at work for longer than the last step, as they are away
    or slow: a buffer that counts them might wait for them. benchmarks/RESULTS.md has the figures.
    """
    chosen = settings.asynchronous.buffer
    return max(-(-3 * num_present // 4), settings.num_clients_needed) if chosen is None else chosen


class BufferedRounds:
    """The clients at work, from step to step; a call runs one step."""

    def __init__(self, fleet: DispatchingFleet, settings: Settings) -> None:
        self._fleet = fleet
        self._plans_out = PlansOut(settings)
        self._has_begun = False
        self._plans: dict[str, Plan] = {}
        """Each plan that is out."""
        self._owned: dict[str, int] = {}
        self._exceptions: dict[str, str] = {}
        self._secure = secure = settings.secure
        self._least = None if secure.aggregation == "off" else secure.min_members
        """The fewest members of a secure session; None without masks."""
        self._refused: dict[str, int] = {}
        """The round of each client's last update, if it was refused."""
        self._waiting: dict[str, ReadyReport] = {}
        """The clients whose masked updates wait for others of their model."""
        self._next = OverlappingPlans(fleet) if settings.asynchronous.overlap else None
        """The plans after those that are in ``_plans``; None: there are none (``--overlap``)."""
        self._clients: ConnectedClients | None = None
        """The clients of this step; None before the first."""
        self._counted: Traffic | None = None
        """The bytes that the steps so far have counted; None before the first."""
        self._stepped_at = 0.0
        """The virtual time of the last step."""

    def __call__(self, training: Training, fleet: Fleet, observer: Observer) -> RoundRow:
        """Fill one buffer, and commit its step in memory.

        Raises:
            HeadwaterError: see ``headwater.server.rounds.round_loop.finish_round``.
        """
        watch = Stopwatch()
        if not self._has_begun:
            if _has_checkpoint(training):
                self._plans_out.restore(version=training.round, counted=training.counted)
            else:
                self._plans_out.discard_other_run()
        self._has_begun = True
        planned, num_updates = self._plan(training, observer, watch)
        rule = StalenessRule(
            version=training.round,
            chosen=training.settings.asynchronous,
            num_others=num_updates - 1,
        )
        before = self._counted or fleet.traffic()
        opened = training.open_round(planned, num_updates=num_updates, times_of=rule.times)
        observer.asked(opened)
        new = {name: plan for name, plan in opened.plans.items() if name not in self._plans}
        opened.ready |= self._waiting
        self._plans |= new
        self._give_up_stale(rule, opened)
        self._dispatch(training, new)
        self._plan_next(training, num_updates)
        self._fill(training, opened, rule, num_updates, watch)
        self._close_buffer(opened)
        answered = self._take_answered(opened)
        opened.plans = answered
        plain_times = training.sum.weight
        row = finish_round(
            training,
            fleet,
            observer,
            replace(planned, plans=PlanTable.of(answered)),
            opened,
            watch,
            before,
        )
        self._counted = Traffic(  # what comes from now on belongs to the next step
            bytes_up=before.bytes_up + row.bytes_up, bytes_down=before.bytes_down + row.bytes_down
        )
        names = opened.accepted.keys() | {one.name for one in row.masked_clients}
        times = plain_times if self._least is None else masked_rounds(training).summed_times
        figures = figures_of(rule, [answered[name] for name in names], summed_times=times)
        now = self._fleet.virtual_now()
        virtual_seconds = None if now is None else now - self._stepped_at
        self._stepped_at = now or 0.0
        return replace(
            row,
            virtual_seconds=virtual_seconds,
            staleness_mean=figures.mean,
            staleness_max=figures.most,
            model_versions={name: plan.model_version for name, plan in answered.items()},
            num_windows=_windows_of(opened),
            discounted_weight=figures.discounted_weight,
            num_stale=sum(isinstance(why, StaleUpdate) for why in opened.refused.values()),
            num_at_work=len(self._plans.keys() | (self._next.plans.keys() if self._next else ())),
        )

    def _plan(
        self, training: Training, observer: Observer, watch: Stopwatch
    ) -> tuple[RoundPlans, int]:
        """Plan for the free clients; return the plans of all that work then, and the buffer."""
        planner, settings = training.planner, training.settings
        if self._next is not None:
            self._next.begin(self._plans, training.counted)
        clients = self._clients = connected_clients(training, self._fleet)
        watch.lap("wait")
        observer.begun(training.round + 1, clients.all_reports)
        num_clients = len(clients.reports.keys() | self._plans.keys())
        most = settings.cohort.size or num_clients
        num_absent = sum(plan.round < training.round for plan in self._plans.values())
        num_updates = buffer_size(settings, min(num_clients, most) - num_absent)
        planned = planner.plan(
            clients,
            round_number=training.round + 1,
            counted=training.counted,
            turn_seconds=self._fleet.turn_seconds(),
            busy=self._plans.keys(),
            num_updates=num_updates,
        )
        self._fleet.ask_again(
            {name: planner.describe_request(left_out=why) for name, why in planned.left_out.items()}
        )
        watch.lap("plan")
        self._owned |= planned.owned
        self._exceptions |= planned.exceptions
        plans = {**self._plans, **self._joined(planned.plans, self._plans)}
        return (
            replace(
                planned, plans=PlanTable.of(plans), owned=self._owned, exceptions=self._exceptions
            ),
            min(num_updates, len(plans)),
        )

    def _joined(self, new: Mapping[str, Plan], earlier: Mapping[str, Plan]) -> Mapping[str, Plan]:
        """Return the new plans as they are sent: see ``joined``, and ``OfflineTerms``."""
        if self._least is not None:
            return joined(new, earlier, least=self._least)
        # After an aborted step, a number may be that of another plan which the client has by now.
        self._refused = {
            n: at for n, at in self._refused.items() if n not in new or at < new[n].round
        }
        # Without offline windows a device keeps no sum, and one of an earlier version does not know
        # the field.
        refused = {
            name: self._refused[name]
            for name in new.keys() & self._refused.keys()
            if new[name].max_windows > 1
        }
        if self._next is not None:
            return overlapping(new)
        return {
            **new,
            **{
                n: new[n].asking(OfflineTerms(windows=new[n].max_windows, refused_round=at))
                for n, at in refused.items()
            },
        }

    def _plan_next(self, training: Training, num_updates: int) -> None:
        """Send each client that has one plan another, to carry out while its update is sent."""
        clients = self._clients
        is_last = not training.settings.has_round_after(training.round + 1)
        if self._next is None or clients is None or is_last:
            return
        planned = training.planner.plan(
            clients,
            round_number=training.round + 1,
            counted=training.counted,
            turn_seconds=self._fleet.turn_seconds(),
            busy=self._next.busy(self._plans, clients.reports),
            num_updates=num_updates,
        )
        self._owned |= planned.owned
        self._dispatch(training, self._next.add(planned.plans, self._plans))

    def _give_up_stale(self, rule: StalenessRule, opened: OpenRound) -> None:
        """Stop waiting for updates that would be refused: their clients get newer plans sooner.

        So the fleet keeps at most ``max_staleness`` + 1 models that clients may still fetch.
        """
        errors: dict[str, HeadwaterError] = {}
        for name, plan in self._plans.items():
            try:
                rule.check(name, plan.model_version)
            except StaleUpdate as error:
                if name in self._waiting:
                    del opened.ready[name]
                    opened.refuse_answer(name, error)
                else:
                    errors[name] = error
        if self._least is not None:
            at_work = self._plans.keys() - self._waiting.keys()
            for name in self._without_company(opened, at_work):
                errors.setdefault(name, _too_few_of_model(name, self._plans[name], self._least))
        self._fleet.give_up(errors)

    def _without_company(self, opened: OpenRound, at_work: Collection[str]) -> list[str]:
        assert self._least is not None
        return without_company(opened.ready, at_work, opened.plans, least=self._least)

    def _num_in(self, opened: OpenRound) -> int:
        """Return the updates that a step would count now."""
        if self._least is None:
            return len(opened.accepted)
        return len(in_sessions(opened.ready, opened.plans, least=self._least))

    def _num_awaited(self, opened: OpenRound, num_updates: int) -> int:
        """Return the updates that a step waits for: no more than could still be in sessions."""
        if self._least is None:
            return num_updates
        at_work = [name for name in self._plans if not has_answered(opened, name)]
        alone = self._without_company(opened, at_work)
        for name in opened.ready.keys() & alone:
            del opened.ready[name]
            error = _too_few_of_model(name, opened.plans[name], self._least)
            opened.refuse_answer(name, error)
        hopeful = len(opened.ready) + len(set(at_work) - set(alone))
        return min(num_updates, hopeful)

    def _close_buffer(self, opened: OpenRound) -> None:
        """Leave in the round the masked updates that are in a session; the others wait on.

        Raises:
            NoSuchGraph: see ``with_graphs``.
        """
        if self._least is None:
            return
        names = in_sessions(opened.ready, opened.plans, least=self._least)
        chosen = set(with_graphs(names, opened.plans, secure=self._secure))
        self._waiting = {n: one for n, one in opened.ready.items() if n not in chosen}
        opened.ready = {n: one for n, one in opened.ready.items() if n in chosen}

    def _fill(
        self,
        training: Training,
        opened: OpenRound,
        rule: StalenessRule,
        num_updates: int,
        watch: Stopwatch,
    ) -> None:
        """Take answers until the buffer is full, or no plan is out any more."""
        fold_seconds = 0.0
        while self._num_in(opened) < self._num_awaited(opened, num_updates):
            answer = self._fleet.next_answer()
            if answer is None:
                if not self._plan_newcomers(training, opened, num_updates):
                    break
                continue
            start = time.perf_counter()
            self._take(training, opened, answer, rule)
            fold_seconds += time.perf_counter() - start
        watch.lap("train", less=fold_seconds)
        watch.split["fold"] = fold_seconds

    def _plan_newcomers(self, training: Training, opened: OpenRound, num_updates: int) -> bool:
        """Send plans to the clients that joined while the buffer fills; False if none is out."""
        planner = training.planner
        clients = self._fleet.describe(planner.describe_request(), min_clients=0)
        planned = planner.plan(
            clients,
            round_number=training.round + 1,
            counted=training.counted,
            turn_seconds=self._fleet.turn_seconds(),
            busy=self._plans.keys(),
            num_updates=num_updates,
        )
        left = {name: one for name, one in self._plans.items() if name not in opened.refused}
        plans = self._joined(planned.plans, left)
        self._plans |= plans
        self._owned |= planned.owned
        self._exceptions |= planned.exceptions
        opened.plans = {**opened.plans, **plans}
        self._dispatch(training, plans)
        return any(not has_answered(opened, name) for name in self._plans)

    def _take_answered(self, opened: OpenRound) -> Mapping[str, Plan]:
        """Return the plans that were answered or given up; their clients are free."""
        done = [name for name in self._plans if has_answered(opened, name)]
        for name in done:
            del self._plans[name]
        for name in opened.accepted:
            self._plans_out.remove(name, opened.plans[name].round)
            self._refused.pop(name, None)
        return {name: opened.plans[name] for name in done}

    def _dispatch(self, training: Training, plans: Mapping[str, Plan]) -> None:
        if plans and self._plans_out.is_kept:
            self._keep_first_model(training)
        if self._plans_out.add(plans, version=training.round):
            training.publish()  # a standby takes the answers to them too
        if self._least is not None:
            oldest = min((plan.model_version for plan in self._plans.values()), default=0)
            masked_rounds(training).note_sent(training.round, oldest=oldest)
        self._fleet.dispatch(plans, training.image, round_number=training.round + 1)

    def _keep_first_model(self, training: Training) -> None:
        """Write the checkpoint of a run that has taken no step, before its first plans are sent.

        With it the next server has the same run and model, and takes what devices sum under them.

        Raises:
            CheckpointFailed: see ``save_checkpoint``.
        """
        folder = training.settings.out
        if folder is not None and not _has_checkpoint(training):
            save_checkpoint(training, self._fleet, folder)

    def _take(
        self,
        training: Training,
        opened: OpenRound,
        answer: Update | ReadyReport | Dropout,
        rule: StalenessRule,
    ) -> None:
        """Check an answer; add it to the buffer's sum, or record why not.

        A client that had no link may answer a newer plan with the sum of an earlier one. If that is
        refused, its next plan says so: a client that has not heard of it would send it again.
        """
        plan = opened.plans.get(answer.name)
        if isinstance(answer, Update) and plan is not None and answer.name not in opened.accepted:
            answered = self._plans_out.answered_by(answer.report)
            if answered is not None and answered != plan:
                plan = answered
                opened.plans = {**opened.plans, answer.name: plan}
        try:
            if isinstance(answer, Update):
                rule.check(answer.name, _version_of(answer.report, plan))
                self._check_time(training, answer.report, plan)
            elif plan is not None and isinstance(answer, ReadyReport):
                rule.check(answer.name, plan.model_version)
            opened.take(answer)
        except (StaleUpdate, CountOutOfRange) as error:
            opened.refuse_answer(answer.name, error)
        if isinstance(answer, Update) and answer.name in opened.refused:
            self._plans_out.remove(answer.name, answer.report.round)
            self._refused[answer.name] = answer.report.round
        if self._next is not None:
            self._next.note_answers(opened.accepted, opened.refused)

    def _check_time(self, training: Training, report: UpdateReport, plan: Plan | None) -> None:
        """Check that a client had time for its windows; a simulated one is believed.

        Raises:
            CountOutOfRange: see ``PlansOut.check_time``.
        """
        known = training.planner.known.get(report.name)
        if plan is not None and known is not None and self._fleet.virtual_now() is None:
            self._plans_out.check_time(report, plan, known.line)


def _has_checkpoint(training: Training) -> bool:
    """Return whether the run has a checkpoint: a run that begins finds none in its folder."""
    folder = training.settings.out
    return folder is not None and saved_round(folder) is not None


def _version_of(report: UpdateReport, plan: Plan | None) -> int:
    """Return the model that an update is of; of one that no known plan has, by its round."""
    is_known = plan is not None and plan.round == report.round
    return plan.model_version if plan is not None and is_known else report.round - 1


def has_answered(opened: OpenRound, name: str) -> bool:
    """Return whether a client has answered its plan, or was given up."""
    return name in opened.accepted or name in opened.ready or name in opened.refused


def _too_few_of_model(name: str, plan: Plan, least: int) -> TooFewOfModel:
    return TooFewOfModel(
        f"{name}: fewer than {least} masked updates are left of model {plan.model_version}"
    )


def _windows_of(opened: OpenRound) -> dict[str, int]:
    """Return the windows of each accepted update that has more than one."""
    return {
        name: report.num_windows
        for name, report in opened.accepted.items()
        if report.num_windows > 1
    }
