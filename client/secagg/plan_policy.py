"""The device's own policy for masked plans: what it refuses, and when it goes on to new examples.

Every decision here follows from plans, the device's settings and what it told the server before,
never from an example: a refusal is a message that the server reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwater.client.trainer.client_examples import MAX_REPEATED
from headwater.client.training.sampler import SamplerState
from headwater.common.errors import CountOutOfRange, MaskingTooWeak
from headwater.common.messages import Plan
from headwater.common.settings.schema import SecureSettings


def check_plan(plan: Plan, secure: SecureSettings, *, name: str, told_examples: int | None) -> None:
    """Check a masked plan. ``told_examples`` is the number of examples that the device reported.

    Raises:
        MaskingTooWeak: the plan asks for fewer examples than the device's least quota, or holds
            examples out: a server could leave one example to train on, under model after model.
        CountOutOfRange: it asks for more than a device can list, or weighs the update by more
            examples than the device reported.
    """
    if plan.quota < secure.min_quota:
        raise MaskingTooWeak(
            f"{name}, round {plan.round}: the plan asks for {plan.quota} examples, this device "
            f"masks at least {secure.min_quota}",
            remedy="raise the quota, or lower secure.min_quota on the device",
        )
    if plan.held_out_fraction:
        raise MaskingTooWeak(
            f"{name}, round {plan.round}: the plan holds out {plan.held_out_fraction:g} of the "
            "examples, and a device that masks tests nothing",
            remedy="leave out --evaluate-on-devices",
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


def schedule_seconds(plan: Plan, pace: float | None) -> float:
    """Return the seconds after which a masked plan is answered; 0 if there is no schedule.

    ``pace`` is what an example took in this device's last windows, None if there was none.
    """
    seconds = plan.finish_seconds
    if seconds is None:
        seconds = 0.0 if pace is None else pace * plan.quota
    return seconds if plan.deadline_seconds is None else min(seconds, plan.deadline_seconds)
