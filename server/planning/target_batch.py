"""A round's target: the number of examples of its effective batch.

The settings choose one of three ways: a number of examples; a number of tokens (units of weight),
divided by the weight of an example; or the gradient noise scale, which is estimated from round to
round. The planner divides the target among the clients. A round may sum fewer examples, after a
deadline or a dropout; the learning rate follows the actual batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from headwater.common.errors import CheckpointCorrupt
from headwater.common.settings import schema as settings
from headwater.server.planning.noise_scale import DECAY, NoiseScale, RoundNoise

if TYPE_CHECKING:
    from headwater.server.planning.vitals_columns import Ints

TargetBy = Literal["examples", "tokens", "noise scale"]

# The target at most doubles or halves from one round to the next: the noise scale of the first
# rounds is hardly known, and the learning rate may depend on it.
MAX_CHANGE = 2.0
# A single example does not show the noise. With twice as many examples as clients, some client has
# two or more, however they are divided, so that a target at its minimum can rise again.
MIN_PER_CLIENT = 2


class Demand(Protocol):
    """The work of a round in the place of a target batch, before it is divided by speed."""

    @property
    def step_examples(self) -> int:
        """The examples of which a quota is made up; no micro-batch is larger."""

    @property
    def held_bytes(self) -> int:
        """What a device holds beside model and gradient."""

    @property
    def has_set_shares(self) -> bool:
        """Whether each client's part is set, whatever its speed."""

    def target(self, owned: Collection[int]) -> int:
        """Return the examples of a round of clients that own so many."""

    def most(self, num_examples: Ints) -> Ints:
        """Return the most examples of each client."""

    def set_quotas(self, each: Ints, num_examples: Ints) -> Ints:
        """Return the quotas where K is set, to ``each`` examples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTotals:
    """Totals of one round's batch, or of several, with each earlier round multiplied by DECAY."""

    num_examples: float = 0.0
    summed_weight: float = 0.0  # the weight that the losses were summed over
    sent_weight: float = 0.0  # the updates' weight; it differs only with dataset weighting

    def after(self, later: BatchTotals) -> BatchTotals:
        """Return the decayed totals after one more round."""
        return BatchTotals(
            num_examples=DECAY * self.num_examples + later.num_examples,
            summed_weight=DECAY * self.summed_weight + later.summed_weight,
            sent_weight=DECAY * self.sent_weight + later.sent_weight,
        )


def target_by(plan: settings.PlanSettings) -> TargetBy | None:
    """Return which of the three ways the settings choose; None where K is set."""
    if plan.accumulation_steps is not None:
        return None
    if plan.tokens_per_update is not None:
        return "tokens"
    return "noise scale" if plan.follow_noise_scale else "examples"


def examples_for(tokens: float, weight_per_example: float) -> int:
    """Return how many examples contain at least this number of tokens."""
    return max(math.ceil(tokens / weight_per_example), 1)


def following(
    current: int, noise_scale: float | None, *, weight_per_example: float, most: int
) -> int:
    """Return the next target on the way from ``current`` to the noise scale [units of weight].

    It is between half and twice the current target, at least 1 and at most ``most``. While the
    noise scale is unknown, the target stays.
    """
    if noise_scale is None:
        return min(current, most)
    wanted = noise_scale / weight_per_example
    near = min(max(wanted, current / MAX_CHANGE), current * MAX_CHANGE)
    return min(max(round(near), 1), most)


def evened(quota: Ints, micro_batch_size: Ints) -> Ints:
    """Return the sizes that divide each quota evenly, into at least two micro-batches.

    The number of micro-batches stays, or becomes two. The first one and all of them together are
    then batches of sufficiently different sizes: an estimate of S from 16 and 17 examples would
    have 11 to 17 times the variance of one from 8 and 16.
    """
    num_micro_batches = np.maximum(-(-quota // micro_batch_size), 2)
    sizes: Ints = np.maximum(-(-quota // num_micro_batches), 1)
    return sizes


class Target:
    """The target of the current round, and the state that it follows from."""

    def __init__(
        self,
        plan: settings.PlanSettings,
        *,
        max_weight_per_example: int,
        weight_unit: float = 1.0,
        demand: Demand | None = None,
    ) -> None:
        """Start before the first round; ``demand`` replaces the target batch.

        All weights but those of the settings are in units of ``weight_unit`` tokens.
        """
        self._plan = plan
        self._weight_unit = weight_unit
        self._max_weight = max_weight_per_example
        self.demand = demand
        self.by = target_by(plan) if demand is None else None
        self.noise_scale = NoiseScale()
        self._seen = BatchTotals()
        self._followed = plan.effective_batch_size
        self._num_invited = 1

    @property
    def weight_per_example(self) -> float:
        """The mean of the committed rounds; before the first one, the maximum of the task."""
        seen = self._seen
        return seen.summed_weight / seen.num_examples if seen.summed_weight else self._max_weight

    @property
    def num_examples(self) -> int:
        """The target of the current round."""
        if self._plan.tokens_per_update is not None:
            tokens = self._plan.tokens_per_update / self._weight_unit
            return examples_for(tokens, self.weight_per_example)
        if self.by == "noise scale":
            return max(self._followed, MIN_PER_CLIENT * self._num_invited)
        return self._plan.effective_batch_size

    def open(self, *, num_invited: int, owned: Collection[int] = ()) -> int:
        """Return the target of a round, in examples; the invited clients own ``owned``."""
        self._num_invited = num_invited
        return self.num_examples if self.demand is None else self.demand.target(owned)

    def micro_batch_size(self, quota: Ints, planned: Ints) -> Ints:
        """Return each quota's micro-batch size: as planned, or one that shows the noise."""
        return evened(quota, planned) if self.by == "noise scale" else planned

    def commit(self, totals: BatchTotals, noise: RoundNoise | None) -> None:
        """Update the state after a committed round."""
        current = self.num_examples
        self._seen = self._seen.after(totals)
        if noise is not None:
            self.noise_scale = self.noise_scale.after(noise)
        if self.by == "noise scale":
            self._followed = following(
                current,
                self.noise_scale.ratio,
                weight_per_example=self._seen.sent_weight / self._seen.num_examples,
                most=self._plan.max_effective_batch_size,
            )

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {
            "followed": self._followed,
            "num_examples": self._seen.num_examples,
            "summed_weight": self._seen.summed_weight,
            "sent_weight": self._seen.sent_weight,
            "variance": self.noise_scale.variance,
            "squared_gradient": self.noise_scale.squared_gradient,
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore what ``state`` returned; an empty mapping leaves the initial state.

        Raises:
            CheckpointCorrupt: a figure is missing.
        """
        if not state:
            return
        try:
            self._seen = BatchTotals(
                num_examples=state["num_examples"],
                summed_weight=state["summed_weight"],
                sent_weight=state["sent_weight"],
            )
            self.noise_scale = NoiseScale(
                variance=state["variance"], squared_gradient=state["squared_gradient"]
            )
            self._followed = int(state["followed"])
        except KeyError as error:
            raise CheckpointCorrupt(f"the state of the target has no {error}") from error


def described(plan: settings.PlanSettings, *, max_weight_per_example: float) -> str:
    """Return a line that describes the target, with its arithmetic where it is known.

    ``max_weight_per_example`` is in tokens.
    """
    tokens, most = plan.tokens_per_update, max_weight_per_example
    if tokens is not None:
        if plan.micro_batch_size is None:
            per_unit, unit = f"{most:,}", "examples"
            units = tokens / most
        else:
            per_unit, unit = f"({plan.micro_batch_size:,} x {most:,})", "micro-batches"
            units = tokens / (plan.micro_batch_size * most)
        number = f"{units:,.0f}" if units.is_integer() else f"{units:,.1f}"
        line = f"the planner shares out {tokens:,} tokens / {per_unit} = {number} {unit}"
        return line if most == 1 else f"{line} in round 1, then by the mean tokens of an example"
    examples = f"{plan.effective_batch_size:,} examples per round"
    if plan.follow_noise_scale:
        return (
            f"the planner follows the gradient noise scale, from {examples} to "
            f"{plan.max_effective_batch_size:,} at most"
        )
    return f"the planner shares out {examples}"
