"""Measures the memory of a forward and backward pass by block.

Two measurements, each of one example, with the activations of all blocks recomputed, so that they
take the least memory that a pass can take. ``footprint`` runs a forward pass alone and predicts the
rest. ``measured_pass`` runs both passes and reads the process's peak whenever the backward pass
comes to a block: between two such moments the activations of the blocks that are still to come
would be there too, if these were kept. So it tells what a pass takes for any choice of blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from headwater.client.memory.activation_checkpointing import choice_of, is_on, switch_off, switch_on
from headwater.client.memory.cheap_outputs import CheapOperations, CheapPass
from headwater.client.memory.pass_memory import PassMemory, Stretch
from headwater.client.memory.peak_model import WORKING_FACTOR
from headwater.client.memory.recompute import address_of, observed_by


class Footprint(NamedTuple):
    """The bytes of a forward and backward pass that autograd needs.

    With checkpointing: memory kept between the passes counts once, the largest block
    ``WORKING_FACTOR`` times. Plain: what autograd keeps, without temporaries. Kept: what it keeps
    between the passes with checkpointing, the least that a pass can take. Outside: the part of it
    that belongs to no block, such as the embedding's, the last layer's and the loss's.
    """

    checkpointed: float
    plain: float
    kept: float
    outside: float = 0.0
    cheap: Mapping[int, int] = {}
    """Of each block, the bytes of ``plain`` that cheap operations computed."""


def footprint(model: nn.Module, forward: Callable[[], object]) -> Footprint | None:
    """Predict the bytes that a forward and backward pass takes.

    ``forward`` runs once with checkpointing on, which takes less memory than a plain forward pass;
    then checkpointing is as before. None if the model has no blocks.
    """
    was_on, before = is_on(model), choice_of(model)
    if not switch_on(model):
        return None
    meter = _KeptBytes(model)
    try:
        with (
            observed_by(meter),
            saved_tensors_hooks(meter.add, lambda tensor: tensor),
        ):
            forward()
    finally:
        if was_on:
            switch_on(model, before)
        else:
            switch_off(model)
    kept, inner = float(sum(meter.kept.values())), meter.inner_bytes
    return Footprint(
        checkpointed=kept + WORKING_FACTOR * meter.largest_block,
        plain=kept + sum(inner.values()),
        kept=kept,
        cheap=dict(meter.cheap_bytes),
        outside=float(sum(meter.outside.values())),
    )


class Meter(Protocol):
    """Measures the process's peak resident memory since ``reset``."""

    def reset(self) -> None:
        """Set the peak to what is resident now."""

    def peak_bytes(self) -> int:
        """Return the peak since the last reset."""


def measured_pass(
    model: nn.Module,
    passed: Callable[[], object],
    *,
    rest_bytes: int,
    meter: Meter,
    cheap_bytes: Mapping[int, int] | None = None,
) -> PassMemory | None:
    """Measure a forward and backward pass; ``passed`` runs both, of one example.

    ``cheap_bytes`` are those of the footprint.
    Every block is recomputed, and stays so. None if the model has no block, or none of them takes
    part in the backward pass.
    """
    if not switch_on(model):
        return None
    blocks = _Stretches(model, meter)
    meter.reset()
    with observed_by(blocks):
        passed()
    blocks.end()
    if not blocks.order:
        return None
    return PassMemory(
        rest_bytes=rest_bytes,
        inner_bytes=dict(blocks.inner_bytes),
        order=tuple(blocks.order),
        stretches=tuple(blocks.stretches),
        cheap_bytes=cheap_bytes or {},
        seconds=dict(blocks.seconds),
    )


@dataclass
class _KeptBytes:
    """The bytes that a forward pass keeps: each storage once, the model's own not at all."""

    model: nn.Module
    kept: dict[int, int] = field(default_factory=dict)
    outside: dict[int, int] = field(default_factory=dict)
    inner_bytes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    cheap_bytes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    largest_block: int = 0
    _cheap: CheapPass = field(default_factory=CheapPass)

    def __post_init__(self) -> None:
        self._own = {address_of(tensor) for tensor in self.model.parameters()}
        self._own |= {address_of(tensor) for tensor in self.model.buffers()}

    def watch(self) -> AbstractContextManager[object]:
        """Follow the cheap operations of a block."""
        self._cheap = CheapPass()
        return CheapOperations(self._cheap)

    def packed(self, tensor: Tensor) -> None:
        """Note what autograd saves."""
        self._cheap.pack(tensor)

    def left(
        self, block: int, inputs: list[Tensor], saved: list[Tensor], *, is_dropped: bool
    ) -> None:
        """Add a block: its inputs, which are kept, and its inner activations."""
        self.kept |= self._bytes_of(inputs if is_dropped else [*inputs, *saved])
        inner = sum(n for at, n in self._bytes_of(saved).items() if at not in self.kept)
        self.inner_bytes[block] += inner
        self.cheap_bytes[block] += min(self._cheap.end(), inner)
        self.largest_block = max(self.largest_block, inner)

    def entered_again(self, block: int) -> None:
        """Do nothing: there is no backward pass."""

    def ran_again(self, block: int, seconds: float) -> None:
        """Do nothing: there is no backward pass."""

    def add(self, tensor: Tensor) -> Tensor:
        """Add a tensor that is kept outside of blocks."""
        own = self._bytes_of([tensor])
        self.kept |= own
        self.outside |= own
        return tensor.detach()

    def _bytes_of(self, tensors: list[Tensor]) -> dict[int, int]:
        found = ((address_of(tensor), tensor) for tensor in tensors)
        return {
            address: tensor.untyped_storage().nbytes()
            for address, tensor in found
            if address is not None and address not in self._own
        }


class _Stretches(_KeptBytes):
    """The same, and the peaks of a pass from block to block."""

    def __init__(self, model: nn.Module, meter: Meter) -> None:
        super().__init__(model)
        self.order: list[int] = []
        self.stretches: list[Stretch] = []
        self.seconds: defaultdict[int, float] = defaultdict(float)
        self._meter = meter

    def watch(self) -> AbstractContextManager[object]:
        """Do nothing: what it would hold until a block's end would count."""
        return nullcontext()

    def packed(self, tensor: Tensor) -> None:
        """Do nothing, as there is nothing to note."""

    def ran_again(self, block: int, seconds: float) -> None:
        """Add the seconds of a block."""
        self.seconds[block] += seconds

    def entered_again(self, block: int) -> None:
        """Note the peak up to here; the block's activations are there from now on."""
        self.end()
        if block not in self.order:
            self.order.append(block)

    def end(self) -> None:
        """Note the peak of the last stretch."""
        self.stretches.append(
            Stretch(peak_bytes=self._meter.peak_bytes(), num_done=len(self.order))
        )
        self._meter.reset()
