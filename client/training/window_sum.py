"""The totals of one window: what was summed, what was left out and why, and what remains to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from headwater.client.training.gradient_pass import MicroBatchResult
from headwater.common.data.example_faults import ExampleFault
from headwater.common.data.example_lengths import Positions
from headwater.common.messages import Step, StopReason
from headwater.common.task import Metrics


@dataclass(kw_only=True, slots=True)
class WindowSum:
    """Totals of one window; the gradients are in the accumulator's vector."""

    loss_sum: float = 0.0
    weight: int = 0
    num_examples: int = 0
    metric_sums: Metrics = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    done: list[Positions] = field(default_factory=list)
    remaining: deque[Positions] = field(default_factory=deque)
    refused: list[int] = field(default_factory=list)
    faults: dict[int, ExampleFault] = field(default_factory=dict)
    """Why examples were refused; not of those that were refused before a restart."""
    num_retries: int = 0
    """How often a loss that was not finite was finite in the search for the bad examples."""
    num_reductions: int = 0
    """How often memory made the micro-batches smaller."""
    micro_batch_size: int = 1
    reason: StopReason = "quota"
    needs_check: bool = False
    """Whether gradients were added since the vector was last known to be finite."""
    is_careful: bool = False
    """Whether the vector is checked after each micro-batch from now on."""
    are_apart: bool = False
    """Whether each micro-batch is collected in a vector of its own from now on, as one failed."""

    def add(self, positions: Positions, result: MicroBatchResult) -> None:
        """Add the totals of a micro-batch whose gradients are in the vector."""
        self.loss_sum += result.loss_sum
        self.weight += result.step.weight
        self.num_examples += len(positions) - len(result.faults)
        self.refused += result.faults
        self.faults |= result.faults
        for name, value in result.metric_sums.items():
            self.metric_sums[name] = self.metric_sums.get(name, 0.0) + value
        self.done.append(positions)
        if self.are_apart and len(self.steps) > 1:  # of single examples a report has no room
            self.steps[-1] = _joined(self.steps[-1], result.step)
        else:
            self.steps.append(result.step)
        self.needs_check = result.needs_check

    def limit_next(self, max_examples: int) -> None:
        """Split the next micro-batch if it has more than ``max_examples``."""
        first = self.remaining[0]
        if len(first) > max_examples:
            self.remaining.popleft()
            self.remaining.extendleft((first[max_examples:], first[:max_examples]))

    def leave_out(self, positions: Positions, fault: ExampleFault) -> None:
        """Leave out examples that all have one fault."""
        self.refused += positions
        self.faults |= dict.fromkeys(positions, fault)

    def restarted(self, remaining: Iterable[Positions]) -> WindowSum:
        """Return totals of nothing, with these micro-batches to do; what is known stays known."""
        return WindowSum(
            remaining=deque(remaining),
            refused=self.refused,
            faults=self.faults,
            num_retries=self.num_retries,
            num_reductions=self.num_reductions,
            micro_batch_size=self.micro_batch_size,
            is_careful=self.is_careful,
            are_apart=self.are_apart,
        )


def _joined(first: Step, second: Step) -> Step:
    """Return two steps, of which the second came next, as one."""
    weight = first.weight + second.weight
    losses = first.loss * first.weight + second.loss * second.weight
    return replace(
        second,
        num_examples=first.num_examples + second.num_examples,
        weight=weight,
        loss=losses / weight if weight else 0.0,
        seconds=first.seconds + second.seconds,
        peak_bytes=max(first.peak_bytes, second.peak_bytes),
        size=None if second.size is None else (first.size or 0.0) + second.size,
    )


def flat(groups: Iterable[Positions]) -> Sequence[int]:
    """Return the examples of several micro-batches, in order."""
    return [p for group in groups for p in group]
