"""Checks on a device's first examples that passes over many devices give the task's own sums."""

from __future__ import annotations

import logging
import math

import numpy as np
import torch
from torch import Tensor

from headwater.client.training.accumulator import Accumulator
from headwater.client.training.context import Identity
from headwater.client.training.trainer import Trainer
from headwater.common.data.batches import UnsupportedBatch, batch_of
from headwater.common.model.vectors import squared_norm
from headwater.common.task import loss_sum
from headwater.simulation.compute.example_rows import ExampleRows, Rows
from headwater.simulation.compute.gradient_norms import LinearLayers
from headwater.simulation.compute.passes import Block, sum_with_layer_norms
from headwater.simulation.compute.per_example import PerExampleModel

log = logging.getLogger(__name__)

NUM_EXAMPLES = 3
TOLERANCE = 1e-4  # relative


def check_sums(
    trainer: Trainer, identity: Identity, model: PerExampleModel, examples: ExampleRows
) -> tuple[Tensor, Rows]:
    """Compare a pass over a device's first examples with the task's own sum of them.

    Returns that sum's loss, and the examples' rows.

    Raises:
        UnsupportedBatch: the pass fails, or they differ.
    """
    own = trainer.examples(identity)
    positions = range(min(NUM_EXAMPLES, len(own)))
    trainer.image.model.train()
    state = torch.get_rng_state()
    batch = batch_of(trainer.task, own, positions)
    loss, weight, metrics = loss_sum(trainer.task, trainer.image.model, batch)
    if not torch.equal(state, torch.get_rng_state()):
        raise UnsupportedBatch("the model draws random numbers, and each device has its own")
    rows = np.array(positions) + examples.add(0, own)
    trainer.accumulator.zero()
    sums = model.add(rows, None, "float32")
    trainer.accumulator.zero()
    found = {"loss": sums.loss.sum(), "weight": sums.weight.sum()}
    found |= {f"metric {name}": values.sum() for name, values in sums.metrics.items()}
    expected = {"loss": loss.item(), "weight": weight}
    expected |= {f"metric {name}": value for name, value in metrics.items()}
    for name, value in expected.items():
        if not math.isclose(found.get(name, math.nan), value, rel_tol=TOLERANCE, abs_tol=1e-6):
            raise UnsupportedBatch(f"the {name} of a batch is not the sum over its examples")
    return loss, rows


def checked_layers(
    loss: Tensor, model: PerExampleModel, rows: Rows, accumulator: Accumulator, *, max_bytes: int
) -> LinearLayers | None:
    """Return the model's linear layers if they give the gradient and norm of ``loss``, over rows.

    None, too, if the examples' copies of other parameters take more than ``max_bytes``.
    """
    layers = model.linear_layers(rows)
    if layers is None or 4 * layers.num_others * len(rows) > max_bytes:
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
        sum_P, _, norms = sum_with_layer_norms(model, accumulator, layers, block)
    except UnsupportedBatch as reason:
        log.info("norms are computed from vectors: %s", reason)
        return None
    finally:
        accumulator.zero()
    error = math.sqrt(squared_norm(sum_P.sub_(expected_P)))
    if error > TOLERANCE * norm or not math.isclose(norms[-1], norm, rel_tol=TOLERANCE):
        log.info("norms are computed from vectors: linear layers gave %g for %g", norms[-1], norm)
        return None
    return layers
