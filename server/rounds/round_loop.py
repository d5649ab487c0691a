"""Runs all rounds of a training: plan, train, sum, divide once, take one step, store a checkpoint.

A ``Fleet`` brings the clients' answers in any order; nothing here depends on Flower or sockets.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from headwater.common.errors import (
    FeatureMissing,
    HeadwaterError,
    LateUpdate,
    RoundAborted,
    RunFolderGone,
    TaskError,
    TermEnded,
)
from headwater.common.settings.schema import Settings
from headwater.common.system.stop_signals import interrupts_held, raise_if_interrupted
from headwater.common.task import shown_metrics
from headwater.common.wording import counted
from headwater.server.aggregation.round_reports import RoundSum
from headwater.server.aggregation.round_seconds import measured_split, virtual_split
from headwater.server.fleet import Fleet, Traffic
from headwater.server.planning.cohort import ConnectedClients
from headwater.server.planning.exclusions import breaches, owners_reasons
from headwater.server.planning.known_clients import Told
from headwater.server.planning.round_plans import RoundPlans
from headwater.server.rounds import evaluation
from headwater.server.rounds.checkpoint import keep_frozen
from headwater.server.rounds.evaluation import EvaluatedRound
from headwater.server.rounds.features import ModelAtRest
from headwater.server.rounds.observer import Drained, Observer, Observers
from headwater.server.rounds.open_round import OpenRound
from headwater.server.rounds.round_figures import row_of_round
from headwater.server.rounds.round_row import RoundRow
from headwater.server.rounds.run_folder import (
    interrupt_after,
    removal_named,
    resume_or_begin,
    save_checkpoint,
    save_last,
    step_back,
    write_settings,
)
from headwater.server.rounds.run_state import Training

log = logging.getLogger(__name__)

OnRound = Callable[[RoundRow], None]
RunRound = Callable[[Training, Fleet, Observer], RoundRow]
"""Runs one round, and commits it in memory."""
NO_OBSERVER = Observers()
FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.5, 8.0
POLL_SECONDS = 0.1
CHECKPOINT_SECONDS = 2.0
"""Between checkpoints where the rounds after one can be run again to the bit."""


def run(
    training: Training,
    fleet: Fleet,
    *,
    on_round: OnRound,
    resume: bool = False,
    observer: Observer = NO_OBSERVER,
    run_round: RunRound | None = None,
) -> None:
    """Run all rounds of ``training.settings``, and write the model to the folder ``out``.

    ``on_round`` is called with each committed round. A drained run ends after its last committed
    round and leaves the same files. ``run_round`` replaces the synchronous round.

    Raises:
        HeadwaterError: see ``headwater.common.errors``. Committed rounds stay in the checkpoint.
    """
    settings = training.settings
    folder = settings.out
    training.check()
    if folder is not None:
        resume_or_begin(training, fleet, folder, resume=resume)
        for feature in training.features.values():
            feature.begin(num_rounds=training.round)
    fleet.share_frozen(training.image)
    try:
        observer.loaded(training.task)
        observer.started(settings, round_number=training.round, model=training.image.model)
        if folder is not None:
            write_settings(folder, _with_rounds_done(settings, training.round))
            keep_frozen(folder, training.image)
            if resume:
                observer.resumed(training.round, training.changed)
            for feature in training.features.values():
                feature.saved(folder)  # a kill may have come between the checkpoint and this
            training.publish()
        with removal_named(folder):
            _run_rounds(training, fleet, on_round, observer, run_round or synchronous_round)
    except BaseException as ended_by:
        try:
            # After its term another server has the run, and this folder may hold a stray round.
            # A folder that is gone is not made anew.
            if folder is not None and not isinstance(ended_by, TermEnded | RunFolderGone):
                _leave(training, fleet, folder)
                save_last(folder, training)
        except HeadwaterError as error:
            # The error that ended the run is the one to show; this one may follow from it.
            log.warning("%s: %s", error.code, error)
        if _is_interrupt(ended_by):
            raise interrupt_after(training.round, folder) from ended_by
        raise
    else:
        if folder is not None:
            with removal_named(folder):
                if training.num_unsaved:
                    _save_state(training, fleet, folder)
                save_last(folder, training)
                training.publish()
        training.optimizer.keep()
    finally:
        observer.ended()


def _is_interrupt(error: BaseException) -> bool:
    """Whether an error is an interrupt, which a library may have turned into its own error."""
    if not isinstance(error, HeadwaterError):
        try:
            raise_if_interrupted()
        except KeyboardInterrupt:
            return True
    return isinstance(error, KeyboardInterrupt)


def _with_rounds_done(settings: Settings, done: int) -> Settings:
    """Return the settings of a run's folder: no fewer rounds than the run has."""
    if settings.has_round_after(done):
        return settings
    return settings.model_copy(update={"rounds": done})


def _leave(training: Training, fleet: Fleet, folder: Path) -> None:
    """Prepare the last files after an error: the model is that of the last committed round.

    Where a step may be half taken, or is in no row, it is that of the checkpoint, which a resumed
    run goes on from in any case.
    """
    if training.num_unsaved and training.is_between_rounds:
        _save_state(training, fleet, folder)
    if not training.num_unsaved or training.is_stepping:
        step_back(training, folder)
    if training.num_unsaved:
        log.warning(
            "the model is that of round %d; --resume runs the last %s again, to the bit",
            training.round,
            counted(training.num_unsaved, "round"),
        )


def _run_rounds(
    training: Training,
    fleet: Fleet,
    on_round: OnRound,
    observer: Observer,
    run_round: RunRound,
) -> None:
    settings, aborted, is_passed = training.settings, list[RoundAborted](), False
    while settings.has_round_after(training.round):
        raise_if_interrupted()
        if (why := training.why_stopped) is not None:
            log.warning("stopped after %s: %s", _rounds_so_far(training), why)
            return
        if training.pass_round():
            if not is_passed:
                log.warning(
                    "round %d is left out, as its learning rate is 0; so are those after it until "
                    "the schedule raises the rate",
                    training.round,
                )
            is_passed = True
            continue
        is_passed = False
        training.is_between_rounds = False
        try:
            row = run_round(training, fleet, observer)
        except Drained:
            return
        except ModelAtRest:
            log.warning(
                "the run ends after %s: %s, and its devices have masked what they give to one "
                "model; more of it would tell the server more about them",
                _rounds_so_far(training),
                "its last step changed no bit of the model (a learning rate near 0, or gradients "
                "of 0)"
                if training.round
                else "no sum of its first model counted",
            )
            return
        except RoundAborted as error:
            observer.aborted(error)
            aborted.append(error)
            _try_again(training, fleet, aborted)
        else:
            row = replace(row, num_aborted=len(aborted), settings_changed=training.take_changed())
            aborted.clear()
            _save(training, fleet, row, observer, on_round)


def _rounds_so_far(training: Training) -> str:
    settings = training.settings
    of = "" if settings.num_rounds is None else f" of {settings.rounds}"
    return f"round {training.round}{of}"


def _try_again(training: Training, fleet: Fleet, aborted: Sequence[RoundAborted]) -> None:
    """Wait before a round is tried again whose attempts were aborted so far.

    Raises:
        RoundAborted: there were too many.
    """
    first, last = aborted[0], aborted[-1]
    log.warning("%s: %s", last.code, last)
    has_learned = any(one.has_learned for one in training.features.values())
    if len(aborted) >= training.settings.cohort.max_aborted_rounds and not has_learned:
        if type(first) is type(last):
            raise last
        raise _since(first, last) from first
    if not (fleet.has_virtual_clock or has_learned):
        wait_after_abort(len(aborted))


def _save(
    training: Training, fleet: Fleet, row: RoundRow, observer: Observer, on_round: OnRound
) -> None:
    """Write what outlives the server after a committed round, and tell who listens."""
    settings, features = training.settings, training.features.values()
    if evaluation.is_due(settings, round_number=row.round):
        for feature in features:
            feature.tested(row)
    with interrupts_held():
        observer.stepped(row)
        training.num_unsaved += 1
        training.is_between_rounds, training.is_stepping = True, False
        if settings.out is not None and _is_checkpoint_due(training, fleet):
            _save_state(training, fleet, settings.out)
        observer.on_round(row)
        on_round(row)


def _is_checkpoint_due(training: Training, fleet: Fleet) -> bool:
    """Whether the last round's checkpoint is written now; else with a later round."""
    is_asked = any(one.needs_checkpoint for one in training.features.values())
    is_old = time.monotonic() - training.saved_at >= CHECKPOINT_SECONDS
    return is_old or is_asked or not fleet.can_repeat_rounds


def _save_state(training: Training, fleet: Fleet, folder: Path) -> None:
    save_checkpoint(training, fleet, folder)
    training.num_unsaved, training.saved_at = 0, time.monotonic()
    for feature in training.features.values():
        feature.saved(folder)
    training.publish()


def _since(first: RoundAborted, last: RoundAborted) -> RoundAborted:
    """Return the error of a round's last attempt, with the first one's cause and remedy.

    Later attempts may fail as the first one used up what devices give to one model.
    """
    text = f"{last.message}; the first attempt ended in {first.code}: {first.message}"
    return type(last)(text, remedy=first.remedy)


def wait_after_abort(num_aborted: int) -> None:
    """Wait before an aborted round is tried again; a request to stop ends the wait.

    A disk that is full or a network that is down for some seconds would otherwise end a run within
    milliseconds: all attempts would fail for the same reason.
    """
    seconds = seconds_after_abort(num_aborted)
    log.info("the round is tried again in %g s", seconds)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        raise_if_interrupted()
        time.sleep(min(left, POLL_SECONDS))


def seconds_after_abort(num_aborted: int) -> float:
    """Return 0.5 s after the first abort in a row, and twice as many each time, up to 8 s."""
    return min(FIRST_WAIT_SECONDS * 2.0 ** min(num_aborted - 1, 10), MAX_WAIT_SECONDS)


def synchronous_round(training: Training, fleet: Fleet, observer: Observer) -> RoundRow:
    """Run one round and commit it in memory."""
    watch = Stopwatch()
    planned = _plan(training, fleet, observer, watch)
    before = fleet.traffic()
    opened = training.open_round(planned)
    observer.asked(opened)
    _train(training, fleet, opened, watch)
    row = finish_round(training, fleet, observer, planned, opened, watch, before)
    if not fleet.has_virtual_clock:
        return row
    return replace(row, virtual_seconds=_virtual_seconds(row, opened, training.settings))


def _virtual_seconds(row: RoundRow, opened: OpenRound, settings: Settings) -> float:
    """Return when a simulated round ends: with its slowest update, or at its deadline.

    Until then a server waits for a device that is late.
    """
    deadline = settings.cohort.deadline_seconds
    if deadline is None or not any(isinstance(e, LateUpdate) for e in opened.refused.values()):
        return row.slowest_client_seconds
    return deadline


def finish_round(
    training: Training,
    fleet: Fleet,
    observer: Observer,
    planned: RoundPlans,
    opened: OpenRound,
    watch: Stopwatch,
    before: Traffic,
) -> RoundRow:
    """Learn from a round's answers, divide once, take the step, and return the round's row.

    ``before`` is the traffic before the round.

    Raises:
        HeadwaterError: see ``Training.close_round`` and ``Training.commit``.
    """
    single, ready = opened.accepted.single, opened.ready.values()
    told = [
        Told(one.columns.names, one.columns.vitals, *one.timing) for one in opened.accepted.blocks
    ]
    told += [Told.by(single)] if single else []
    told += [Told.by_ready(ready)] if ready else []
    training.planner.known.learn(
        planned.plans,
        told=told,
        refused=opened.refused,
        exceptions=planned.exceptions,
    )
    training.planner.note_refused(opened.refused)
    training.left_out_log.note_empty(opened)
    training.planner.exclude(
        owners_reasons(opened.refused), round_number=training.round + 1, is_by_owner=True
    )
    if len(opened.accepted) >= training.settings.num_clients_needed:  # else none would be left
        training.planner.exclude(breaches(opened.refused), round_number=training.round + 1)
    try:
        _raise_common_fault(opened)
        for feature in training.features.values():
            feature.answered(opened)
        done = training.close_round(opened, fleet)
    finally:
        observer.closed(opened)
    watch.lap("unmask" if opened.ready else "divide")
    client_seconds = _client_seconds(training, fleet, opened, before, watch.split)
    step = training.commit(done, opened)
    watch.lap("step")
    evaluated = _evaluate(training, fleet, opened, done)
    watch.lap("evaluate")
    traffic = fleet.traffic().since(before)
    row = row_of_round(
        training, planned, opened, done, step, evaluated, traffic, watch.split, client_seconds
    )
    training.left_out_log.note(row)
    if not fleet.has_virtual_clock:
        fleet.ask_again(training.planner.to_measure(planned, round_number=training.round))
    return row


def _client_seconds(
    training: Training,
    fleet: Fleet,
    opened: OpenRound,
    before: Traffic,
    seconds_split: Mapping[str, float],
) -> dict[str, float]:
    """Return the mean seconds of the clients by part; nothing in an asynchronous round."""
    if not opened.has_one_model:
        return {}
    ready = opened.ready.values()
    if fleet.has_virtual_clock:
        down, up = training.planner.transfer_bytes()
        return virtual_split(opened.columns, ready, download_bytes=down, upload_bytes=up)
    parts = ("train", "fold", "unmask")
    return measured_split(
        opened.columns,
        ready,
        fleet.traffic().since(before).links,
        round_seconds=sum(seconds_split.get(part, 0.0) for part in parts),
    )


def connected_clients(training: Training, fleet: Fleet) -> ConnectedClients:
    """Wait until enough clients of the run are connected; return all of them that are."""
    planner = training.planner
    counts = planner.counts(round_number=training.round + 1)
    asked = (feature.awaited() for feature in training.features.values())
    awaited = [one for one in asked if one is not None]
    clients = fleet.describe(
        planner.describe_request(),
        min_clients=training.settings.num_clients_needed,
        counts=lambda report: counts(report) and all(one(report.name) for one in awaited),
    )
    return planner.admitted(clients)


def _plan(training: Training, fleet: Fleet, observer: Observer, watch: Stopwatch) -> RoundPlans:
    """Wait for enough clients, plan the round, and ask the left-out clients to describe themselves.

    Their descriptions may have changed when the next round is planned.
    """
    planner = training.planner
    planner.is_simulated = fleet.has_virtual_clock
    clients = connected_clients(training, fleet)
    watch.lap("wait")
    names = clients.reports.keys()
    turns = (feature.turns(names) for feature in training.features.values())
    observer.begun(training.round + 1, clients.all_reports)
    planned = planner.plan(
        clients,
        round_number=training.round + 1,
        counted=training.counted,
        turn_seconds=fleet.turn_seconds(),
        due=next((one for one in turns if one is not None), None),
    )
    fleet.ask_again(
        {name: planner.describe_request(left_out=why) for name, why in planned.left_out.items()}
    )
    watch.lap("plan")
    return planned


def _train(training: Training, fleet: Fleet, opened: OpenRound, watch: Stopwatch) -> None:
    """Send the plans, and add up the updates as they arrive."""
    fold_seconds = 0.0
    answers = fleet.train(
        opened.plans,
        training.sent_model(),
        num_needed=training.settings.num_clients_needed,
        timeout_seconds=training.settings.cohort.deadline_seconds,
    )
    for answer in answers:
        start = time.perf_counter()
        opened.take(answer)
        fold_seconds += time.perf_counter() - start
    watch.lap("train", less=fold_seconds)
    watch.split["fold"] = fold_seconds
    if not fleet.has_virtual_clock:
        training.planner.round_seconds = watch.split["train"] + fold_seconds


def _raise_common_fault(opened: OpenRound) -> None:
    """Raise a fault of the task, or of a feature, that every client of the round has.

    It ends the run: the next round would meet it again. One client's word ends nothing: others that
    were merely late or away may answer the next round.

    Raises:
        TaskError, FeatureMissing: it is the first client's error, with its name.
    """
    refused = opened.refused
    if opened.accepted or opened.ready or opened.plans.keys() - refused.keys():
        return
    if refused and all(isinstance(one, TaskError | FeatureMissing) for one in refused.values()):
        name, error = next(iter(refused.items()))
        text = error.message.removeprefix(f"{name}: ")
        raise type(error)(f"{name}: {text}", remedy=error.remedy) from error


def _evaluate(
    training: Training, fleet: Fleet, opened: OpenRound, done: RoundSum
) -> EvaluatedRound:
    """Return the round's metrics: of the training always, of tests in the rounds that have them."""
    metrics: dict[str, float] = {}
    if not math.isnan(done.loss_sum):  # of a round that trained
        shown = shown_metrics(training.task, done.metric_sums, done.weight)
        metrics = {f"train_{name}": value for name, value in shown.items()}
    chosen = training.settings.evaluation
    if not evaluation.is_due(training.settings, round_number=training.round):
        return EvaluatedRound(metrics=metrics)
    tested = training.evaluate_on_server()
    found = EvaluatedRound()
    if chosen.on_devices:
        plans = {
            name: plan.model_copy(
                update={
                    "model_version": training.round,
                    "counted_round": training.counted.get(name),
                }
            )
            for name, plan in opened.plans.items()
        }
        answers = fleet.evaluate(
            plans, training.sent_model(), timeout_seconds=training.settings.cohort.deadline_seconds
        )
        found = evaluation.on_devices(
            answers,
            task=training.task,
            round_number=training.round,
            most_weight=opened.most_weights,
        )
    return replace(
        found,
        metrics=metrics | tested.metrics | found.metrics,
        num_test_left_out=tested.num_test_left_out,
    )


class Stopwatch:
    """Splits a round's seconds by its parts."""

    def __init__(self) -> None:
        self.split: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str, *, less: float = 0.0) -> None:
        """End a part; ``less`` are seconds that are counted in another part."""
        now = time.perf_counter()
        self.split[name] = now - self._last - less
        self._last = now
