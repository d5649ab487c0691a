"""The context of a client's training: task, model, examples, and the device's clock and memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from headwater.client.device.interfaces import Clock, Hardware, Memory, TimeShare
from headwater.client.memory.activation_checkpointing import Choice, choice_of, is_on, switch_on
from headwater.client.memory.pass_memory import PassMemory
from headwater.client.memory.peak_model import guarded_bytes
from headwater.client.training.accumulator import Accumulator
from headwater.client.training.batch_fetch import Batches
from headwater.client.training.progress import TrainingProgress
from headwater.client.training.sampler import split
from headwater.common.data.example_lengths import ExampleLengths, Positions, length_record
from headwater.common.data.partition_spec import PartitionRule
from headwater.common.messages import Plan, Vitals
from headwater.common.model.layout import ModelLayout
from headwater.common.model.parameters import ModelImage
from headwater.common.settings.schema import Settings
from headwater.common.settings.training import ChosenPrecision
from headwater.common.system.heap import keeps_freed_blocks
from headwater.common.task import Examples, Task
from headwater.common.wording import bytes_text

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Which client this is, and which examples are its own."""

    name: str
    data: Path | None
    part: int
    num_parts: int
    rule: PartitionRule | None = None
    """Partitions the data set; None if the task itself splits its data."""
    labels: str | None = None
    """What its owner says of it, as site=lab,kind=pi."""


HardwareOf = Callable[[Identity, Settings, ModelLayout], Hardware]
"""Returns the machine of a client: the real one, or a simulated one."""


NO_BATCHES = Batches(cast(Task, None), ())


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingContext:
    """All that a client needs to carry out a plan."""

    task: Task
    image: ModelImage
    accumulator: Accumulator
    examples: Examples
    name: str
    clock: Clock
    memory: Memory
    should_stop: Callable[[], bool]
    checkpointed_bytes: float | None = None
    """Predicted bytes per example with activation checkpointing; None if it was not measured, or
    the model has no blocks to checkpoint."""
    precision: ChosenPrecision | None = None
    """What its passes are computed in; None: as each plan says."""
    pass_memory: PassMemory | None = None
    """The measured pass of one example; None if memory was not short when the task was checked."""
    time_share: Callable[[], TimeShare] = TimeShare
    vitals: Callable[[], Vitals] = Vitals
    progress: TrainingProgress = field(default_factory=TrainingProgress, repr=False)
    batches: Batches = field(default=NO_BATCHES, repr=False)
    """Batches of ``task`` and ``examples``; replaced at construction if they belong to others."""
    lengths: ExampleLengths | None = field(default=None, repr=False)
    """The examples' lengths; read at construction if they are not given, and None if the
    task's examples cannot differ in length."""

    def __post_init__(self) -> None:
        if not self.batches.belong_to(self.task, self.examples):
            object.__setattr__(self, "batches", Batches(self.task, self.examples))
        if self.lengths is None and (record := length_record(self.task, self.examples)) is not None:
            object.__setattr__(self, "lengths", ExampleLengths(self.examples, record))

    # The size of micro-batches.

    def size(self, positions: Positions) -> float:
        """Return a micro-batch's size: its examples, or as many of the usual length, padded."""
        return len(positions) if self.lengths is None else self.lengths.size(positions)

    def size_of_each(self, positions: Positions) -> float:
        """Return the size of an example in a micro-batch."""
        return self.size(positions) / len(positions)

    def load(self, positions: Positions) -> float:
        """Return the size that its memory follows (``ExampleLengths.load``)."""
        return len(positions) if self.lengths is None else self.lengths.load(positions)

    def cut(self, positions: Positions, plan: Plan) -> list[Positions]:
        """Cut examples of one epoch into micro-batches of the plan's size, and of like lengths."""
        size = plan.micro_batch_size
        if self.lengths is None:
            return split(positions, size)
        return self.lengths.cut(positions, size, max_tokens=plan.max_tokens)

    def cut_smaller(self, groups: Iterable[Positions], load: float) -> list[Positions]:
        """Cut micro-batches so that none is predicted to take more than ``load``, if it can be."""
        if self.lengths is None:
            return split([p for group in groups for p in group], max(int(load), 1))
        return [
            part
            for group in groups
            for part in split(group, max(int(load * len(group) / self.load(group)), 1))
        ]

    def fitting_with_checkpointing(self, load: float, *, least: float = 1.0) -> float | None:
        """Recompute more activations if that saves memory; return the load that fits.

        0 if it saves none, or if an example of the load ``least``, longer than usual, does not fit
        even so; below 1 if one of the usual length does not. The bytes per example were measured
        before memory was short (``headwater.client.trainer.checkpointed_clients``).
        """
        line, predicted, was_on = self.memory.line, self.checkpointed_bytes, is_on(self.image.model)
        limit, measured = self.memory.limit_bytes(), self.pass_memory
        choice: Choice | None = None
        if measured is not None and limit is not None and line is not None:
            # What the process has gained since the measurement.
            now = measured.in_heap() if keeps_freed_blocks() else measured
            gained = max(line.at(1) - now.peak_bytes(choice_of(self.image.model)), 0.0)
            rest = measured.rest_bytes
            room = guarded_bytes(limit, rest) - rest - gained
            choice = measured.cheapest(rest + room / max(least, 1.0))
            predicted = measured.peak_bytes(choice) + gained - line.base
        if predicted is None or line is None or predicted >= line.each:
            return 0
        peak = line.base + least * predicted
        if least > 1 and limit is not None and peak > guarded_bytes(limit, line.base):
            return 0
        switch_on(self.image.model, choice)
        if measured is None:
            self.memory.use_checkpointing(predicted)
        else:
            self.memory.use_checkpointing(None)
            self.memory.expect(rest_bytes=int(line.base), peak_bytes=int(line.base + predicted))
        fitting = self.memory.fitting(load)
        if not was_on and fitting is not None:
            log.warning(
                "%s: %s in memory; %d fit with activation checkpointing, now on",
                self.name,
                "a long example does not fit" if least > 1 else "not one example fits",
                fitting / least,
            )
        return fitting

    def why_one_does_not_fit(self, load: float = 1.0) -> str:
        """Describe the predicted peak of one example, and the limit."""
        line, limit = self.memory.line, self.memory.limit_bytes()
        assert line is not None  # without both there is no prediction
        assert limit is not None
        margin = limit - guarded_bytes(limit, line.base)
        text = (
            "one example alone does not fit: its predicted peak is "
            f"{bytes_text(line.at(load))}, the limit {bytes_text(limit)}, of which "
            f"{bytes_text(margin)} are left free for errors of the prediction"
        )
        if load > 1.0:
            return text
        if is_on(self.image.model):
            return f"{text}, with activation checkpointing"
        if self.checkpointed_bytes is None:
            return f"{text}, and the model has no blocks for activation checkpointing"
        return f"{text}, and activation checkpointing would not save memory"
