"""The passes over a block of devices: the sum of their gradients, and optionally each one's norms.

If the norms follow from a model's linear layers, no device has a vector of its own. Otherwise the
devices' vectors are made side by side. A self-test on a device's first examples checks that the
passes give the task's own sums.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from headwater.client.trainer.trainer import Trainer
from headwater.client.training.accumulator import Accumulator
from headwater.client.training.context import Identity
from headwater.common.data.batches import UnsupportedBatch, batch_of
from headwater.common.data.evaluation import evaluate_sums
from headwater.common.model.vectors import CHUNK, squared_norm
from headwater.common.task import Examples, loss_sum
from headwater.server.aggregation.round_reports import in_all
from headwater.simulation.vectorised.example_rows import ExampleRows, Rows
from headwater.simulation.vectorised.gradient_norms import SquaredNorms, running_norms
from headwater.simulation.vectorised.linear_layers import LinearLayers
from headwater.simulation.vectorised.per_example import PerExampleModel
from headwater.simulation.vectorised.round_columns import (
    Floats,
    Ints,
    groups_of_similar_size,
    padded,
    runs,
)
from headwater.simulation.vectorised.task_sums import ExampleSums, ScatteredSums

log = logging.getLogger(__name__)

# Of the self-test; the tolerances are relative. The second is of models with 16-bit numbers, whose
# rounding depends on how many examples are multiplied at a time.
NUM_EXAMPLES = 3
TOLERANCE, TOLERANCE_OF_16_BITS = 1e-4, 1e-2


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The examples of D devices that are computed together, as rows in the devices' order.

    ``factors`` scale each row's gradient; None scales nothing. ``sizes`` [S] are the micro-batches,
    and ``num_steps`` [D] the number of them in each device. A pass takes at most ``at_once`` rows,
    unless one device or micro-batch alone has more.
    """

    rows: Rows
    factors: Floats | None
    sizes: Ints
    num_steps: Ints
    precision: str
    at_once: int


def sum_gradients(
    model: PerExampleModel, accumulator: Accumulator, block: Block
) -> tuple[Tensor, ExampleSums, tuple[int, ...]]:
    """Return the gradient [P], in float64, of the sum over all rows, and what each row adds.

    And the places of the tensors that no row's loss used.

    Error: each pass sums in float32 over at most ``at_once`` rows, and passes add in float64. Of
    15,000 digits through an MLP 64-128-10 at once it was 1.4e-7 of the gradient's norm, and 0.7e-7
    in passes of 4,096.
    """
    total_P = torch.zeros(accumulator.values_P.shape, dtype=torch.float64)
    parts, unused = [], []
    for start in range(0, len(block.rows), block.at_once):
        own = slice(start, start + block.at_once)
        accumulator.zero()
        parts.append(model.add(block.rows[own], _some(block.factors, own), block.precision))
        unused.append(accumulator.unused())
        _add(total_P, accumulator.values_P)
    return total_P, _joined(parts), in_all(unused)


def sum_with_layer_norms(
    model: PerExampleModel, accumulator: Accumulator, layers: LinearLayers, block: Block
) -> tuple[Tensor, ExampleSums, Floats]:
    """Return what ``sum_with_norms`` does, without vectors: the norms come from linear layers."""
    sizes, num_steps = block.sizes, block.num_steps
    firsts = np.cumsum(num_steps) - num_steps
    counts = np.add.reduceat(sizes, firsts)
    starts = np.cumsum(counts) - counts
    total_P = torch.zeros(accumulator.values_P.shape, dtype=torch.float64)
    parts, norms = [], []
    for devices in runs(counts, block.at_once):
        first, last = devices.start, devices.stop - 1
        own = slice(int(starts[first]), int(starts[last] + counts[last]))
        steps = slice(int(firsts[first]), int(firsts[last] + num_steps[last]))
        squares = SquaredNorms(sizes[steps], num_steps[devices])
        accumulator.zero()
        factors = _some(block.factors, own)
        parts.append(model.add_with_norms(block.rows[own], factors, layers, squares))
        _add(total_P, accumulator.values_P)
        norms.append(squares.norms())
    norms_S = np.concatenate(norms)
    if block.factors is not None:  # the norms are those before scaling
        norms_S /= np.repeat(block.factors[starts], num_steps)
    return total_P, _joined(parts), norms_S


def sum_with_norms(model: PerExampleModel, block: Block) -> tuple[Tensor, ExampleSums, Floats]:
    """Return the sum [P] of all devices' vectors, in float64, what each row adds, and norms.

    The norms [S] are those of each device's vector after each of its steps, before scaling.
    """
    sizes, num_steps = block.sizes, block.num_steps
    starts = np.cumsum(sizes) - sizes
    gradients: Tensor | None = None
    sums_of_all = ScatteredSums(len(block.rows))
    for steps in groups_of_similar_size(sizes, block.at_once):
        index, mask = padded(starts[steps], sizes[steps])
        vectors_SP, sums = model.gradients(block.rows[index], mask, block.precision)
        if len(steps) == len(sizes) and bool((np.diff(steps) == 1).all()):
            gradients = vectors_SP  # all in one pass, in their order
        else:
            if gradients is None:
                gradients = vectors_SP.new_empty((len(sizes), vectors_SP.shape[1]))
            gradients[torch.from_numpy(steps)] = vectors_SP
        sums_of_all.put(sums, index, mask)
    assert gradients is not None  # a block has steps
    firsts = np.cumsum(num_steps) - num_steps
    norms, vectors_DP = running_norms(gradients, firsts, num_steps)
    if block.factors is not None:
        of_each = block.factors[starts[firsts]]
        vectors_DP = vectors_DP * torch.from_numpy(of_each).float().unsqueeze(1)
    # torch's sum would make a float64 copy of the whole matrix.
    total_P = torch.from_numpy(np.add.reduce(vectors_DP.numpy(), axis=0, dtype=np.float64))
    return total_P, sums_of_all.joined(), norms


# The self-test.


def check_sums(
    trainer: Trainer, identity: Identity, model: PerExampleModel, examples: ExampleRows
) -> tuple[Tensor, Rows, tuple[int, ...]]:
    """Compare a pass over a device's first examples with the task's own sum of them.

    Returns that sum's loss, the examples' rows, and the places of the tensors that the loss did not
    use. Examples with NaN have no sum: they are passed over.

    Raises:
        UnsupportedBatch: the pass fails, or they differ.
    """
    own = trainer.examples(identity)
    first = range(min(NUM_EXAMPLES, len(own)))
    state = torch.get_rng_state()
    subset: Examples = Subset(own, first)  # type: ignore[arg-type]
    faults = evaluate_sums(trainer.task, trainer.image.model, subset, NUM_EXAMPLES).faults
    torch.set_rng_state(state)
    positions = [position for position in first if position not in faults]
    if not positions:
        raise UnsupportedBatch("the first examples cannot be trained on")
    trainer.image.model.train()
    batch = batch_of(trainer.task, own, positions)
    loss, weight, metrics = loss_sum(trainer.task, trainer.image.model, batch)
    if not torch.equal(state, torch.get_rng_state()):
        raise UnsupportedBatch("the task draws random numbers, and each device has its own")
    rows = np.array(positions) + examples.add(0, own)
    trainer.accumulator.zero()
    sums = model.add(rows, None, "float32")
    unused = trainer.accumulator.unused()
    model.compare_batches(rows, sums)
    trainer.accumulator.zero()
    found = {"loss": sums.loss.sum(), "weight": sums.weight.sum()}
    found |= {f"metric {name}": values.sum() for name, values in sums.metrics.items()}
    expected = {"loss": loss.item(), "weight": weight}
    expected |= {f"metric {name}": value for name, value in metrics.items()}
    tolerance = tolerance_of(trainer.image.model)
    for name, value in expected.items():
        if not math.isclose(found.get(name, math.nan), value, rel_tol=tolerance, abs_tol=1e-6):
            raise UnsupportedBatch(f"the {name} of a batch is not the sum over its examples")
    return loss, rows, unused


def check_vectors(
    trainer: Trainer, model: PerExampleModel, examples: ExampleRows, rows: Rows
) -> None:
    """Compare the gradient of some examples that is made as a vector with the task's own.

    Raises:
        UnsupportedBatch: they differ, as where a hook of a parameter changes its gradient, or where
            the model uses a parameter that it holds in a list too.
    """
    image, accumulator = trainer.image, trainer.accumulator
    mask = np.ones((1, len(rows)), dtype=np.bool_)
    vectors_1P, _ = model.gradients(rows[None], mask, "float32")
    accumulator.zero()
    try:
        batch = examples.batch(examples.take(rows))
        loss_sum(trainer.task, image.model, batch)[0].backward()  # type: ignore[no-untyped-call]
        error = math.sqrt(squared_norm(vectors_1P[0] - accumulator.values_P))
        if not error <= tolerance_of(image.model) * accumulator.gradient_norm():
            raise UnsupportedBatch("a device's gradient differs from the task's own")
    finally:
        accumulator.zero()


def tolerance_of(model: nn.Module) -> float:
    """Return the self-test's relative tolerance for a model."""
    is_narrow = any(
        tensor.is_floating_point() and tensor.itemsize < 4
        for tensor in (*model.parameters(), *model.buffers())
    )
    return TOLERANCE_OF_16_BITS if is_narrow else TOLERANCE


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


# Sums.


def _some(factors: Floats | None, own: slice) -> Floats | None:
    return None if factors is None else factors[own]


def _add(total_P: Tensor, values_P: Tensor) -> None:
    """Add a float32 vector to one in float64.

    torch makes a float64 copy of the whole vector for that, which takes five times as long.
    """
    total, values = total_P.numpy(), values_P.numpy()
    for low in range(0, len(values), CHUNK):
        total[low : low + CHUNK] += values[low : low + CHUNK].astype(np.float64)


def _joined(parts: Sequence[ExampleSums]) -> ExampleSums:
    return ExampleSums(
        loss=np.concatenate([part.loss for part in parts]),
        weight=np.concatenate([part.weight for part in parts]),
        metrics={
            name: np.concatenate([part.metrics[name] for part in parts])
            for name in parts[0].metrics
        },
    )
