"""The device's own policy for masked plans: what it refuses, and when it goes on to new examples.

Every decision here follows from plans, the device's settings and what it told the server before,
never from an example: a refusal is a message that the server reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwater.client.trainer.client_examples import MAX_REPEATED
from headwater.client.training.sampler import SamplerState
from headwater.common.compression.terms import CompressionTerms
from headwater.common.errors import (
    CohortTooSmall,
    CountOutOfRange,
    MaskingTooWeak,
    TooLittleTime,
    UpdateAlreadyMasked,
)
from headwater.common.estimates.linear_fit import Line
from headwater.common.messages import MAX_STEPS, Plan
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.secagg.graph import ceil_fraction
from headwater.common.secagg.terms import MaskingTerms
from headwater.common.settings.rounds import MIN_MASKED_FRACTION
from headwater.common.settings.schema import SecureSettings

LEAST_TIME = 0.8
# A plan may be answered after this many times what it takes, or after a day: a masked device is
# silent until then, for any server. (One with little work may have until the slowest is done.)
MOST_TIMES, MOST_IDLE = 200.0, 86_400.0
"""Of the time that a device needs for its quota, by its own figures: a plan gives at least this."""


def check_plan(
    plan: Plan,
    secure: SecureSettings,
    *,
    name: str,
    told_examples: int | None,
    has_own_parameters: bool = False,
) -> None:
    """Check a masked plan. ``told_examples`` is the number of examples that the device reported.

    ``has_own_parameters`` says whether parameters stay on the device, whatever the plan says.

    Raises:
        MaskingTooWeak: the plan asks for fewer examples than the device's least quota, or holds
            examples out: a server could leave one example to train on, under model after model.
        MaskingTooWeak: its noise counts on fewer colluding devices in a session than the device.
        MaskingTooWeak: it does not say when it is to be answered, and the device requires masks.
        MaskingTooWeak: it sends anything but all coordinates, random ones or factors that all
            members share; or so little that what is left out would come to outweigh the update.
        MaskingTooWeak: what earlier rounds left enters the update (a residual, own parameters), and
            the device requires active masks: a server that chooses models can have one member
            bring many rounds, and the others none.
        MaskingTooWeak: its local steps could make one member's part more than its weight says.
        CohortTooSmall: fewer clients are invited than the device requires in a session.
        CountOutOfRange: it asks for more examples than a device can list, or micro-batches than a
            window has, or weighs the update by more examples than the device reported.
    """
    if plan.quota < secure.min_quota:
        raise MaskingTooWeak(
            f"{name}, round {plan.round}: the plan asks for {plan.quota} examples, this device "
            f"masks at least {secure.min_quota}",
            remedy="raise the quota, or lower secure.min_quota on the device",
        )
    terms, privacy = plan.of(CompressionTerms), plan.of(PrivacyTerms)
    asked = plan.of(MaskingTerms) or MaskingTerms()
    if terms is not None and (
        terms.method not in ("random-k", "low-rank")
        or terms.sent_share < MIN_MASKED_FRACTION
        or privacy is not None
    ):
        raise MaskingTooWeak(
            f"{name}, round {plan.round}: the plan sends {terms.sent_share:.2g} of an update, in "
            f"{terms.method}, and a masked update without noise sends all coordinates, or random "
            f"ones or factors of at least {MIN_MASKED_FRACTION:g}",
            remedy="use --compress low-rank or random-k on the server, with a larger "
            "--compress-rank or --compress-fraction",
        )
    if (plan.carries_state or has_own_parameters) and secure.aggregation == "active":
        raise MaskingTooWeak(
            f"{name}, round {plan.round}: what this device keeps of earlier rounds would enter its "
            "update, and it requires masks that withstand a server that lies",
            remedy="leave out --local-parameters, --compress or its compression.feedback, and an "
            "--algorithm that keeps a state",
        )
    if plan.held_out_fraction:
        raise MaskingTooWeak(
            f"{name}, round {plan.round}: the plan holds out {plan.held_out_fraction:g} of the "
            "examples, and a device that masks tests nothing",
            remedy="leave out --evaluate-on-devices",
        )
    if asked.answer_seconds is None and secure.aggregation != "off":
        raise MaskingTooWeak(
            f"{name}, round {plan.round}: the plan does not say when it is to be answered, and the "
            "time that this device takes would be an answer that depends on its examples",
            remedy="use a server of this version",
        )
    if asked.num_invited is not None and asked.num_invited < secure.min_members:
        raise CohortTooSmall(
            f"{name}, round {plan.round}: {asked.num_invited} clients are invited, and this device "
            f"masks among at least {secure.min_members}",
            remedy=f"set secure.min_members = {secure.min_members} on the server, which then waits "
            "for as many (and --cohort-size no lower); or lower it on the device",
        )
    num_invited = asked.num_invited
    if privacy is not None and num_invited is None and secure.aggregation != "off":
        raise MaskingTooWeak(
            f"{name}, round {plan.round}: the plan does not say how many clients are invited, of "
            "whom a share may collude against the noise",
            remedy="use a server of this version",
        )
    if privacy is not None and num_invited is not None:
        least = ceil_fraction(secure.corrupted, num_invited)
        if privacy.min_colluding < least:
            raise MaskingTooWeak(
                f"{name}, round {plan.round}: the noise counts on {privacy.min_colluding} "
                f"colluding devices in a session, this device on {least} of {num_invited}, who may "
                "all be in one session",
                remedy="raise secure.corrupted on the server, or lower it on the device",
            )
    for one in plan.terms.values():
        if (fault := one.unfit_for_masks(plan.quota)) is not None:
            raise MaskingTooWeak(
                f"{name}, round {plan.round}: {fault}",
                remedy="set usual arguments of the local optimizer, and fewer local steps",
            )
    if plan.accumulation_steps > MAX_STEPS:  # the window would end there, short of its quota
        raise CountOutOfRange(
            f"{name}, round {plan.round}: {plan.quota:,} examples in micro-batches of "
            f"{plan.micro_batch_size} are {plan.accumulation_steps:,}, and a window has at most "
            f"{MAX_STEPS:,}"
        )
    if plan.quota > MAX_REPEATED:
        raise CountOutOfRange(
            f"{name}, round {plan.round}: the plan asks for {plan.quota:,} examples, a masked one "
            f"may ask for {MAX_REPEATED:,}"
        )
    if plan.weigh_as is not None and plan.weigh_as > (told_examples or 0):
        raise CountOutOfRange(
            f"{name}, round {plan.round}: the plan weighs the update as {plan.weigh_as:,} "
            f"examples, the device told of {told_examples or 0:,}",
            remedy="start the device with --declared-examples",
        )


def check_time(plan: Plan, pace: Line | None, *, name: str, needs_pace: bool = False) -> None:
    """Check that a masked plan leaves time for its quota.

    What a device cannot do in time it leaves out: a server that gives all members but one hardly a
    moment opens that one's update. Each member that follows this refuses such a plan, so the one is
    left without a session. ``pace`` are the seconds of a micro-batch, as the device measured and
    told them before it held a model of the server's; None if it told none: ``needs_pace`` refuses
    that, as a server that never asks could then give any time.

    Raises:
        MaskingTooWeak: it does not say so, or would keep the device silent for long.
        TooLittleTime: it does not.
    """
    if pace is None and needs_pace:
        raise MaskingTooWeak(
            f"{name}, round {plan.round}: the server has not asked how fast this device is, and "
            "could give it too little time for its part of the sum",
            remedy="use a server of this version",
        )
    limits = (plan.answer_by, plan.deadline_seconds, plan.finish_seconds)
    given = min((seconds for seconds in limits if seconds is not None), default=math.inf)
    needed = 0.0 if pace is None else _seconds_of(plan, pace)
    idle = plan.answer_by
    if pace is not None and idle is not None and idle > max(MOST_TIMES * needed, MOST_IDLE):
        raise MaskingTooWeak(
            f"{name}, round {plan.round}: the plan is answered after {idle:,.0f} s, and this "
            f"device told that its part takes {needed:.3g} s: it would be silent until then",
            remedy="lower secure.answer_factor on the server",
        )
    if given < LEAST_TIME * needed:
        raise TooLittleTime(
            f"{name}, round {plan.round}: the plan gives {given:.3g} s for {plan.quota} examples "
            f"in micro-batches of {plan.micro_batch_size}, and this device told that they take "
            f"{needed:.3g} s: what it leaves out would show the other members' parts",
            remedy="raise --deadline, or ask for fewer examples",
        )


def check_passed(plan: Plan, pace: Line | None, seconds: float, *, name: str) -> None:
    """Check that a window that the owner's limits or a signal ended had time for its quota.

    A server that knows when devices leave could plan just before that. What decides is the clock
    alone, whether the window was done by then or not.

    Raises:
        MaskingTooWeak: it had not, so the device is in no session with what it has summed.
    """
    needed = 0.0 if pace is None else _seconds_of(plan, pace)
    if seconds < LEAST_TIME * needed:
        raise MaskingTooWeak(
            f"{name}, round {plan.round}: this device was stopped after {seconds:.3g} s of "
            f"{needed:.3g} s: the little that it has summed would show the other members' parts",
            remedy="nothing is to be done: it takes part again when it is back",
        )


def taken_apart(pace: Line) -> Line:
    """Return the pace of windows each of which has to be taken apart.

    Each micro-batch is passed twice, and each example then alone.
    """
    return Line(base=2 * pace.base, each=2 * pace.each + pace.base)


def _seconds_of(plan: Plan, pace: Line) -> float:
    """Return the seconds of a plan's gradients; a round without any is cut short by no time."""
    if not plan.asks_model:
        return 0.0
    return plan.accumulation_steps * pace.base + plan.quota * pace.each


def check_share(plan: Plan, given: float, *, name: str) -> None:
    """Check that a masked plan counts on no more of the device's time than ``given``.

    That is what it told last, or gives now. A masked window is done whole, so a plan that counts on
    more would take more time than the owner gives.

    Raises:
        MaskingTooWeak: it does.
    """
    if plan.share is not None and plan.share > given:
        raise MaskingTooWeak(
            f"{name}, round {plan.round}: the plan counts on {plan.share:.3g} of this device's "
            f"time, and it told that it gives {given:.3g}",
            remedy="use a server of this version",
        )


def most_planned(secure: SecureSettings, num_owned: int) -> int:
    """Return the most examples that all masked plans at one model may ask for, but for the first.

    What the device declares, else the largest power of two that it owns: a server that repeats one
    model learns no more of the number than that.
    """
    return secure.declared_examples or 1 << max(num_owned.bit_length() - 1, 0)


def check_repeats(plan: Plan, *, name: str, num_planned_before: int, most: int) -> None:
    """Check a plan against the earlier plans whose updates were masked at the same model.

    The decision follows from plans and ``most`` alone, and not from which examples are left.

    Raises:
        UpdateAlreadyMasked: there were some, and hardly an example may be left: the update would be
            a small part of the sum, and hide the other members' too little.
    """
    both = num_planned_before + max(num_planned_before, plan.max_examples)
    if num_planned_before and both > most:
        raise UpdateAlreadyMasked(
            f"{name}, round {plan.round}: updates of {num_planned_before:,} examples were masked "
            f"before, at the same model, and this device gives at most {most:,} to one model",
            remedy="continue that run with --resume, begin with another model (--seed), or ask for "
            "fewer examples than a device has; --declared-examples on the device sets the limit",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRepeats:
    """How often a device trained on the same examples, at which model, without masking the sum."""

    model: str = ""
    count: int = 0

    @staticmethod
    def of(plain: Mapping[str, Any] | None) -> PlanRepeats:
        """Read the state file's entry; none yet if there is no entry."""
        return PlanRepeats() if plain is None else PlanRepeats(**plain)

    def follow(
        self, plan: Plan, sampler: SamplerState, *, model: str, most: int
    ) -> tuple[PlanRepeats, SamplerState]:
        """Return the count with this plan, and the sampler from which its window is taken.

        A plan repeats the last window only with the same model (``model`` is its digest), as after
        an aborted round, and at most ``most`` times; otherwise it gets the examples after it. So no
        examples are used with two models unless an epoch comes back to them.
        """
        is_same = sampler.pending_round not in (None, plan.counted_round)
        if is_same and (model != self.model or self.count >= most):
            sampler, is_same = sampler.passed(), False
        return PlanRepeats(model=model, count=self.count + 1 if is_same else 1), sampler


def answer_after(plan: Plan, passed_seconds: float) -> float:
    """Return the seconds, from the plan's arrival, after which a masked plan is answered.

    This is the plan's own time. If ``passed_seconds`` are more, as of a single micro-batch that
    takes longer than the whole plan should, it is that time doubled until it is not: a long window
    then shows a power of two, and not how long it took. 0 for a plan without a time.
    """
    seconds = plan.answer_by or 0.0
    while 0 < seconds < passed_seconds:
        seconds *= 2
    return seconds
