"""How many examples a round is to gather: its target effective batch.

Three ways, of which the settings choose one: a number of examples; a number of tokens, that is of
weight, over the weight of an example; or the gradient noise scale as it is followed from round to
round. The planner shares the target out. What a round really gathers may be less (a deadline, a
dropout, the end of a device's examples), and the learning rate follows that, not the target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headwater.common.errors import CheckpointCorrupt, SettingsError
from headwater.common.settings import schema as settings
from headwater.server.planning.noise_scale import DECAY, NoiseScale, RoundNoise

TargetBy = Literal["examples", "tokens", "noise scale"]

# The target at most doubles or halves from one round to the next: the noise scale of the first
# rounds is hardly known, and the learning rate may depend on it.
LARGEST_CHANGE = 2.0
# One example says nothing of the noise. Of twice as many as there are clients somebody is asked for
# two or more, however they are shared out, so that a target at its least can rise again.
LEAST_PER_CLIENT = 2

DEFAULT_EXAMPLES = settings.PlanSettings().effective_batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTotals:
    """What rounds have gathered: sums, or sums in which each round fades by DECAY."""

    num_examples: float = 0.0
    summed_weight: float = 0.0  # what the losses were summed over
    sent_weight: float = 0.0  # what the updates weighed; another only with dataset weighting

    def after(self, later: BatchTotals) -> BatchTotals:
        """Return the fading sums behind one more round."""
        return BatchTotals(
            num_examples=DECAY * self.num_examples + later.num_examples,
            summed_weight=DECAY * self.summed_weight + later.summed_weight,
            sent_weight=DECAY * self.sent_weight + later.sent_weight,
        )


def check(plan: settings.PlanSettings) -> None:
    """Check that the settings choose one target.

    Of the two batch sizes the examples count as set if they are not the default: a run's own
    settings.toml names every setting.

    Raises:
        SettingsError: two are set, or one that this run cannot keep to.
    """
    is_k_set = plan.accumulation_steps is not None
    has_examples = plan.effective_batch_size != DEFAULT_EXAMPLES
    if plan.tokens_per_update is not None:
        if plan.follow_noise_scale or has_examples:
            other = "--follow-noise-scale" if plan.follow_noise_scale else "--effective-batch-size"
            raise SettingsError(
                f"both --tokens-per-update and {other} say what a round gathers",
                remedy=f"leave out --tokens-per-update or {other}",
            )
        if is_k_set:
            raise SettingsError(
                "--accumulation-steps sets what each client does, so that no tokens can be shared "
                "out",
                remedy="leave out --accumulation-steps or --tokens-per-update",
            )
    if not plan.follow_noise_scale:
        return
    if is_k_set:
        raise SettingsError(
            "--accumulation-steps sets what each client does, so that the batch cannot follow the "
            "noise scale",
            remedy="leave out --accumulation-steps or --follow-noise-scale",
        )
    if plan.local_steps > 1:
        raise SettingsError(
            f"with {plan.local_steps} local steps the model moves between the micro-batches, and "
            f"their norms tell no noise scale",
            remedy="leave out --local-steps or --follow-noise-scale",
        )
    if plan.effective_batch_size > plan.max_effective_batch_size:
        raise SettingsError(
            f"the noise scale is followed from --effective-batch-size {plan.effective_batch_size}, "
            f"which is above --max-effective-batch-size {plan.max_effective_batch_size}",
            remedy="raise --max-effective-batch-size",
        )


def target_by(plan: settings.PlanSettings) -> TargetBy | None:
    """Return which of the three the settings choose; None where K is set."""
    if plan.accumulation_steps is not None:
        return None
    if plan.tokens_per_update is not None:
        return "tokens"
    return "noise scale" if plan.follow_noise_scale else "examples"


def examples_for(tokens: int, weight_per_example: float) -> int:
    """Return how many examples hold at least so many tokens."""
    return max(math.ceil(tokens / weight_per_example), 1)


def following(
    current: int, noise_scale: float | None, *, weight_per_example: float, most: int
) -> int:
    """Return the next target on the way from ``current`` to the noise scale [units of weight].

    At most twice and at least half of the current one, 1 at least and ``most`` at most; where the
    noise scale is not known the target stays.
    """
    if noise_scale is None:
        return min(current, most)
    wanted = noise_scale / weight_per_example
    near = min(max(wanted, current / LARGEST_CHANGE), current * LARGEST_CHANGE)
    return min(max(round(near), 1), most)


def evened(quota: int, micro_batch_size: int) -> int:
    """Return the micro-batch size that cuts a quota evenly, and in two at least.

    The number of micro-batches stays, or becomes two. The first and all of them are then batches of
    sizes far enough apart: from 16 and 17 examples S would be known with 11 to 17 times the
    variance that it has from 8 and 16.
    """
    num_micro_batches = max(math.ceil(quota / micro_batch_size), 2)
    return max(math.ceil(quota / num_micro_batches), 1)


class Target:
    """The target of the round at hand, and what it follows from."""

    def __init__(self, plan: settings.PlanSettings, *, max_weight_per_example: int) -> None:
        """Start before the first round.

        Raises:
            SettingsError: see ``check``.
        """
        check(plan)
        self._plan = plan
        self._max_weight = max_weight_per_example
        self.by = target_by(plan)
        self.noise_scale = NoiseScale()
        self._seen = BatchTotals()
        self._followed = plan.effective_batch_size
        self._num_invited = 1

    @property
    def weight_per_example(self) -> float:
        """The mean of the committed rounds; before the first the most that the task allows."""
        seen = self._seen
        return seen.summed_weight / seen.num_examples if seen.summed_weight else self._max_weight

    @property
    def num_examples(self) -> int:
        """What the round at hand is to gather."""
        if self._plan.tokens_per_update is not None:
            return examples_for(self._plan.tokens_per_update, self.weight_per_example)
        if self.by == "noise scale":
            return max(self._followed, LEAST_PER_CLIENT * self._num_invited)
        return self._plan.effective_batch_size

    def open(self, *, num_invited: int) -> int:
        """Return the target of a round in which so many are invited, in examples."""
        self._num_invited = num_invited
        return self.num_examples

    def micro_batch_size(self, quota: int, planned: int) -> int:
        """Return the micro-batch size for a quota: as planned, or so that it tells the noise."""
        return evened(quota, planned) if self.by == "noise scale" else planned

    def ratio(self, round_gathered: BatchTotals) -> float:
        """Return what a round gathered over what is set: of tokens where they are set."""
        if self._plan.tokens_per_update is not None:
            return round_gathered.summed_weight / self._plan.tokens_per_update
        return round_gathered.num_examples / self._plan.effective_batch_size

    def commit(self, round_gathered: BatchTotals, noise: RoundNoise | None) -> None:
        """Take in a round that counts."""
        current = self.num_examples
        self._seen = self._seen.after(round_gathered)
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
        """Return what a checkpoint keeps."""
        return {
            "followed": self._followed,
            "num_examples": self._seen.num_examples,
            "summed_weight": self._seen.summed_weight,
            "sent_weight": self._seen.sent_weight,
            "variance": self.noise_scale.variance,
            "squared_gradient": self.noise_scale.squared_gradient,
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Take up what ``state`` gave; nothing leaves the target at its start.

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
            raise CheckpointCorrupt(f"the state of the target lacks {error}") from error


def described(plan: settings.PlanSettings, *, max_weight_per_example: int) -> str:
    """Say in a line what a round gathers, with its arithmetic where it can be said.

    Raises:
        SettingsError: see ``check``.
    """
    check(plan)
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
