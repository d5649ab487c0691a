"""The memory of a forward and backward pass by block, and the blocks to recompute under a limit.

Two measurements, each of one example, with the activations of all blocks recomputed, so that they
take the least memory that a pass can take. ``footprint`` runs a forward pass alone and predicts the
rest. ``measured_pass`` runs both passes and reads the process's peak whenever the backward pass
comes to a block: between two such moments the activations of the blocks that are still to come
would be there too, if these were kept. So it tells what a pass takes for any choice of blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from headwater.client.memory.activation_checkpointing import is_on, switch_off, switch_on
from headwater.client.memory.peak_model import WORKING_FACTOR
from headwater.client.memory.recompute import observed_by


class Footprint(NamedTuple):
    """The bytes of a forward and backward pass that autograd needs.

    With checkpointing: memory kept between the passes counts once, the largest block
    ``WORKING_FACTOR`` times. Plain: what autograd keeps, without temporaries. Kept: what it keeps
    between the passes with checkpointing, the least that a pass can take.
    """

    checkpointed: float
    plain: float
    kept: float


def footprint(model: nn.Module, forward: Callable[[], object]) -> Footprint | None:
    """Predict the bytes that a forward and backward pass takes.

    ``forward`` runs once with checkpointing on, which takes less memory than a plain forward pass;
    then checkpointing is as before. None if the model has no blocks.
    """
    was_on = is_on(model)
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
        if not was_on:
            switch_off(model)
    kept, inner = float(sum(meter.kept.values())), meter.inner_bytes
    return Footprint(
        checkpointed=kept + WORKING_FACTOR * meter.largest_block,
        plain=kept + sum(inner.values()),
        kept=kept,
    )


class Meter(Protocol):
    """Measures the process's peak resident memory since ``reset``."""

    def reset(self) -> None:
        """Set the peak to what is resident now."""

    def peak_bytes(self) -> int:
        """Return the peak since the last reset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """The part of a pass between two blocks: its peak, and the blocks that came back before it."""

    peak_bytes: int
    num_done: int
    """How many of ``PassMemory.order`` have been run again when it ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassMemory:
    """What a pass of one example takes, for any choice of blocks whose activations are kept."""

    rest_bytes: int
    """Resident before the pass."""
    inner_bytes: dict[int, int]
    """The activations of each block that recomputing it drops."""
    order: tuple[int, ...]
    """The blocks in the order in which the backward pass came to them."""
    stretches: tuple[Stretch, ...]

    def peak_bytes(self, kept: Set[int] = frozenset()) -> int:
        """Return the peak of a pass that keeps the activations of these blocks."""
        return max(
            stretch.peak_bytes
            + sum(
                num_bytes
                for block, num_bytes in self.inner_bytes.items()
                if block in kept and block not in self.order[: stretch.num_done]
            )
            for stretch in self.stretches
        )

    @property
    def blocks(self) -> frozenset[int]:
        """The numbers of all blocks."""
        return frozenset(self.inner_bytes)

    def most_kept(self, limit_bytes: float) -> frozenset[int]:
        """Return the blocks to keep so that the peak stays within the limit; none if none can.

        Every block costs a forward pass of itself to recompute. So the blocks that drop the most
        bytes are recomputed first; of equal ones the model's first, which stay in memory longest.
        """
        kept = set(self.blocks)
        by_gain = sorted(kept, key=lambda block: (-self.inner_bytes[block], block))
        for block in by_gain:
            if self.peak_bytes(kept) <= limit_bytes:
                break
            kept.remove(block)
        return frozenset(kept)


def measured_pass(
    model: nn.Module, passed: Callable[[], object], *, rest_bytes: int, meter: Meter
) -> PassMemory | None:
    """Measure a forward and backward pass; ``passed`` runs both, of one example.

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
    )


@dataclass
class _KeptBytes:
    """The bytes that a forward pass keeps: each storage once, the model's own not at all."""

    model: nn.Module
    kept: dict[int, int] = field(default_factory=dict)
    inner_bytes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    largest_block: int = 0

    def __post_init__(self) -> None:
        self._own = {tensor.untyped_storage().data_ptr() for tensor in self.model.parameters()}
        self._own |= {tensor.untyped_storage().data_ptr() for tensor in self.model.buffers()}

    def left(
        self, block: int, inputs: list[Tensor], saved: list[Tensor], *, is_dropped: bool
    ) -> None:
        """Add a block: its inputs, which are kept, and its inner activations."""
        self.kept |= self._bytes_of(inputs if is_dropped else [*inputs, *saved])
        inner = sum(n for at, n in self._bytes_of(saved).items() if at not in self.kept)
        self.inner_bytes[block] += inner
        self.largest_block = max(self.largest_block, inner)

    def entered_again(self, block: int) -> None:
        """Do nothing: there is no backward pass."""

    def add(self, tensor: Tensor) -> Tensor:
        """Add a tensor that is kept outside of blocks."""
        self.kept |= self._bytes_of([tensor])
        return tensor.detach()

    def _bytes_of(self, tensors: list[Tensor]) -> dict[int, int]:
        storages = [tensor.untyped_storage() for tensor in tensors]
        return {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in self._own}


class _Stretches(_KeptBytes):
    """The same, and the peaks of a pass from block to block."""

    def __init__(self, model: nn.Module, meter: Meter) -> None:
        super().__init__(model)
        self.order: list[int] = []
        self.stretches: list[Stretch] = []
        self._meter = meter

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
