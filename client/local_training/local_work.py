"""A client's window as a client algorithm sees it: the local steps, or an algorithm of the user's.

With local steps the client takes H steps of an optimizer of torch, each on the mean of a part of
its window (McMahan et al. 2017, algorithm 1), and sends weight x (parameters before - after), which
the server treats as a gradient. A ``ClientAlgorithm`` of the user's may make another vector of its
window.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from headwater.client.local_training.step_spool import StepContent
from headwater.client.local_training.step_sums import step_sums
from headwater.client.training.round import Work, sum_examples
from headwater.client.training.spool import SpooledWindow
from headwater.client.training.stop_rules import StopRules
from headwater.client.training.window_sum import WindowSum
from headwater.common.errors import AlgorithmBroken, NonFiniteUpdate
from headwater.common.local_training.terms import PLAIN, LocalPlan
from headwater.common.model.vectors import all_finite, saturate

log = logging.getLogger(__name__)


class ClientAlgorithm(Protocol):
    """How a client makes its vector from its window: FedProx, clipping, or your own.

    One object serves all clients of a process and must keep nothing from one call to the next.
    """

    def train(self, work: LocalWork, /) -> Tensor:
        """Return a float32 vector [P]: ``work.weight`` times what the server takes as a gradient.

        The server divides the sum of all clients' vectors by the sum of their weights, once.
        """
        ...


class LocalWork:
    """One client's window in one round, as a client algorithm sees it.

    Deadlines, memory, unusable examples and the spool are handled in ``sum`` and ``steps``, of
    which an algorithm calls one, once.
    """

    def __init__(self, work: Work) -> None:
        local = work.plan.of(LocalPlan) or PLAIN
        self.learning_rate = local.learning_rate
        """The local learning rate (``--local-learning-rate``)."""
        self.num_steps = local.steps
        """The planned local steps (``--local-steps``)."""
        self.num_taken = 0
        """The local steps whose gradients were yielded so far."""
        self.is_taken = False
        """Whether the window was summed, or is being summed."""
        self._work = work
        self._plan, self._context = work.plan, work.context
        self._start_P: Tensor | None = None

    @property
    def total(self) -> WindowSum:
        """Counts, losses and metrics of what was summed so far."""
        return self._work.total

    @property
    def weight(self) -> int:
        """The weight that was summed over so far: examples, or tokens."""
        return self._work.total.weight

    @property
    def parameters_P(self) -> Tensor:  # noqa: N802 - a tensor's dimensions are in capitals
        """The model's parameters; a change in place changes the model, until the round's end."""
        if self._start_P is None:
            self._start_P = self._context.image.values_P.clone()
        return self._context.image.values_P

    @property
    def start_P(self) -> Tensor:  # noqa: N802 - as above
        """A copy of the parameters as the server sent them."""
        assert self.parameters_P is not None  # copies them
        assert self._start_P is not None
        return self._start_P

    def sum(self) -> Tensor:
        """Sum the gradients of all examples; return the sum [P], in the accumulator's memory."""
        self._take()
        sum_examples(self._work)
        return self._context.accumulator.values_P

    def steps(self, content: StepContent | None = None) -> Iterator[Tensor]:
        """Yield each local step's mean gradient [P] at the parameters as they are then.

        There are ``num_steps``, or fewer if the device must stop. The next step's gradient takes
        the same memory. ``content`` is what the spool keeps between two steps; without one, steps
        are not spooled.
        """
        work, context = self._work, self._context
        if self.num_steps == 1:
            sum_P = self.sum()
            if self.weight:
                self.num_taken = 1
                yield self._directed(sum_P.div_(self.weight))
            return
        self._take()
        spooled = self._open_spool(content)
        first = 0 if content is None else content.next_step
        rules = StopRules(self._plan, context, work.start_seconds)
        for step in step_sums(
            self._plan, work.window, context, rules, first=first, before=work.total
        ):
            work.total = step.total
            work.note_summed(step.weight)
            if step.weight:
                self.num_taken += 1
                yield self._directed(context.accumulator.values_P.div_(step.weight))
            if step.is_last:
                break
            if spooled is not None and content is not None and content.is_writable:
                content.num_taken, content.next_step = self.num_taken, step.number + 1
                content.unused = work.unused or ()
                rest = work.window.positions[step.end :]
                spooled.save(replace(work.total, remaining=deque([rest] if rest else [])))

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """Let features change a new optimizer, before its first step."""
        for feature in self._work.features:
            feature.stepping(self._work, optimizer)

    def _directed(self, mean_P: Tensor) -> Tensor:
        work, accumulator = self._work, self._context.accumulator
        for feature in work.features:
            feature.direction(work, mean_P)
        accumulator.mark_directed()
        work.unused = tuple(sorted({*(work.unused or ())} & {*accumulator.unused()}))
        return mean_P

    def _open_spool(self, content: StepContent | None) -> SpooledWindow | None:
        """Return the spool of the steps, and take over what it holds of them; None without one."""
        work = self._work
        if work.spool is None:
            return None
        if content is None:
            _warn_not_spooled()
            return None
        spooled = work.spool.open(work.plan, work.window, work.context, work.start_seconds, content)
        spooled.note_model()
        resumed = spooled.load()
        if resumed is not None:
            work.total = replace(resumed, remaining=deque())
            self.num_taken, work.start_seconds = content.num_taken, spooled.start_seconds
            work.unused = content.unused if content.next_step else None
        return spooled

    def restore(self) -> None:
        """Set the parameters back to those that the server sent."""
        if self._start_P is not None:
            self._context.image.values_P.copy_(self._start_P)

    def keep(self, values_P: Tensor, name: str) -> None:
        """Put an algorithm's vector into the accumulator.

        Raises:
            AlgorithmBroken: it is no float32 vector [P], or no example was summed for it.
            NonFiniteUpdate: it is not finite, and the plan does not hide the data.
        """
        own_P, round_text = self._context.accumulator.values_P, f"round {self._plan.round}"
        if not self.is_taken:
            raise AlgorithmBroken(
                f"{name} called neither work.sum() nor work.steps(), and used no example"
            )
        is_tensor = isinstance(values_P, Tensor)
        found = f"{values_P.dtype} {tuple(values_P.shape)}" if is_tensor else str(type(values_P))
        expected = f"{own_P.dtype} {tuple(own_P.shape)}"
        if found != expected:
            raise AlgorithmBroken(
                f"{name} must return {expected}, found {found}",
                remedy="return one vector of the length of work.parameters_P",
            )
        if values_P is not own_P:
            own_P.copy_(values_P.detach())
        if self._plan.hides_data:  # a member's part must not hang on how far its own steps led
            saturate(own_P)
        elif not all_finite(own_P):
            raise NonFiniteUpdate(
                f"{self._context.name}, {round_text}: {name} diverged",
                remedy="lower --local-learning-rate or --local-steps",
            )

    def _take(self) -> None:
        if self.is_taken:
            raise AlgorithmBroken(
                "a client algorithm called work.sum() or work.steps() twice in one round",
                remedy="call one of them, once: each example is used once in a round",
            )
        self.is_taken = True


@functools.cache
def _warn_not_spooled() -> None:
    log.warning(
        "the steps of a client algorithm are not spooled: a power cut loses the round's work"
    )
