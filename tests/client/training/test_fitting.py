"""A window with too little memory: reduced by prediction, and restarted after a failure."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from headwater.client.memory.activation_checkpointing import is_on
from headwater.client.training.sampler import SamplerPosition, window
from headwater.common.errors import EmptyUpdate, OutOfMemory
from headwater.common.messages import MAX_STEPS
from tests.tasks import NAN_GRADIENT, NAN_LOSS, TwoLayers, examples
from tests.training_contexts import FakeMemory, plan, sum_gradients, sums, trained, training_context

# A FakeMemory with room for n examples: its base is 1,000 bytes, and each takes 10.
ROOM = [1000 + 10 * n for n in range(32)]


def rooms(*sizes: int) -> Callable[[int], int]:
    """Return the limit of a machine that has room for so many examples, one after the other."""
    return lambda n: ROOM[sizes[min(n, len(sizes) - 1)]]


@pytest.mark.parametrize(("fits", "size"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4)])
def test_micro_batches_halve_until_they_fit_and_the_sum_stays_exact(fits: int, size: int) -> None:
    context = training_context(TwoLayers(max_micro_batch=fits), examples(19))
    update = trained(context, plan(19, 8))
    assert torch.equal(update.values_P, sums(context, range(19)))
    assert update.report.micro_batch_size == size
    assert update.report.num_examples == 19
    assert len(update.report.steps) == -(-19 // size)


def test_an_allocation_failure_late_in_the_window_loses_and_repeats_no_example() -> None:
    task = TwoLayers()
    context = training_context(task, examples(12))
    failed: list[int] = []

    def loss_sum(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        if len(task.seen) == 2 and not failed:
            failed.append(1)
            raise MemoryError
        return TwoLayers.loss_sum(task, model, batch)

    task.loss_sum = loss_sum  # type: ignore[method-assign]
    update = trained(context, plan(12, 4))
    assert failed == [1]
    assert torch.equal(update.values_P, sums(context, range(12)))
    assert update.report.micro_batch_size == 2


def test_a_pass_that_failed_to_allocate_is_freed_before_the_next_one() -> None:
    """Else the next one has no more room than it, and the micro-batches shrink to one example."""
    task = TwoLayers()
    context = training_context(task, examples(8))
    outputs: list[weakref.ref[Tensor]] = []

    def loss_sum(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        assert all(output() is None for output in outputs)
        loss, weight = TwoLayers.loss_sum(task, model, batch)
        if len(batch[0]) > 4:
            outputs.append(weakref.ref(loss))
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return loss, weight

    task.loss_sum = loss_sum  # type: ignore[method-assign]
    assert trained(context, plan(8, 8)).report.micro_batch_size == 4
    assert len(outputs) == 1


def test_an_allocation_failure_in_the_search_for_bad_examples_halves_the_micro_batches() -> None:
    """The second backward pass of a full micro-batch fails to allocate."""
    task = TwoLayers()
    context = training_context(task, examples(8, kinds=[0, 0, 0, NAN_GRADIENT]))

    def loss_sum(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        if len(batch[0]) == 8 and 8 in task.seen:
            raise MemoryError
        return TwoLayers.loss_sum(task, model, batch)

    task.loss_sum = loss_sum  # type: ignore[method-assign]
    update = trained(context, plan(8, 8))
    assert torch.equal(update.values_P, sums(context, [p for p in range(8) if p != 3]))
    assert (update.report.micro_batch_size, update.report.num_refused) == (4, 1)


def test_one_example_that_does_not_fit_is_out_of_memory() -> None:
    context = training_context(TwoLayers(max_micro_batch=0), examples(8))
    with pytest.raises(OutOfMemory, match="pi, round 1: one example alone"):
        trained(context, plan(8, 8))


@given(
    st.integers(1, 24),
    st.integers(1, 12),
    st.lists(st.integers(0, 14), min_size=1, max_size=30),
    st.lists(st.sampled_from([0, 0, 0, NAN_LOSS, NAN_GRADIENT]), max_size=8),
)
def test_no_micro_batch_exceeds_a_changing_limit_and_the_sum_is_exact(
    quota: int, size: int, sizes: list[int], kinds: list[int]
) -> None:
    memory = FakeMemory(rooms(*sizes))
    context = training_context(TwoLayers(), examples(24, kinds=[*kinds, 0]), memory=memory)
    try:
        report = trained(context, plan(quota, size)).report
    except OutOfMemory:
        assert 0 in sizes
        return
    except EmptyUpdate:
        return
    walked = report.num_examples + report.num_refused
    bad = {p for p, kind in enumerate(kinds) if kind}
    good = [p for p in range(24) if p not in bad]
    assert torch.equal(context.accumulator.values_P, sums(context, good[: report.num_examples]))
    assert report.weight == report.num_examples
    if report.reason == "quota":
        assert walked == quota
        assert report.num_refused == len(bad & set(range(walked)))
    else:
        assert report.reason == "short of memory"
        assert 0 in sizes
        # The micro-batch in which the window ended may have shown further bad examples.
        assert report.num_refused >= len(bad & set(range(good[report.num_examples - 1])))
    if not report.num_refused:
        assert report.micro_batch_size >= min(step.num_examples for step in report.steps)


def test_an_example_between_the_end_and_a_bad_one_found_further_on_comes_first_next_time() -> None:
    """All three are tried, the third is bad; then one of the others fits, and then none."""
    order: dict[str, Any] = {"run_seed": 0, "name": "pi", "num_examples": 24}
    first = window(SamplerPosition(), quota=3, **order)
    data = examples(24, kinds=[NAN_LOSS if p == first.positions[2] else 0 for p in range(24)])
    context = training_context(TwoLayers(), data, memory=FakeMemory(rooms(3, 1, 0)))
    found = sum_gradients(plan(3, 3), first, context)
    assert found.total.reason == "short of memory"
    assert list(found.used) == [first.positions[0], first.positions[2]]
    following = window(first.after_use_of(found.used), quota=1, **order)
    assert following.positions == (first.positions[1],)


def test_a_lowered_limit_reduces_the_remaining_micro_batches_and_repeats_none() -> None:
    task = TwoLayers()
    context = training_context(task, examples(19), memory=FakeMemory(rooms(9, 9, 3)))
    update = trained(context, plan(19, 4))
    assert task.seen == [4, 4, 3, 3, 3, 2]
    assert torch.equal(update.values_P, sums(context, range(19)))
    assert (update.report.micro_batch_size, update.report.reason) == (3, "quota")


def test_a_raised_limit_applies_from_the_next_window() -> None:
    task = TwoLayers()
    context = training_context(task, examples(12), memory=FakeMemory(rooms(2, 9)))
    assert trained(context, plan(8, 4)).report.micro_batch_size == 2
    assert task.seen == [2, 2, 2, 2]
    assert trained(context, plan(8, 4)).report.micro_batch_size == 4


def test_smaller_micro_batches_are_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = training_context(TwoLayers(), examples(19), memory=FakeMemory(rooms(9, 6, 3)))
    with caplog.at_level(logging.WARNING):
        trained(context, plan(19, 8))
    assert [record.getMessage() for record in caplog.records] == [
        "pi, round 1: micro-batches of 3 instead of 8; memory made them smaller 2 time(s)"
    ]


def test_a_machine_without_a_limit_reduces_nothing() -> None:
    task = TwoLayers()
    trained(training_context(task, examples(12), memory=FakeMemory(lambda n: None)), plan(12, 8))
    assert task.seen == [8, 4]


def test_if_no_example_fits_checkpointing_is_switched_on() -> None:
    memory = FakeMemory(lambda n: 1009)
    context = training_context(TwoLayers(), examples(12), memory=memory, checkpointed_bytes=4.0)
    update = trained(context, plan(12, 4))
    assert update.report.is_checkpointed
    assert update.report.micro_batch_size == 2  # 9 bytes of room, 4 an example
    assert torch.equal(update.values_P, sums(context, range(12)))


def test_checkpointing_stays_on_after_memory_is_free_again() -> None:
    memory = FakeMemory(lambda n: 1009 if n == 0 else 1400)
    context = training_context(TwoLayers(), examples(12), memory=memory, checkpointed_bytes=4.0)
    assert trained(context, plan(12, 4)).report.is_checkpointed
    assert trained(context, plan(12, 4)).report.is_checkpointed
    assert memory.checkpointed_to == [4.0]


@pytest.mark.parametrize(
    "predicted",
    [
        pytest.param(None, id="not known"),
        pytest.param(10.0, id="no less than without"),
        pytest.param(9.5, id="less, and not enough"),
    ],
)
def test_if_checkpointing_would_not_help_the_window_stops_before_the_limit(
    predicted: float | None,
) -> None:
    memory = FakeMemory(lambda n: 1009)
    context = training_context(
        TwoLayers(), examples(12), memory=memory, checkpointed_bytes=predicted
    )
    with pytest.raises(OutOfMemory, match="pi, round 1: one example alone does not fit: its") as e:
        trained(context, plan(12, 4))
    assert "activation checkpointing" in str(e.value)
    assert memory.begun == []


def test_running_out_of_memory_names_prediction_and_limit() -> None:
    memory = FakeMemory(lambda n: 300 << 20, base=290 << 20, each=20 << 20)
    context = training_context(TwoLayers(), examples(12), memory=memory)
    with pytest.raises(OutOfMemory, match="peak is 325 MB, the limit 315 MB"):
        trained(context, plan(12, 4))


def test_the_sum_before_memory_ran_short_is_sent() -> None:
    context = training_context(TwoLayers(), examples(12), memory=FakeMemory(rooms(9, 9, 0)))
    update = trained(context, plan(12, 4))
    assert (update.report.reason, update.report.weight) == ("short of memory", 8)
    assert torch.equal(update.values_P, sums(context, range(8)))


def test_local_steps_before_memory_ran_short_are_sent() -> None:
    context = training_context(TwoLayers(), examples(12), memory=FakeMemory(rooms(9, 9, 0)))
    update = trained(context, plan(12, 4, local_steps=3, local_learning_rate=2.0**-6))
    assert (update.report.reason, update.report.weight) == ("short of memory", 8)


@pytest.mark.slow
def test_a_window_ends_at_the_largest_number_of_steps_of_a_report() -> None:
    quota = 2 * MAX_STEPS
    context = training_context(TwoLayers(), examples(quota), memory=FakeMemory(rooms(1)))
    update = trained(context, plan(quota, 2))
    assert len(update.report.steps) == MAX_STEPS
    assert (update.report.reason, update.report.weight) == ("short of memory", MAX_STEPS)
    assert torch.equal(update.values_P, sums(context, range(MAX_STEPS)))


class FitsCheckpointed(TwoLayers):
    """An allocation fails, in half of the backward pass, unless checkpointing is on."""

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        loss, weight = super().loss_sum(model, batch)
        if len(self.seen) > 1 and not is_on(model):
            (loss * 0.5).backward()  # type: ignore[no-untyped-call]
            raise MemoryError
        return loss, weight


def test_after_an_allocation_failure_at_one_example_the_window_restarts_with_checkpointing() -> (
    None
):
    context = training_context(FitsCheckpointed(), examples(12))
    update = trained(context, plan(12, 4))
    assert torch.equal(update.values_P, sums(context, range(12)))
    assert update.report.is_checkpointed
    assert (update.report.micro_batch_size, update.report.num_examples) == (1, 12)


def test_a_model_without_blocks_is_out_of_memory_and_the_error_says_why() -> None:
    class OneLayer(TwoLayers):
        def new_model(self) -> nn.Module:
            return nn.Linear(3, 1)

        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            raise MemoryError

    with pytest.raises(OutOfMemory, match="the model has no blocks to checkpoint"):
        trained(training_context(OneLayer(), examples(4)), plan(4, 2))
