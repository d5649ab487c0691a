"""The passes over a block of devices: their sum alone, and the norms of each one's own besides.

Where the model's layers tell the norms, nobody's vector is needed. Else vectors are made, side by
side; those that are large one after another, where the gradients of the model are: a matrix of them
would be moved through memory a dozen times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.client.training.accumulator import Accumulator
from headwater.common.model.vectors import CHUNK
from headwater.simulation.compute.example_rows import Packed, Rows
from headwater.simulation.compute.gradient_norms import Squares, grown
from headwater.simulation.compute.linear_hooks import Layers
from headwater.simulation.compute.padding import alike, padded, runs
from headwater.simulation.compute.per_example import ExampleSums, Floats, ManyExamples


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """What goes through the model: the rows of D devices, one behind the other.

    ``factors`` scale what each row adds to the gradient; None: nothing is scaled. ``sizes`` [S] are
    the micro-batches, and ``num_steps`` [D] how many of them each device has. At most ``at_once``
    rows are in a pass, if that can be.
    """

    rows: Rows
    factors: Floats | None
    sizes: NDArray[np.int64]
    num_steps: NDArray[np.int64]
    precision: str
    at_once: int


def fused(
    many: ManyExamples,
    packed: Packed,
    accumulator: Accumulator,
    block: Block,
) -> tuple[Tensor, ExampleSums]:
    """Return the gradient [P], in float64, of the sum over all rows, and what each row adds.

    Error: each pass sums in float32 over at most ``at_once`` rows, and passes add in float64. Of
    15,000 digits through an MLP 64-128-10 at once it was 1.4e-7 of the gradient's norm, and 0.7e-7
    in passes of 4,096.
    """
    rows, factors, at_once = block.rows, block.factors, block.at_once
    total_P = torch.zeros(accumulator.values_P.shape, dtype=torch.float64)
    parts = []
    for start in range(0, len(rows), at_once):
        end = start + at_once
        scale = None if factors is None else torch.from_numpy(factors[start:end]).float()
        accumulator.zero()
        parts.append(many.add(packed.take(rows[start:end]), scale, block.precision))
        _add(total_P, accumulator.values_P)
    return total_P, _joined(parts)


def told_by_layers(
    many: ManyExamples,
    packed: Packed,
    accumulator: Accumulator,
    layers: Layers,
    block: Block,
) -> tuple[Tensor, ExampleSums, Floats]:
    """Return what ``vectorised`` does, but with nobody's vector: ``fused``, and norms by layers.

    All examples of a device are in one pass, so none may have more than ``at_once``.
    """
    rows, factors, sizes, num_steps = block.rows, block.factors, block.sizes, block.num_steps
    firsts = np.cumsum(num_steps) - num_steps
    counts = np.add.reduceat(sizes, firsts)
    starts = np.cumsum(counts) - counts
    total_P = torch.zeros(accumulator.values_P.shape, dtype=torch.float64)
    parts, norms = [], []
    for devices in runs(counts, block.at_once):
        first, last = devices.start, devices.stop - 1
        own = slice(int(starts[first]), int(starts[last] + counts[last]))
        steps = slice(int(firsts[first]), int(firsts[last] + num_steps[last]))
        scale = None if factors is None else torch.from_numpy(factors[own]).float()
        squares = Squares(sizes[steps], num_steps[devices])
        accumulator.zero()
        parts.append(many.add_told(packed.take(rows[own]), scale, layers, squares))
        _add(total_P, accumulator.values_P)
        norms.append(squares.norms())
    found = np.concatenate(norms)
    if factors is not None:  # the norms are told of the sums before they are scaled
        found /= np.repeat(factors[starts], num_steps)
    return total_P, _joined(parts), found


def vectorised(
    many: ManyExamples,
    packed: Packed,
    block: Block,
) -> tuple[Tensor, ExampleSums, Floats]:
    """Return the sum [P] of all devices' vectors, in float64, and each one's norms [S] as it grows.

    The norms lie one behind the other, as the steps do.
    """
    rows, factors, sizes, num_steps = block.rows, block.factors, block.sizes, block.num_steps
    starts = np.cumsum(sizes) - sizes
    gradients: Tensor | None = None
    found: dict[str, Floats] = {}
    for steps in alike(sizes, block.at_once):
        index, mask = padded(starts[steps], sizes[steps])
        taken = [
            part.reshape(*index.shape, *part.shape[1:]) for part in packed.take(rows[index.ravel()])
        ]
        vectors_SP, sums = many.rows(taken, torch.from_numpy(mask).float(), block.precision)
        if len(steps) == len(sizes) and bool((np.diff(steps) == 1).all()):
            gradients = vectors_SP  # all in one pass, in their order
        else:
            if gradients is None:
                gradients = vectors_SP.new_empty((len(sizes), vectors_SP.shape[1]))
            gradients[torch.from_numpy(steps)] = vectors_SP
        _scatter(found, sums, index[mask], mask, len(rows))
    assert gradients is not None  # a block has steps
    firsts = np.cumsum(num_steps) - num_steps
    norms, vectors_DP = grown(gradients, firsts, num_steps)
    if factors is not None:
        of_each = factors[starts[firsts]]
        vectors_DP = vectors_DP * torch.from_numpy(of_each).float().unsqueeze(1)
    loss, weight = found.pop(LOSS), found.pop(WEIGHT)
    sums = ExampleSums(loss=loss, weight=weight, metrics=found)
    # torch's sum would make a float64 copy of the whole matrix.
    total_P = torch.from_numpy(np.add.reduce(vectors_DP.numpy(), axis=0, dtype=np.float64))
    return total_P, sums, norms


def in_turn(
    many: ManyExamples,
    packed: Packed,
    accumulator: Accumulator,
    block: Block,
) -> tuple[Tensor, ExampleSums, Floats]:
    """Return what ``vectorised`` does, one vector after another, as a device sums its own."""
    rows, factors, sizes = block.rows, block.factors, block.sizes
    total_P = torch.zeros(accumulator.values_P.shape, dtype=torch.float64)
    norms = np.zeros(len(sizes))
    parts = []
    step = start = 0
    for count in block.num_steps.tolist():
        accumulator.zero()
        first = start
        for _ in range(count):
            end = start + int(sizes[step])
            while start < end:
                some = rows[start : min(start + block.at_once, end)]
                parts.append(many.add(packed.take(some), None, block.precision))
                start += len(some)
            norms[step] = accumulator.gradient_norm()
            step += 1
        _add(total_P, accumulator.values_P, 1.0 if factors is None else float(factors[first]))
    return total_P, _joined(parts), norms


def _add(total_P: Tensor, values_P: Tensor, factor: float = 1.0) -> None:
    """Add a multiple of a float32 vector to one in float64.

    torch makes a float64 copy of the whole vector for that, which takes five times as long.
    """
    total, values = total_P.numpy(), values_P.numpy()
    for low in range(0, len(values), CHUNK):
        wide = values[low : low + CHUNK].astype(np.float64)
        wide *= factor
        total[low : low + CHUNK] += wide


LOSS, WEIGHT = "", " "  # no metric's name


def _scatter(
    found: dict[str, Floats],
    sums: ExampleSums,
    rows: NDArray[np.int64],
    mask: NDArray[np.bool_],
    num_rows: int,
) -> None:
    for name, values in {LOSS: sums.loss, WEIGHT: sums.weight, **sums.metrics}.items():
        found.setdefault(name, np.zeros(num_rows))[rows] = values[mask]


def _joined(parts: Sequence[ExampleSums]) -> ExampleSums:
    return ExampleSums(
        loss=np.concatenate([part.loss for part in parts]),
        weight=np.concatenate([part.weight for part in parts]),
        metrics={
            name: np.concatenate([part.metrics[name] for part in parts])
            for name in parts[0].metrics
        },
    )
