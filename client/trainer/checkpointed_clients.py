"""The clients of a process that recompute activations, on one shared model, and how many of them.

An example whose plain pass may not fit is first passed with all activations recomputed, and
measured (``headwater.client.memory.footprint``). Then only as much is recomputed as the memory
limit asks for, the cheapest first (``headwater.client.memory.pass_memory``).
"""

from __future__ import annotations

import functools
import logging
import math

from headwater.client.memory.activation_checkpointing import (
    Choice,
    Recomputed,
    choice_of,
    is_on_in,
    switch_off,
    switch_on,
)
from headwater.client.memory.footprint import Footprint, measured_pass
from headwater.client.memory.pass_memory import PassMemory
from headwater.client.memory.peak_model import (
    WORKING_FACTOR,
    PeakMeter,
    guarded_bytes,
    resident_bytes,
)
from headwater.client.trainer.task_trial import (
    PassedExample,
    predicted_footprint,
    try_examples,
)
from headwater.client.training.context import TrainingContext
from headwater.common.errors import OutOfMemory
from headwater.common.model.parameters import ModelImage
from headwater.common.system.heap import (
    keep_mmap_threshold,
    raise_mmap_threshold,
    release_freed_memory,
)
from headwater.common.wording import bytes_text

log = logging.getLogger(__name__)

# A model that takes this share of the limit at rest may leave too little for a plain pass.
LARGE_SHARE = 0.5

# Passes may take their tensors from glibc's heap, which is faster but leaves gaps. Memory that goes
# back during a pass would not help, as the bound on allocations counts the gaps. Otherwise the
# kernel clears each tensor's pages first: 583,000 to 793,000 of them in a pass of 24 decoder blocks
# of width 1,024. Blocks are run again instead while that takes less than this share of a pass.
PAGES_SHARE = 0.15


class CheckpointedClients:
    """The clients that recompute activations, by name; a client never keeps more of them again."""

    def __init__(self, image: ModelImage) -> None:
        self.footprint: Footprint | None = None
        """The bytes of one example; None before ``measure``, or if there is nothing to checkpoint.
        """
        self.pass_memory: PassMemory | None = None
        """The measured pass of one example; None if memory was not short."""
        self.passed: PassedExample | None = None
        """The example of that pass; None without one, or if its gradient was not finite."""
        self._image = image
        self._choices: dict[str, Choice | None] = {}
        self._is_measured = False

    def __contains__(self, name: str) -> bool:
        return name in self._choices

    def add(self, name: str) -> None:
        """Note that a client recomputes the activations of all blocks."""
        self._choices[name] = None

    def set_up(self, name: str) -> None:
        """Switch checkpointing on or off in the model, as this client trains."""
        if name in self._choices:
            switch_on(self._image.model, self._choices[name])
        elif self._choices:
            switch_off(self._image.model)

    def remember(self, name: str) -> None:
        """Note what is recomputed now for the client for which the model was used last."""
        if is_on_in(self._image.modules):
            self._choices[name] = choice_of(self._image.model)

    def measure(self, context: TrainingContext) -> None:
        """Measure, once, how many bytes an example takes with activation checkpointing.

        This comes before any measurement without checkpointing, which takes more memory, and long
        before memory is short.
        """
        if self._is_measured:
            return
        self._image.model.train()
        self.footprint = found = predicted_footprint(context)
        self._is_measured = True
        if found is None:
            log.info("the model has no blocks for activation checkpointing, or no example works")
        else:
            log.info(
                "an example keeps %s, and takes %s with activation checkpointing",
                bytes_text(found.plain),
                bytes_text(found.checkpointed),
            )

    @property
    def bytes_per_example(self) -> float | None:
        """The bytes of an example with checkpointing; None as ``footprint``."""
        if self.pass_memory is not None:
            return float(self.pass_memory.peak_bytes() - self.pass_memory.rest_bytes)
        return None if self.footprint is None else self.footprint.checkpointed

    def fit(self, context: TrainingContext) -> None:
        """Recompute as few activations as an example needs to fit; none if it fits in any case.

        From then on the memory predicts by the measured peak.

        Raises:
            OutOfMemory: an example is predicted not to fit even if all activations are recomputed.
                Nothing was allocated.
        """
        self.passed = None  # of an earlier check, whose data may have been others
        _check_rest(context)
        limit = context.memory.limit_bytes()
        beside = self._image.frozen_file_bytes
        is_large = limit is not None and resident_bytes() + beside > LARGE_SHARE * limit
        if is_large:
            keep_mmap_threshold()  # before the first pass leaves holes in the heap
        self.measure(context)
        release_freed_memory()
        found, rest = self.footprint, resident_bytes()
        # A parameter's gradient is there by itself before it is added to the vector.
        gradient = max(4 * parameter.numel() for parameter in self._image.trainable())
        if (
            found is None
            or limit is None
            or rest + gradient + WORKING_FACTOR * found.plain + beside <= guarded_bytes(limit, rest)
        ):
            if is_large:
                raise_mmap_threshold()
            return
        if rest + found.checkpointed > limit:
            raise OutOfMemory(_too_small(context, rest + found.checkpointed, limit, rest))
        keep_mmap_threshold()
        one_pass = functools.partial(
            measured_pass, rest_bytes=rest, meter=PeakMeter(), cheap_bytes=found.cheap
        )
        self.pass_memory, passed = try_examples(context, one_pass)
        measured = self.pass_memory
        if measured is not None and math.isfinite(context.accumulator.gradient_norm()):
            self.passed = passed
        context.accumulator.zero()
        if measured is None:
            return
        room = guarded_bytes(limit, rest)
        # Passes that push the frozen part out read it from its file again; rather recompute more.
        choice = _choice_in_heap(measured, room - beside)
        if choice is not None:
            raise_mmap_threshold()
            peak = measured.in_heap().peak_bytes(choice)
        else:
            choice = measured.cheapest(room - beside)
            peak = measured.peak_bytes(choice)
        switch_on(self._image.model, choice)
        context.memory.expect(rest_bytes=rest, peak_bytes=peak)
        if peak > room:
            raise OutOfMemory(_too_small(context, peak, limit, rest))
        extents = [*choice.values()]
        if any(extents):
            log.warning(
                "%s: one example fits only with activation checkpointing: of %d blocks %d are "
                "computed again, and what cheap operations gave in %d; its predicted peak is %s",
                context.name,
                len(extents),
                extents.count(Recomputed.ALL),
                extents.count(Recomputed.CHEAP),
                _of(peak, limit),
            )


def _choice_in_heap(measured: PassMemory, room_bytes: float) -> Choice | None:
    """Return what to recompute if tensors come from the heap; None if that is slow or cannot fit.

    The heap's gaps leave less room, so more blocks may have to run again.
    """
    in_heap = measured.in_heap()
    choice = in_heap.cheapest(room_bytes)
    slowdown = measured.slowdown(choice) - measured.slowdown(measured.cheapest(room_bytes))
    fits = in_heap.peak_bytes(choice) <= room_bytes
    return choice if fits and slowdown <= PAGES_SHARE else None


def _check_rest(context: TrainingContext) -> None:
    """Check that the limit has room for anything beside what the process holds.

    Raises:
        OutOfMemory: it has not.
    """
    release_freed_memory()
    limit, rest = context.memory.limit_bytes(), resident_bytes()
    if limit is not None and rest > guarded_bytes(limit, rest):
        raise OutOfMemory(
            f"{context.name}: one example alone does not fit: before it the process holds "
            f"{_of(rest, limit)}, with the model and its gradient{_missing(rest, limit, rest)}"
        )


def _too_small(
    context: TrainingContext, peak_bytes: float, limit_bytes: float, rest_bytes: float
) -> str:
    return (
        f"{context.name}: one example alone does not fit: its predicted peak is "
        f"{_of(peak_bytes, limit_bytes)}, even with activation checkpointing"
        f"{_missing(peak_bytes, limit_bytes, rest_bytes)}"
    )


def _missing(peak_bytes: float, limit_bytes: float, rest_bytes: float) -> str:
    """Return how much more the limit must be; it leaves a part free for errors of predictions."""
    room = guarded_bytes(limit_bytes, rest_bytes)
    return (
        f", of which {bytes_text(limit_bytes - room)} are left free for errors of the "
        f"prediction: {bytes_text(peak_bytes - room)} are missing"
    )


def _of(peak_bytes: float, limit_bytes: float) -> str:
    return f"{bytes_text(peak_bytes)} of {bytes_text(limit_bytes)}"
