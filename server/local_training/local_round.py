"""The work of a round of local training, before it is divided by speed, and in words."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwater.common.local_training.local_optimizer import FLOAT_BYTES, held_bytes
from headwater.common.local_training.local_terms import LocalTerms, local_terms
from headwater.common.settings.schema import Settings
from headwater.common.wording import counted

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRound:
    """The work of a round of local training, before it is divided by speed.

    Passes over its own data are each device's own number of examples. Local steps are H of B
    examples for a device of mean speed; as with K, a slower device takes fewer, a faster one more,
    as long as it has examples that it has not used in the round.
    """

    step_examples: int
    """B, the examples of one local step of one device."""
    epochs: int | None
    """E; None if H is set."""
    steps: int
    """H; 1 if E is set."""
    is_equal: bool
    """Whether every device takes H steps, a slow one of fewer examples: K is set, or the plans are
    masked, whose members must not differ in what makes one update longer than another."""
    held_bytes: int
    """What the steps hold beside model and gradient: the start, and the optimizer's state."""

    def target(self, owned: Collection[int]) -> int:
        """Return the examples of a round of clients that own so many."""
        if self.epochs is not None:
            return self.epochs * sum(owned)
        return self.steps * self.step_examples * len(owned)

    def most(self, num_examples: Ints) -> Ints:
        """Return the most examples of each client."""
        if self.epochs is not None:
            return self.epochs * num_examples
        return np.maximum(num_examples, self.steps * self.step_examples)

    @property
    def has_set_shares(self) -> bool:
        return self.epochs is not None

    def set_quotas(self, each: Ints, num_examples: Ints) -> Ints:
        """Return the quotas where K is set, to ``each`` examples of a local step."""
        return self.steps * each if self.epochs is None else self.most(num_examples)

    def num_steps(self, quota: int, *, num_examples: int) -> int:
        """Return the steps of a client that owns so many examples: of about B each.

        A whole number of passes has a whole number of steps in each.
        """
        if self.is_equal and self.epochs is None:
            return self.steps
        if self.epochs is None:
            return min(max(round(quota / self.step_examples), 1), quota)
        per_pass = -(-num_examples // self.step_examples)
        return max(round(quota * per_pass / num_examples), 1)


def local_round(chosen: Settings, *, num_parameters: int) -> LocalRound | None:
    """Return a round's local work by the settings; None if devices sum exactly.

    Raises:
        SettingsError: the local optimizer cannot be made.
    """
    local, plan = chosen.local, chosen.plan
    if not local.is_on:
        return None
    terms = local_terms(local, plan) if chosen.algorithm.name is None else LocalTerms()
    held = held_bytes(terms, num_parameters=num_parameters)
    state = held - FLOAT_BYTES * num_parameters
    # The state as it was read and as it goes on; with SCAFFOLD c and what each step gets as well.
    kept = {"nothing": 0, "optimizer": 2 * state, "control variate": 16 * num_parameters}
    return LocalRound(
        step_examples=local.step_examples(plan),
        epochs=local.num_epochs,
        steps=local.num_steps,
        is_equal=plan.accumulation_steps is not None or chosen.secure.aggregation != "off",
        held_bytes=held + kept[local.preset.keeps],
    )


def described_local(chosen: Settings) -> str:
    """Return a line that describes the work of local training."""
    local, plan = chosen.local, chosen.plan
    steps = f"steps of {counted(local.step_examples(plan), 'example')}"
    if local.num_epochs is not None:
        amount = f"{counted(local.num_epochs, 'epoch')} in {steps}"
    else:
        amount = f"{local.num_steps:,} {steps} on each device"
    name = chosen.local_schedule.name
    by = "" if name is None else f" by {name}"
    own = f"local {local.kind} at {local.rate:g}{by}"
    pull = f", proximal {local.mu:g}" if local.mu else ""
    corrected = ", normalized" if local_terms(local, plan).is_normalized else ""
    if chosen.algorithm.name is not None:
        own, pull, corrected = f"the client algorithm {chosen.algorithm.label}", "", ""
    return f"{amount} of {own}{pull}{corrected}"
