"""The trial on a device's first examples: whether passes of many come to what the task says."""

from __future__ import annotations

import logging
import math

import numpy as np
import torch
from torch import Tensor

from headwater.client.training.accumulator import Accumulator
from headwater.client.training.trainer import Identity, Trainer
from headwater.common.data.batches import UnsupportedBatch, batch_of
from headwater.common.model.vectors import squared_norm
from headwater.common.task import loss_sum
from headwater.simulation.compute.example_rows import Packed, Rows
from headwater.simulation.compute.linear_hooks import Layers
from headwater.simulation.compute.passes import Block, told_by_layers
from headwater.simulation.compute.per_example import ManyExamples

log = logging.getLogger(__name__)

# So many examples, and how far their sums may lie apart.
TRIED = 3
TOLERANCE = 1e-4


def tried(
    resident: Trainer, identity: Identity, many: ManyExamples, packed: Packed
) -> tuple[Tensor, Rows]:
    """Compare a pass over a device's first examples with the task's own sum of them.

    Returns that sum's loss, and the examples' rows.

    Raises:
        UnsupportedBatch: the pass fails, or they differ.
    """
    examples = resident.examples(identity)
    positions = range(min(TRIED, len(examples)))
    resident.image.model.train()
    state = torch.get_rng_state()
    batch = batch_of(resident.task, examples, positions)
    loss, weight, metrics = loss_sum(resident.task, resident.image.model, batch)
    if not torch.equal(state, torch.get_rng_state()):
        raise UnsupportedBatch("the model draws random numbers, and each device has its own")
    resident.accumulator.zero()
    rows = np.array(positions) + packed.add(0, examples)
    sums = many.add(packed.take(rows), None, "float32")
    resident.accumulator.zero()
    found = {"loss": sums.loss.sum(), "weight": sums.weight.sum()}
    found |= {f"metric {name}": values.sum() for name, values in sums.metrics.items()}
    told = {"loss": loss.item(), "weight": weight}
    told |= {f"metric {name}": value for name, value in metrics.items()}
    for name, value in told.items():
        if not math.isclose(found.get(name, math.nan), value, rel_tol=TOLERANCE, abs_tol=1e-6):
            raise UnsupportedBatch(f"the {name} of {TRIED} examples is another when each is alone")
    return loss, rows


def telling_layers(
    loss: Tensor,
    many: ManyExamples,
    packed: Packed,
    rows: Rows,
    accumulator: Accumulator,
    *,
    most_bytes: int,
) -> Layers | None:
    """Return the model's layers, if they tell of some rows the gradient and norm that ``loss`` has.

    None, too, if these rows' copies of parameters elsewhere take more than ``most_bytes``.
    """
    layers = many.layers(packed.take(rows))
    if layers is None or 4 * layers.num_elsewhere * len(rows) > most_bytes:
        return None
    accumulator.zero()
    loss.backward()  # type: ignore[no-untyped-call]
    expected_P, norm = accumulator.values_P.clone(), accumulator.gradient_norm()
    block = Block(
        rows=rows,
        factors=None,
        sizes=np.ones_like(rows),
        num_steps=np.array([len(rows)]),
        precision="float32",
        at_once=len(rows),
    )
    try:
        found_P, _, norms = told_by_layers(many, packed, accumulator, layers, block)
    except UnsupportedBatch as reason:
        log.info("norms are those of vectors: %s", reason)
        return None
    finally:
        accumulator.zero()
    error = math.sqrt(squared_norm(found_P.sub_(expected_P)))
    if error > TOLERANCE * norm or not math.isclose(norms[-1], norm, rel_tol=TOLERANCE):
        log.info("norms are those of vectors: layers told %g of %g", norms[-1], norm)
        return None
    return layers
