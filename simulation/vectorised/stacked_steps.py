"""The local steps of many devices at once: each has a row of parameters, gradients and state.

All devices of a block take their first local step together, then their second, and so on; one with
fewer steps leaves the rows when it has taken its last. A step's micro-batches are added up before
it is taken, as on the device (``client.local_training``). The result is each device's update to
rounding: the same float32 terms, added in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwater.client.trainer.trainer import Trainer
from headwater.common.data.batches import UnsupportedBatch
from headwater.common.local_training.local_optimizer import held_bytes, path_length
from headwater.common.local_training.local_terms import LocalTerms
from headwater.common.model.vectors import squared_norm
from headwater.common.task import loss_sum
from headwater.simulation.vectorised.example_rows import ExampleRows, Rows
from headwater.simulation.vectorised.passes import tolerance_of
from headwater.simulation.vectorised.round_columns import (
    Bools,
    Floats,
    Ints,
    RoundColumns,
    groups_of_similar_size,
    padded,
)
from headwater.simulation.vectorised.stacked_model import StackedModel
from headwater.simulation.vectorised.stacked_optimizer import (
    RowTensors,
    StackedOptimizer,
    moves_without_gradient,
    steps_each_row_alone,
)
from headwater.simulation.vectorised.task_sums import ExampleSums, ScatteredSums

# Of the self-test: how far the second device's parameters are from the first's.
SHIFT = 1 / 64
# A batch is padded to the longest of its pass if it is at least this share of it. Most of a pass's
# time goes to calling operators and to reading parameters, and not to examples.
LEAST_SHARE = 1 / 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StackedUpdates:
    """The updates of D devices after their local steps, each a row of ``values_DP``.

    ``sums`` are those of each example; ``norms`` [S] are those of a local step's gradient after
    each of its micro-batches; ``update_norms`` [D] are those of the rows, NaN or infinite if the
    device must be computed alone.
    """

    values_DP: Tensor
    sums: ExampleSums
    norms: Floats
    update_norms: Floats


class StackedSteps:
    """Takes the local steps of many devices at once, by the terms that their plans share."""

    def __init__(
        self,
        trainer: Trainer,
        examples: ExampleRows,
        terms: LocalTerms,
        *,
        rate: float,
        takes_batches: bool,
    ) -> None:
        """``rate`` is that of the first round, and ``takes_batches`` as in ``StackedModel``.

        Raises:
            UnsupportedBatch: the optimizer computes with all of a tensor at once.
        """
        if not steps_each_row_alone(terms, rate=rate):
            raise UnsupportedBatch(
                f"the local optimizer {terms.optimizer} computes with a whole tensor at once"
            )
        self._terms = terms
        # The proximal term uses every parameter.
        self._must_know_zeros = not terms.proximal and moves_without_gradient(terms, rate=rate)
        self._trainer, self._examples = trainer, examples
        self._model = StackedModel(
            trainer.task, trainer.image, examples, takes_batches=takes_batches
        )

    @property
    def bytes_of_each(self) -> int:
        """What a device takes: parameters, gradients, what a pass adds to them, and the state."""
        num_parameters = self._trainer.image.layout.num_parameters
        return 8 * num_parameters + held_bytes(self._terms, num_parameters=num_parameters)

    def check(self, rows: Rows) -> None:
        """Compare a pass over some examples, at two points, with the task's own gradients there.

        Raises:
            UnsupportedBatch: the pass fails, or they differ.
        """
        image, accumulator = self._trainer.image, self._trainer.accumulator
        start_P = image.values_P.clone()
        values_RP = torch.stack([start_P, start_P + SHIFT])
        gradients_RP = torch.zeros_like(values_RP)
        counts = (len(rows), max(len(rows) - 1, 1))  # the second is padded
        mask_RM = np.arange(len(rows)) < np.array(counts)[:, None]
        rows_RM = np.where(mask_RM, rows, rows[0])
        try:
            self._model.add_gradients(values_RP, gradients_RP, rows_RM, mask_RM, "float32")
        except UnsupportedBatch:
            if not self._model.takes_batches:
                raise
            self._model.takes_batches = False
            gradients_RP.zero_()
            self._model.add_gradients(values_RP, gradients_RP, rows_RM, mask_RM, "float32")
        try:
            for values_P, found_P, count in zip(values_RP, gradients_RP, counts, strict=True):
                image.values_P.copy_(values_P)
                accumulator.zero()
                batch = self._examples.batch(self._examples.take(rows[:count]))
                loss, _, _ = loss_sum(self._trainer.task, image.model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                error = squared_norm(found_P - accumulator.values_P) ** 0.5
                if not error <= tolerance_of(image.model) * accumulator.gradient_norm():
                    raise UnsupportedBatch("a device's gradient differs from the task's own")
        finally:
            image.values_P.copy_(start_P)
            accumulator.zero()

    def train(
        self,
        columns: RoundColumns,
        rows: Rows,
        start_P: Tensor,
        *,
        rate: float,
        precision: str,
        at_once: int,
    ) -> StackedUpdates:
        """Return the updates of devices that start at these parameters and use these rows.

        All take their steps at one ``rate``. A pass takes at most ``at_once`` rows, unless one
        device's micro-batch has more.

        Raises:
            UnsupportedBatch: torch.func cannot run the task on these examples.
        """
        stack = _Stack(columns, rows, start_P, most=at_once)
        image = self._trainer.image
        tensors = RowTensors(
            model=image.model, parameters=image.trainable(), spans=image.layout.spans
        )
        optimizer = StackedOptimizer(
            self._terms, stack.values_RP, stack.gradients_RP, tensors, rate=rate
        )
        for number in range(int(stack.num_steps.max())):
            num_rows = int(np.count_nonzero(stack.num_steps > number))
            weights_R = torch.zeros(num_rows, 1)
            for at, pieces in stack.passes(number, num_rows, at_once):
                added = self._add(stack, at, pieces, precision)
                weights_R[torch.from_numpy(at), 0] += torch.from_numpy(added).float()
            gradients_RP = stack.gradients_RP[:num_rows].div_(weights_R)
            if self._must_know_zeros:
                stack.is_unknown[:num_rows] |= self._has_zeros(gradients_RP)
            if self._terms.proximal:
                moved_RP = stack.values_RP[:num_rows] - start_P
                gradients_RP.add_(moved_RP, alpha=self._terms.proximal)
            optimizer.step(num_rows)
            gradients_RP.zero_()
        return self._updates(stack, columns, start_P, rate=rate)

    def _add(self, stack: _Stack, at: Ints, pieces: Ints, precision: str) -> Floats:
        """Add a piece of the step of each of these rows to its gradients; return their weights."""
        index, mask = padded(stack.starts[pieces], stack.sizes[pieces])
        rows_RM, where = stack.rows[index], torch.from_numpy(at)
        if at[-1] - at[0] == len(at) - 1:
            values_RP = stack.values_RP[at[0] : at[-1] + 1]
            gradients_RP = stack.gradients_RP[at[0] : at[-1] + 1]
            sums = self._model.add_gradients(values_RP, gradients_RP, rows_RM, mask, precision)
        else:
            gradients_RP = stack.gradients_RP[where]
            sums = self._model.add_gradients(
                stack.values_RP[where], gradients_RP, rows_RM, mask, precision
            )
            stack.gradients_RP[where] = gradients_RP
        stack.norms[stack.measured[pieces]] = torch.linalg.vector_norm(gradients_RP, dim=1).numpy()
        stack.sums.put(sums, index, mask)
        weights: Floats = np.where(mask, sums.weight, 0.0).sum(1)
        return weights

    def _has_zeros(self, gradients_RP: Tensor) -> Bools:
        """Return the rows in which a tensor's gradient is zero, or None: the pass does not tell."""
        spans = [span for span in self._trainer.image.layout.spans if span[1] > span[0]]
        starts = torch.tensor([start for start, _ in spans])
        found = np.zeros(len(gradients_RP), dtype=np.bool_)
        maybe_RT = gradients_RP[:, starts] == 0
        for at in torch.nonzero(maybe_RT.any(0)).flatten().tolist():
            found |= ~gradients_RP[:, slice(*spans[at])].any(1).numpy()
        return found

    def _updates(
        self, stack: _Stack, columns: RoundColumns, start_P: Tensor, *, rate: float
    ) -> StackedUpdates:
        sums, counts = stack.sums.joined(), columns.num_examples
        weights = np.add.reduceat(sums.weight, np.cumsum(counts) - counts)
        factors = [
            (weigh_as or weight) / self._length(number, rate=rate)
            for weigh_as, weight, number in zip(
                columns.weigh_as.tolist(),
                weights.tolist(),
                columns.num_local_steps.tolist(),
                strict=True,
            )
        ]
        moved_RP = torch.sub(start_P, stack.values_RP, out=stack.values_RP)
        values_DP = moved_RP[torch.from_numpy(np.argsort(stack.order))]
        values_DP.mul_(torch.tensor(factors).unsqueeze(1))
        update_norms = torch.linalg.vector_norm(values_DP, dim=1).double().numpy()
        update_norms[stack.order[stack.is_unknown]] = np.nan
        return StackedUpdates(
            values_DP=values_DP, sums=sums, norms=stack.norms, update_norms=update_norms
        )

    def _length(self, num_steps: int, *, rate: float) -> float:
        if not self._terms.is_normalized:
            return 1.0
        return path_length(self._terms, num_steps, rate=rate)


class _Stack:
    """The devices of a block as rows, those with the most local steps first, and their sums.

    ``order`` [R] has each row's device, and ``num_steps`` [R] its local steps; ``is_unknown`` [R]
    are the rows whose device must be computed alone. A local step's
    examples are computed in pieces of at most ``most``: its first micro-batch, after which a device
    measures the norm, and all others together, for which a simulated device's memory is no limit.
    ``starts`` and ``sizes`` are those of the pieces in ``rows``, and ``measured`` the micro-batches
    that end with them.
    """

    def __init__(self, columns: RoundColumns, rows: Rows, start_P: Tensor, *, most: int) -> None:
        num_local = columns.num_local_steps
        self.order = np.argsort(-num_local, kind="stable")
        self.num_steps = num_local[self.order]
        self.values_RP = start_P.repeat(len(columns), 1)
        self.gradients_RP = torch.zeros_like(self.values_RP)
        self.rows, self.sums = rows, ScatteredSums(len(rows))
        self.is_unknown = np.zeros(len(columns), dtype=np.bool_)
        self.norms = np.full(len(columns.sizes), np.nan)
        first = columns.first_of_local_steps
        last = np.append(first[1:], len(columns.sizes)) - 1
        rest = np.add.reduceat(columns.sizes, first) - columns.sizes[first]
        self._num_pieces = 1 - (-rest // most)
        ends = np.cumsum(self._num_pieces)
        self._first_piece = ends - self._num_pieces
        self.sizes = np.full(ends[-1], most)
        self.measured = np.repeat(last, self._num_pieces)
        self.sizes[ends - 1] = rest - (self._num_pieces - 2) * most
        self.sizes[self._first_piece] = columns.sizes[first]
        self.measured[self._first_piece] = first
        self.starts = np.cumsum(self.sizes) - self.sizes
        self._first_step = (np.cumsum(num_local) - num_local)[self.order]

    def passes(self, number: int, num_rows: int, at_once: int) -> Iterator[tuple[Ints, Ints]]:
        """Yield rows, and a piece of each, until all of one local step are done, in order."""
        steps = self._first_step[:num_rows] + number
        for turn in range(int(self._num_pieces[steps].max())):
            at = np.flatnonzero(self._num_pieces[steps] > turn)
            pieces = self._first_piece[steps[at]] + turn
            for group in groups_of_similar_size(
                self.sizes[pieces], at_once, least_share=LEAST_SHARE
            ):
                own = np.sort(group)
                yield at[own], pieces[own]
