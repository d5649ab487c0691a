"""Counts what autograd keeps for examples between the two passes, and how that grows with length.

A count is exact where a measured peak has noise, and takes a forward pass. So a few lengths tell
what a text that is far longer will take, before it comes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headwater.client.memory.activation_checkpointing import is_on
from headwater.client.memory.footprint import footprint
from headwater.client.memory.peak_model import WORKING_FACTOR
from headwater.client.memory.recompute import address_of, refuses_hooks, tensors_in
from headwater.client.trainer.probe_fit import SAFE_SHARE
from headwater.client.training.context import TrainingContext
from headwater.common.data.batches import batch_of
from headwater.common.data.example_lengths import LengthCost
from headwater.common.errors import HeadwaterError
from headwater.common.task import loss_sum
from headwater.common.user_code.failures import described, is_allocation_failure

log = logging.getLogger(__name__)

# The longest example that is counted is at most so many times as long as a usual one.
MAX_GROWTH = 4.0


def loss_of(context: TrainingContext, positions: Sequence[int]) -> Tensor:
    """Return the summed loss of a forward pass in the device's precision."""
    batch = batch_of(context.task, context.examples, positions)
    is_half = context.precision == "bfloat16"
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_half):
        return loss_sum(context.task, context.image.model, batch)[0]


def kept_bytes(context: TrainingContext, positions: Sequence[int]) -> int:
    """Return the bytes that autograd keeps in one forward pass, each storage once.

    The model's own parameters do not count, nor do tensors without a storage (``address_of``). A
    task whose loss takes gradients with ``torch.func`` allows no hooks: its graph is walked.

    Raises:
        MemoryError: an allocation failed.
    """
    image = context.image
    blocks = (image.bytes_U8, image.frozen_U8, image.local_L)
    own = {block.untyped_storage().data_ptr() for block in blocks}
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = address_of(tensor)
        if address is not None and address not in own:
            storages[address] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # a node that held its own output would never be freed

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss_of(context, positions)
    except RuntimeError as error:
        if is_allocation_failure(error):
            raise MemoryError(str(error)) from error
        if not refuses_hooks(error):
            raise
        storages.clear()
        for tensor in _saved_behind(loss_of(context, positions)):
            keep(tensor)
    return sum(storages.values())


def _saved_behind(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that the nodes of a loss's graph have saved, as the nodes show them.

    A node that is in no graph of the loss counts with hooks, and not here.
    """
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [inner for inner, _ in node.next_functions]
        yield from tensors_in(getattr(node, "saved_tensors", ()))  # of an autograd.Function
        for name in dir(node):
            if name.startswith("_saved_"):
                yield from tensors_in(getattr(node, name))


def count_by_length(
    context: TrainingContext, *, limit_bytes: int | None, rest_bytes: int
) -> LengthCost | None:
    """Count the shortest, a usual and a longer example of the sample; return the curve of bytes.

    The longer one is at most ``MAX_GROWTH`` times as long as usual, and must fit even if its memory
    grows with the square of its length, as that of some kinds of attention does. None if nothing
    could be counted.
    """
    lengths = context.lengths
    assert lengths is not None
    by_length = {lengths[position]: position for position in reversed(lengths.sample)}
    counted: dict[int, float] = {}
    for length in sorted({min(by_length), lengths.usual}):
        _count(context, by_length[length], length, counted)
    for length in sorted(by_length, reverse=True):
        growth = length / lengths.usual
        peak = rest_bytes + WORKING_FACTOR * counted.get(lengths.usual, 0.0) * growth**2
        fits = limit_bytes is None or peak <= SAFE_SHARE * limit_bytes
        if 1 < growth <= MAX_GROWTH and fits:
            _count(context, by_length[length], length, counted)
            break
    return LengthCost.through(counted) if counted and min(counted.values()) > 0 else None


def _count(context: TrainingContext, position: int, length: int, counted: dict[int, float]) -> None:
    """Count one example; with checkpointing, what its pass takes. One that fails is left out."""
    model = context.image.model
    try:
        one_pass = functools.partial(loss_of, context, (position,))
        if is_on(model) and (found := footprint(model, one_pass)) is not None:
            counted[length] = found.checkpointed
        else:
            counted[length] = float(kept_bytes(context, (position,)))
    except HeadwaterError:
        raise
    except Exception as error:
        log.debug("%s: an example failed: %s", context.name, described(error))
