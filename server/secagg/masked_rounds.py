"""The masked rounds of a run: which secure sessions sum a cohort, and what a run remembers of them.

A cohort is one session, or several disjoint ones while a client is sought that masks false numbers
(``headwater.server.secagg.group_testing``).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwater.common.errors import (
    FirstSumClipped,
    LateUpdate,
    RoundAborted,
    UpdateAlreadyMasked,
)
from headwater.common.estimates.ring_histogram import ring_histogram
from headwater.common.messages import Plan
from headwater.common.model.vectors import zero_tensors
from headwater.common.secagg.fixed_point import WIDE_RING
from headwater.common.secagg.masked_numbers import NUM_ZERO
from headwater.common.task import task_code
from headwater.common.user_code.task_spec import code_of
from headwater.common.wording import counted
from headwater.server.aggregation.round_reports import RoundSum, added_sums
from headwater.server.fleet import Fleet
from headwater.server.rounds.features import ModelAtRest, Opening, RunFeature, RunState
from headwater.server.rounds.open_round import OpenRound
from headwater.server.secagg import group_testing
from headwater.server.secagg.encoding_state import EncodingState, check_numbers, decode_sum
from headwater.server.secagg.group_sums import sum_groups
from headwater.server.secagg.opened_figures import OpenedFigures
from headwater.server.secagg.opened_norms import OpenedNorms
from headwater.server.secagg.parameters import SessionSetup
from headwater.server.secagg.retries import sum_masked
from headwater.server.secagg.session import ReadyCohort, setup_of
from headwater.server.secagg.session_counter import SessionNumbers
from headwater.server.secagg.unmask_phase import UnmaskedSum

log = logging.getLogger(__name__)

MASKED_FALSELY = "SumOutOfRange: the sums in and out of range show that it masked a false number"
MAX_LATE = 3
ANSWERED_LATE = f"it answered {MAX_LATE} sessions in a row too late"

RANDOM_ROOM = 2.0
"""What random-k leaves out grows in the first rounds: from the first to the second it doubles."""

# The log says so where the first sum's largest gradient is below so many times its rounding.
MIN_SIGNAL = 100.0


class MaskedRounds(RunFeature):
    """Opens secure sessions, and keeps what a run's masked rounds hand on to the next one."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._image = run.held_model
        spec = run.settings.task
        self._task = code_of(type(run.task)) if spec is None else task_code(spec)
        self.version_tried: int | None = None
        """The last model at which clients were ready to mask in this run."""
        self.summed_at: bytes | None = None
        """The digest of the last model at which a session of this run was opened."""
        self.seen: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        """What the server saw of the last session: the histograms of one member's masked vector,
        and of the opened sum."""
        self.summed_times = 0
        """The divisor of the last mean: each session's weight, as often as it counts."""
        self._has_narrowed = False
        self._publish: Callable[[], None] = lambda: None
        self._digests: dict[int, bytes] = {}
        """Of the models that asynchronous plans were sent with, by their versions."""
        self._encodings: dict[str, EncodingState] = {}
        """By the side of low rank, whose factors are unlike; "" of all else."""
        self._suspicion = group_testing.Suspicion()
        self._norms = OpenedNorms()
        self._figures = OpenedFigures()
        self._times_late: dict[str, int] = {}
        self._sessions: SessionNumbers | None = None

    def share(self, publish: Callable[[], None]) -> None:
        """Call ``publish`` when a session's number is stored, before it is used."""
        self._publish = publish

    def open(self, opening: Opening) -> None:
        self._has_narrowed = False

    @property
    def has_learned(self) -> bool:
        """Whether the sums of the last round told more about which client masks false numbers."""
        return self._has_narrowed

    @property
    def _norm_multiple(self) -> float:
        chosen = self._run.settings.aggregation
        return math.inf if chosen.beyond_norm == "keep" else chosen.norm_multiple

    @property
    def leaves_out_paused(self) -> bool:
        """Whether devices would mask their examples at one model twice, and refuse the second.

        An asynchronous run, one without an end, and a private one have other turns.
        """
        settings = self._run.settings
        has_other_turns = settings.asynchronous.is_on or settings.num_rounds is None
        return not has_other_turns and not settings.privacy.is_on

    def answered(self, opened: OpenRound) -> None:
        """Let clients sit out that masked too much at this model; note that others are ready.

        Raises:
            ModelAtRest: too few are left for a session, and the model will not change without one.
            UpdateAlreadyMasked: all refuse, and no session of this run was the reason.
        """
        run = self._run
        refusing = _masked_before(opened, version=run.round)
        run.planner.sit_out(refusing, round_number=run.round + 1)
        num_left, needed = len(opened.plans) - len(refusing), run.settings.num_clients_needed
        if refusing and num_left < needed and self.is_at_rest:
            raise ModelAtRest
        if opened.ready:
            self.version_tried = run.round
            return
        is_tried = self.version_tried == run.round
        if refusing and len(refusing) == len(opened.plans) and not is_tried:
            raise UpdateAlreadyMasked(
                f"round {run.round + 1}: {counted(len(refusing), 'client')} masked most of their "
                "examples at this model before this run began",
                remedy="go on with the run that they were in (--resume), take another --seed, or "
                "ask for fewer examples",
            )

    def close(self, opened: OpenRound, fleet: Fleet) -> RoundSum:
        """Unmask the sum of the clients that are ready.

        Raises:
            TooFewClients: fewer than --min-clients are ready, or survived.
            RoundAborted: the secure session was aborted.
        """
        self._run.check_enough(opened, opened.ready)
        done = self._sum(opened, fleet)
        self._run.check_enough(opened, done.names)
        return done

    def figures(self, opened: OpenRound) -> dict[str, Any]:
        if not opened.ready or self.seen is None:
            return {}
        return {"ring_masked": self.seen[0], "ring_opened": self.seen[1]}

    @property
    def is_at_rest(self) -> bool:
        """Whether the model is still that of the last session: the step since moved nothing.

        Two sums of one example at one model differ by the dropouts, so devices mask it once there,
        whatever number the server gives the model.
        """
        return self.summed_at is not None and self.summed_at == self._image.digest

    def note_sent(self, version: int, *, oldest: int) -> None:
        """Note the digest of the model that plans are sent with; forget those before ``oldest``.

        Asynchronous rounds open sessions of updates of earlier models.
        """
        self._digests = {at: digest for at, digest in self._digests.items() if at >= oldest}
        if version not in self._digests:
            self._digests[version] = self._image.digest

    def _sum(self, opened: OpenRound, fleet: Fleet) -> RoundSum:
        """Sum the ready clients' masked updates: a session for each model that they are of.

        So no session has members of two models. Each opened sum counts as often as an update of its
        model does (``OpenRound.times``). If some of several sessions are aborted, their clients are
        refused, and the rest count.

        Raises:
            RoundAborted: all secure sessions were aborted.
        """
        sums: list[RoundSum] = []
        times: list[int] = []
        aborted: list[tuple[list[str], RoundAborted]] = []
        for names in clients_by_model(opened.ready, opened.plans).values():
            plans = {name: opened.plans[name] for name in names}
            cohort = ReadyCohort.of(
                {name: opened.ready[name] for name in names},
                plans,
                max_weight_per_example=self._run.max_weight_per_example,
                task=self._task,
                metrics=opened.metrics,
                num_values=self._image.layout.num_parameters,
            )
            plan = plans[names[0]]
            try:
                done = self._sum_of_model(cohort, plan, opened, fleet)
            except RoundAborted as error:
                aborted.append((names, error))
            else:
                sums.append(done)
                times.append(opened.times(plan))
        if not sums:
            raise aborted[0][1]
        for names, why in aborted:
            log.warning("%s: %s", why.code, why)
            for name in names:
                opened.refused.setdefault(name, why)
        self.summed_times = sum(n * one.weight for n, one in zip(times, sums, strict=True))
        done = added_sums(sums, times)
        if opened.extra is not None:
            for number, one in zip(times, sums, strict=True):
                opened.extra.add(one.sums, weight=one.weight, times=number)
        return done if opened.has_one_model else replace(done, noise=None)

    def _sum_of_model(
        self, cohort: ReadyCohort, plan: Plan, opened: OpenRound, fleet: Fleet
    ) -> RoundSum:
        """Sum a cohort of one model; ``plan`` is one of its plans.

        The encoding changes with a decoded sum alone.

        Raises:
            RoundAborted: a secure session was aborted.
        """
        run, refuse = self._run, opened.refuse
        chosen, run_id = run.settings.secure, run.run_id
        exclude = partial(run.planner.exclude, round_number=run.round + 1)
        if self._sessions is None:
            self._sessions = SessionNumbers(
                self._run.settings.out, run_id=run_id, publish=self._publish
            )
        sessions = self._sessions
        kind = "" if cohort.coding is None else cohort.coding.terms.side or ""
        encoding = self._encodings.get(kind, EncodingState())
        rotation_seed = os.urandom(32)
        digests = self._digests  # of synchronous rounds there are none: all plans have this model
        model_digest = digests[plan.model_version] if digests else self._image.digest
        model_digest = plan.digest_at(model_digest)
        groups = group_testing.groups(
            cohort.ready,
            self._suspicion,
            least=chosen.min_members,
            seed=f"{run_id} {plan.round}".encode(),
        )

        def set_up(group: ReadyCohort) -> SessionSetup:
            return setup_of(
                group,
                chosen,
                encoding,
                run_id=run_id,
                number=sessions.next(plan.round),
                num_values=self._image.layout.num_parameters,
                model_digest=model_digest,
                rotation_seed=rotation_seed,
                whole=cohort if len(groups) > 1 else None,
            )

        num_values = self._image.layout.num_parameters
        bounds, num_masked = None, cohort.num_masked(num_values)
        ring_bits = encoding.ring_bits(
            chosen.ring_bits, num_masked, is_private=cohort.privacy is not None
        )
        if ring_bits < 32:
            bounds = encoding.block_bounds(num_masked)

        def run_session(group: ReadyCohort) -> UnmaskedSum:
            unmasked = sum_masked(
                group,
                fleet,
                set_up=set_up,
                bounds=bounds,
                phase_seconds=chosen.phase_seconds,
                refuse=refuse,
                leave_out=exclude,
            )
            for feature in self._run.features.values():
                feature.reveal(opened, unmasked)
            self.seen = unmasked.first_seen, ring_histogram(unmasked.vector_P)
            return unmasked

        norms: list[float] = []

        def check(unmasked: UnmaskedSum) -> None:
            check_numbers(unmasked)
            is_left = cohort.coding is not None
            norms.append(
                self._norms.check(
                    unmasked, bounds, multiple=self._norm_multiple, may_weigh_nothing=is_left
                )
            )

        sums = sum_groups(cohort, groups, run_session=run_session, check=check, refuse=refuse)
        before = self._suspicion
        for norm in norms:
            self._norms = self._norms.after(norm)
        self._suspicion, culprits = sums.after(before)
        self._has_narrowed |= bool(culprits) or self._suspicion.is_narrower(before)
        exclude(dict.fromkeys(culprits, MASKED_FALSELY))
        exclude(dict.fromkeys(self._late_again(cohort.ready, opened), ANSWERED_LATE))
        suspects = self._suspicion.suspects
        if suspects and suspects != before.suspects:
            log.warning("a false number is from one of %d clients", len(suspects))
        room = 1.0 if cohort.coding is None else RANDOM_ROOM
        total, was_blind = sums.total(), encoding.is_blind
        if not plan.asks_model:  # of zeros nothing follows for the next vector
            return decode_sum(total, encoding)[0]
        done, self._encodings[kind] = decode_sum(total, encoding, room=room)
        done, self._figures = self._figures.believed(done)
        if done.num_clipped:
            is_guess = was_blind and ring_bits != WIDE_RING and "privacy" not in plan.terms
            self._note_clipped(plan.round, done.num_clipped, total, is_guess=is_guess)
        if was_blind and "privacy" not in plan.terms:
            _warn_of_rounding(plan.round, done, total)
        self.summed_at = model_digest
        if cohort.coding is not None:
            mean_P = torch.zeros(num_values)
            cohort.coding.projection(num_values).scatter_add(done.mean_P, mean_P)
            return replace(done, mean_P=mean_P)
        if total.numbers[NUM_ZERO] == 0:  # see there; a rotation leaves no tensor at zero
            spans = self._image.layout.spans
            unused = zero_tensors(done.mean_P, spans, range(len(spans)))
            done = replace(done, unused=unused)
        return done

    def _late_again(self, ready: Iterable[str], opened: OpenRound) -> list[str]:
        """Return the members whose answers sessions did not wait for, ``MAX_LATE`` times in a row.

        The count of each begins again.
        """
        for name in ready:
            is_late = isinstance(opened.refused.get(name), LateUpdate)
            self._times_late[name] = self._times_late.get(name, 0) + 1 if is_late else 0
        again = [name for name, times in self._times_late.items() if times >= MAX_LATE]
        counts = self._times_late.items()
        self._times_late = {name: times for name, times in counts if 0 < times < MAX_LATE}
        return again

    def _note_clipped(
        self, number: int, num_clipped: int, total: UnmaskedSum, *, is_guess: bool
    ) -> None:
        """Warn of a sum with clipped numbers; at bounds that were a guess it takes no step.

        Raises:
            FirstSumClipped: no sum was known before, and the ring is too small for any gradient.
        """
        num_masked = len(total.survived) * (len(total.vector_P) + len(total.numbers))
        found = f"round {number}: {num_clipped:,} of {num_masked:,} masked numbers were clipped"
        if is_guess:
            raise FirstSumClipped(f"{found} at the bound of a run without a sum so far")
        log.warning("%s: the sum is off by what was beyond their bounds, which widen now", found)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the checkpoint."""
        suspicion = group_testing.to_json(self._suspicion)
        summed_at = None if self.summed_at is None else self.summed_at.hex()
        return {
            **self._encodings.get("", EncodingState()).to_json(),
            "sides": {kind: one.to_json() for kind, one in self._encodings.items() if kind},
            "suspicion": suspicion,
            "norms": asdict(self._norms),
            "figures": asdict(self._figures),
            "times_late": self._times_late,
            "summed_at": summed_at,
        }

    def restore(self, row: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take the state that ``to_json`` gave; the initial state from an empty row."""
        sides = {kind: EncodingState.of_json(one) for kind, one in row.get("sides", {}).items()}
        self._encodings = {"": EncodingState.of_json(row), **sides}
        self._suspicion = group_testing.from_json(row.get("suspicion", {}))
        self._norms = OpenedNorms.of_json(row.get("norms", {}))
        self._figures = OpenedFigures.of_json(row.get("figures", {}))
        self._times_late = dict(row.get("times_late", {}))
        summed_at = row.get("summed_at")
        self.summed_at = None if summed_at is None else bytes.fromhex(summed_at)


def _masked_before(opened: OpenRound, *, version: int) -> list[str]:
    """Return the clients that refuse further plans at this model, as they masked too much at it."""
    return [
        name
        for name, error in opened.refused.items()
        if isinstance(error, UpdateAlreadyMasked)
        and name in opened.plans
        and opened.plans[name].model_version == version
    ]


def clients_by_model(names: Iterable[str], plans: Mapping[str, Plan]) -> dict[int, list[str]]:
    """Return clients by the version of the model in their plans, the oldest first."""
    found: dict[int, list[str]] = {}
    for name in names:
        found.setdefault(plans[name].model_version, []).append(name)
    return dict(sorted(found.items()))


def _warn_of_rounding(number: int, done: RoundSum, total: UnmaskedSum) -> None:
    """Warn of a first sum whose gradients are so small that the ring's steps show in them."""
    encoding = total.session.parameters.encoding
    step = math.ldexp(1.0, -encoding.scale_bits) / done.weight
    rounding = math.sqrt(len(total.survived) / 12) * step
    largest = float(done.mean_P.abs().max()) if len(done.mean_P) else 0.0
    if largest < MIN_SIGNAL * rounding:
        log.warning(
            "round %d: the largest mean gradient of the first masked sum is %.2g, and its rounding "
            "%.2g, as its scale was not known; later sums are finer. If gradients are so small "
            "throughout, scale the loss up",
            number,
            largest,
            rounding,
        )
