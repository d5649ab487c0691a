"""The vector is checked once a window, and a bad example is left out by name all the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from headwater.client.training.accumulator import Accumulator
from headwater.client.training.context import TrainingContext
from headwater.client.training.gradient_pass import GRADIENT_FAULT
from headwater.client.training.stop_rules import StopRules
from headwater.client.training.window import sum_window
from headwater.client.training.window_sum import WindowSum
from headwater.common.errors import NonFiniteUpdate
from headwater.common.messages import Plan
from headwater.common.model.parameters import ModelImage
from tests.client.training.power_cuts import PowerCut, device, done, spool
from tests.tasks import NAN_GRADIENT, TwoLayers, examples
from tests.training_contexts import plan, sums, trained, training_context, whole


class CountingAccumulator(Accumulator):
    """Counts how often the whole vector is read."""

    def __init__(self, image: ModelImage) -> None:
        super().__init__(image)
        self.num_read = 0

    def gradient_norm(self) -> float:
        self.num_read += 1
        return super().gradient_norm()


def counted(kinds: list[int]) -> tuple[TrainingContext, CountingAccumulator]:
    context = training_context(TwoLayers(), examples(len(kinds), kinds=kinds))
    accumulator = CountingAccumulator(context.image)
    return replace(context, accumulator=accumulator), accumulator


def summed(context: TrainingContext, chosen: Plan) -> WindowSum:
    assert isinstance(context.examples, TensorDataset)
    rules = StopRules(chosen, context, 0.0)
    return sum_window(chosen, whole(context.examples, chosen.quota), context, rules)


@pytest.mark.parametrize("num_steps", [2, 8, 32])
def test_a_good_window_s_vector_is_read_after_its_first_and_its_last_micro_batch(
    num_steps: int,
) -> None:
    context, accumulator = counted([0] * num_steps)
    total = summed(context, plan(num_steps, 1))
    assert accumulator.num_read == 2
    norms = [step.gradient_norm for step in total.steps]
    assert [at for at, norm in enumerate(norms) if norm is not None] == [0, num_steps - 1]


@pytest.mark.parametrize("bad", [0, 5, 11])
def test_a_gradient_that_is_not_finite_leaves_out_exactly_its_example(bad: int) -> None:
    kinds = [NAN_GRADIENT if at == bad else 0 for at in range(12)]
    context, _ = counted(kinds)
    total = summed(context, plan(12, 4))
    assert total.faults == {bad: GRADIENT_FAULT}
    assert total.refused == [bad]
    good = [at for at in range(12) if at != bad]
    assert torch.equal(context.accumulator.values_P, sums(context, good))


def test_a_bad_first_half_leaves_the_second_half_of_a_deadline_s_time() -> None:
    kinds = [NAN_GRADIENT if at == 5 else 0 for at in range(40)]
    context, _ = counted(kinds)
    total = summed(context, plan(40, 2, deadline_seconds=40.0))
    # An example takes a second: the vector is bad at 22 s, and its example is found at 28 s.
    assert (total.reason, total.num_retries, total.faults) == ("deadline", 0, {5: GRADIENT_FAULT})
    assert total.num_examples == 11
    good = [at for at in range(12) if at != 5]
    assert torch.equal(context.accumulator.values_P, sums(context, good))


def test_a_masked_window_whose_vector_is_not_finite_at_its_end_is_refused() -> None:
    context, _ = counted([0, 0, 0, 0, 0, NAN_GRADIENT, 0, 0])
    with pytest.raises(NonFiniteUpdate, match="a masked round takes no time to sum again"):
        trained(context, plan(8, 2, is_masked=True))


def test_a_bad_vector_in_the_spool_is_found_when_the_window_ends(tmp_path: Path) -> None:
    kinds, chosen = [0, 0, 0, NAN_GRADIENT], plan(22, 2)
    with pytest.raises(PowerCut):
        done(device(cut_at=4, kinds=kinds), chosen, spool(tmp_path))
    found = done(device(kinds=kinds), chosen, spool(tmp_path))
    expected = done(device(kinds=kinds), chosen)
    assert torch.equal(found.values_P, expected.values_P)
    assert found.report.num_refused == expected.report.num_refused == 1
