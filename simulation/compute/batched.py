"""Many devices in one pass: their sum alone (fused), or the norms of each one too (vectorised).

What each device takes, and when, is foreseen (``headwater.simulation.compute.modes.dry_run``); then the examples of all
go through the model together. Who cannot be foreseen, or meets a loss or a gradient that is not
finite, is computed by itself, as a real device is: it looks for the example to blame.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from headwater.common.data.batches import UnsupportedBatch
from headwater.common.errors import LateUpdate
from headwater.common.messages import Update
from headwater.common.model.parameters import ModelImage
from headwater.common.model.vectors import all_finite
from headwater.server.fleet import Dropout, UpdateOfMany
from headwater.simulation.compute.compiled import say
from headwater.simulation.compute.dry_run import rehearse
from headwater.simulation.compute.example_rows import Packed, Rows
from headwater.simulation.compute.linear_hooks import Layers
from headwater.simulation.compute.one_by_one import OneByOne
from headwater.simulation.compute.passes import Block, fused, in_turn, told_by_layers, vectorised
from headwater.simulation.compute.per_example import Floats, ManyExamples
from headwater.simulation.compute.report_columns import Together
from headwater.simulation.compute.round_columns import Foreseen, ranges
from headwater.simulation.compute.self_test import telling_layers, tried
from headwater.simulation.fleet.devices import Called, Devices

log = logging.getLogger(__name__)

# What examples that go through the model at once may leave for the backward pass, and how many they
# are at most. Passes of 4,096 took 1.1 times what those of 16,384 took with an MLP 64-128-10, and
# 1.2 times where layers tell the norms.
PASS_BYTES = 64 << 20
MOST_AT_ONCE = 1 << 14
# Of the devices' examples, and of their vectors, that are held at once.
MOST_ROWS = 1 << 16
VECTORS_BYTES = 16 << 20
# Where fewer vectors than these fit, one micro-batch is work enough for a pass, and moving vectors
# about would take longer than computing them.
FEWEST_VECTORS = 16


class Grouped:
    """Computes the called devices together."""

    def __init__(self, devices: Devices, *, own_vectors: bool) -> None:
        """Try it on a device's first examples.

        Raises:
            UnsupportedBatch: the task, its model or its batches cannot be computed so.
        """
        self.own_vectors = own_vectors
        self._devices = devices
        self._one_by_one = OneByOne(devices)
        resident = devices.resident
        self._packed = Packed(resident.task, most_held=devices.most_held)
        self._many = ManyExamples(resident.task, resident.image, self._packed)
        self._at_once = MOST_AT_ONCE
        self._most_vectors = max(VECTORS_BYTES // (4 * resident.image.layout.num_parameters), 1)
        self._is_in_turn = own_vectors and self._most_vectors < FEWEST_VECTORS
        is_compiled = devices.settings.simulation.compile
        self._layers: Layers | None = None
        self._try(is_compiled=is_compiled)
        if is_compiled:
            if own_vectors and not self._is_in_turn:
                say("passes are not compiled: it would slow down those for small vectors")
            else:
                self._many.compile()

    def train(
        self,
        called: Sequence[Called],
        image: ModelImage,
        *,
        run_id: int,
        timeout_seconds: float | None,
    ) -> Iterator[Update | UpdateOfMany | Dropout]:
        """See ``headwater.simulation.fleet.virtual_hardware.devices.Compute``."""
        honest, alone = self._parted(called)
        found = rehearse(self._devices, honest)
        yield from found.dropouts
        alone += found.alone
        foreseen = found.foreseen
        if foreseen is not None and timeout_seconds is not None:
            is_late = foreseen.seconds > timeout_seconds
            for at in np.flatnonzero(is_late).tolist():
                name = foreseen.called[at].name
                late = f"{name}: {foreseen.seconds[at]:.1f} s of {timeout_seconds:.1f}"
                yield Dropout(name=name, error=LateUpdate(late))
            if is_late.any():
                foreseen = foreseen.some(np.flatnonzero(~is_late))
        if foreseen is not None and len(foreseen):
            version = foreseen.called[0].plan.model_version
            self._devices.resident.load_model(run_id, version, image.buffer())
            for block in chain.from_iterable(map(self._blocks, self._by_size(foreseen))):
                done, rest = self._add(block)
                alone += rest
                if done is not None:
                    yield done
        yield from self._one_by_one.train(
            alone, image, run_id=run_id, timeout_seconds=timeout_seconds
        )

    def _parted(self, called: Sequence[Called]) -> tuple[Sequence[Called], list[Called]]:
        """Part those who lie from the others: the vector of each is changed on its own."""
        devices = self._devices
        if not devices.has_liars:
            return called, []
        parted: tuple[list[Called], list[Called]] = ([], [])
        for one in called:
            parted[bool(devices.lies(one.part, round_number=one.plan.round))].append(one)
        return parted

    def _by_size(self, foreseen: Foreseen) -> Iterator[Foreseen]:
        """Part those whose examples are too many for one pass, where a pass takes whole devices."""
        fits = foreseen.num_examples <= self._told_at_once
        if self._layers is None or fits.all():
            yield foreseen
            return
        for at in (np.flatnonzero(fits), np.flatnonzero(~fits)):
            if len(at):
                yield foreseen.some(at)

    def _is_told(self, foreseen: Foreseen) -> bool:
        """Say whether the model's layers tell the norms of these devices."""
        return (
            self._layers is not None
            and foreseen.called[0].plan.precision == "float32"
            and int(foreseen.num_examples.max()) <= self._told_at_once
        )

    @property
    def _told_at_once(self) -> int:
        if self._layers is None:
            return self._at_once
        copied_bytes = 4 * max(self._layers.num_elsewhere, 1)
        return int(min(self._at_once, max(VECTORS_BYTES // copied_bytes, 1)))

    def _blocks(self, foreseen: Foreseen) -> Iterator[Foreseen]:
        """Cut a cohort into blocks whose vectors, or examples, are held at once."""
        is_told = self._is_told(foreseen)
        is_held = self.own_vectors and not self._is_in_turn and not is_told
        most_rows = MOST_ROWS if not self.own_vectors or is_told else self._at_once * 4
        counts = zip(foreseen.num_examples.tolist(), foreseen.num_steps.tolist(), strict=True)
        start = num_steps = num_rows = 0
        for at, (rows, steps) in enumerate(counts):
            is_full = num_rows + rows > most_rows
            is_full |= is_held and num_steps + steps > self._most_vectors
            if at > start and is_full:
                yield foreseen.some(np.arange(start, at))
                start, num_steps, num_rows = at, 0, 0
            num_steps, num_rows = num_steps + steps, num_rows + rows
        yield foreseen.some(np.arange(start, len(foreseen))) if start else foreseen

    def _add(self, block: Foreseen) -> tuple[UpdateOfMany | None, list[Called]]:
        """Add the updates of a block; return their sum, and who is to be computed alone."""
        rest: list[Called] = []
        while len(block):
            try:
                values_P, together = self._sum(block)
            except (
                UnsupportedBatch
            ) as reason:  # what was not tried: the vectors of those who have much
                log.info("%d devices are computed one by one: %s", len(block), reason)
                return None, rest + list(block.called)
            bad = together.is_not_finite
            if not bad.any() and not all_finite(values_P):
                bad[:] = True
            if not bad.any():
                return UpdateOfMany(values_P=values_P, reports=together), rest
            rest += [block.called[at] for at in np.flatnonzero(bad).tolist()]
            block = block.some(np.flatnonzero(~bad))
        return None, rest

    def _sum(self, block: Foreseen) -> tuple[Tensor, Together]:
        """Return the sum of a block's vectors [P], in float64, and what its devices tell."""
        precision = block.called[0].plan.precision
        rows, is_told = self._rows(block), self._is_told(block)
        through = Block(
            rows=rows,
            factors=self._factors(block, rows, precision),
            sizes=block.sizes,
            num_steps=block.num_steps,
            precision=precision,
            at_once=self._told_at_once if is_told else self._at_once,
        )
        many, packed, accumulator = self._many, self._packed, self._devices.resident.accumulator
        if not self.own_vectors:
            values_P, sums = fused(many, packed, accumulator, through)
            return values_P, Together(foreseen=block, sums=sums, is_ordered=False)
        if is_told:
            assert self._layers is not None  # they tell
            values_P, sums, norms = told_by_layers(many, packed, accumulator, self._layers, through)
        elif self._is_in_turn:
            values_P, sums, norms = in_turn(many, packed, accumulator, through)
        else:
            values_P, sums, norms = vectorised(many, packed, through)
        return values_P, Together(foreseen=block, sums=sums, norms=norms)

    def _rows(self, block: Foreseen) -> Rows:
        """Return where the examples of a block lie, in the order in which they are taken.

        Where only their sum is asked for, those of who takes all that it has are in the data's.
        """
        parts = [one.part for one in block.called]
        self._packed.make_room(parts)
        known, devices = self._packed.starts, self._devices
        for one in block.called:
            if one.part not in known:
                self._packed.add(one.part, devices.training_examples(one.part, one.plan))
        starts = np.array([known[part] for part in parts])
        counts = block.num_examples
        rows = ranges(starts, counts)
        walked = np.ones(len(block), dtype=np.bool_) if self.own_vectors else ~block.is_whole
        at = np.flatnonzero(walked)
        rows[np.repeat(walked, counts)] = np.repeat(starts[at], counts[at]) + block.positions(at)
        return rows

    def _factors(self, block: Foreseen, rows: Rows, precision: str) -> Floats | None:
        """Return what each example's gradient is scaled by, where devices weigh as they own."""
        asked = [one.plan.weigh_as for one in block.called]
        if asked[0] is None:
            return None
        counts = block.num_examples
        weights = np.concatenate(
            [
                self._many.weights(
                    self._packed.take(rows[start : start + self._at_once]), precision
                )
                for start in range(0, len(rows), self._at_once)
            ]
        )
        summed = np.add.reduceat(weights, np.cumsum(counts) - counts)
        ratios = np.array(asked, dtype=np.float64) / np.maximum(summed, 1.0)
        return np.repeat(ratios, counts)

    def _try(self, *, is_compiled: bool) -> None:
        """Try on a device's first examples what will be done.

        Raises:
            UnsupportedBatch: it fails, or its sums are others than the task's own.
        """
        devices, many, packed = self._devices, self._many, self._packed
        each = devices.machine(0, round_number=1).memory.line
        if each is not None and each.each:
            self._at_once = int(min(max(PASS_BYTES / each.each, 1), MOST_AT_ONCE))
        loss, rows = tried(devices.resident, devices.identity(0), many, packed)
        if not self.own_vectors:
            return
        is_wide = devices.settings.plan.precision == "float32"
        if is_wide and not (is_compiled and self._is_in_turn):
            self._layers = telling_layers(
                loss, many, packed, rows, devices.resident.accumulator, most_bytes=VECTORS_BYTES
            )
        if self._layers is None and not self._is_in_turn:
            # Not unless it is needed: torch.func.grad brings the compiler, 3 s and 24 MB.
            taken = [tensor.unsqueeze(0) for tensor in packed.take(rows)]
            many.rows(taken, torch.ones(1, len(rows)), "float32")
