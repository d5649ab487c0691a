"""What a window does when memory is short: before a failure by prediction, and after one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headwater.client.memory.activation_checkpointing import is_on
from headwater.common.errors import EmptyUpdate, OutOfMemory
from headwater.common.messages import MAX_STEPS
from tests.tasks import NAN_GRADIENT, NAN_LOSS, TwoLayers, examples
from tests.training_contexts import FakeMemory, plan, sums, trained, workplace

# A FakeMemory with room for n examples: its base is 1,000 bytes, and each takes 10.
ROOM = [1000 + 10 * n for n in range(32)]


def rooms(*sizes: int) -> Callable[[int], int]:
    """Return the limit of a machine that has room for so many examples, one after the other."""
    return lambda n: ROOM[sizes[min(n, len(sizes) - 1)]]


@pytest.mark.parametrize(("fits", "size"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4)])
def test_micro_batches_halve_until_they_fit_and_the_sum_stays_exact(fits: int, size: int) -> None:
    place = workplace(TwoLayers(max_micro_batch=fits), examples(19))
    update = trained(place, plan(19, 8))
    assert torch.equal(update.values_P, sums(place, range(19)))
    assert update.report.micro_batch_size == size
    assert update.report.num_examples == 19
    assert len(update.report.steps) == -(-19 // size)


def test_memory_that_runs_out_only_late_in_the_window_loses_and_doubles_nothing() -> None:
    task = TwoLayers()
    place = workplace(task, examples(12))
    failed: list[int] = []

    def loss_sum(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        if len(task.seen) == 2 and not failed:
            failed.append(1)
            raise MemoryError
        return TwoLayers.loss_sum(task, model, batch)

    task.loss_sum = loss_sum  # type: ignore[method-assign]
    update = trained(place, plan(12, 4))
    assert failed == [1]
    assert torch.equal(update.values_P, sums(place, range(12)))
    assert update.report.micro_batch_size == 2


def test_memory_that_runs_out_in_the_search_for_a_culprit_halves_the_micro_batches() -> None:
    """The second backward pass of a full micro-batch is one too many."""
    task = TwoLayers()
    place = workplace(task, examples(8, kinds=[0, 0, 0, NAN_GRADIENT]))

    def loss_sum(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        if len(batch[0]) == 8 and 8 in task.seen:
            raise MemoryError
        return TwoLayers.loss_sum(task, model, batch)

    task.loss_sum = loss_sum  # type: ignore[method-assign]
    update = trained(place, plan(8, 8))
    assert torch.equal(update.values_P, sums(place, [p for p in range(8) if p != 3]))
    assert (update.report.micro_batch_size, update.report.num_refused) == (4, 1)


def test_one_example_that_does_not_fit_is_out_of_memory() -> None:
    place = workplace(TwoLayers(max_micro_batch=0), examples(8))
    with pytest.raises(OutOfMemory, match="pi, round 1: one example alone"):
        trained(place, plan(8, 8))


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 24),
    st.integers(1, 12),
    st.lists(st.integers(0, 14), min_size=1, max_size=30),
    st.lists(st.sampled_from([0, 0, 0, NAN_LOSS, NAN_GRADIENT]), max_size=8),
)
def test_whatever_the_limit_does_no_micro_batch_passes_it_and_the_sum_is_exact(
    quota: int, size: int, sizes: list[int], kinds: list[int]
) -> None:
    memory = FakeMemory(rooms(*sizes))
    place = workplace(TwoLayers(), examples(24, kinds=[*kinds, 0]), memory=memory)
    try:
        report = trained(place, plan(quota, size)).report
    except OutOfMemory:
        assert 0 in sizes
        return
    except EmptyUpdate:
        return
    walked = report.num_examples + report.num_refused
    bad = {p for p, kind in enumerate(kinds) if kind}
    assert report.num_refused == len(bad & set(range(walked)))
    assert torch.equal(place.accumulator.values_P, sums(place, sorted({*range(walked)} - bad)))
    assert report.weight == report.num_examples
    if report.reason == "quota":
        assert walked == quota
    else:
        assert report.reason == "short of memory"
        assert 0 in sizes
    assert report.micro_batch_size >= min(step.num_examples for step in report.steps)


def test_a_limit_that_is_lowered_makes_the_rest_smaller_and_nothing_is_done_twice() -> None:
    task = TwoLayers()
    place = workplace(task, examples(19), memory=FakeMemory(rooms(9, 9, 3)))
    update = trained(place, plan(19, 4))
    assert task.seen == [4, 4, 3, 3, 3, 2]
    assert torch.equal(update.values_P, sums(place, range(19)))
    assert (update.report.micro_batch_size, update.report.reason) == (3, "quota")


def test_a_limit_that_rises_again_is_used_from_the_next_window_on() -> None:
    task = TwoLayers()
    place = workplace(task, examples(12), memory=FakeMemory(rooms(2, 9)))
    assert trained(place, plan(8, 4)).report.micro_batch_size == 2
    assert task.seen == [2, 2, 2, 2]
    assert trained(place, plan(8, 4)).report.micro_batch_size == 4


def test_smaller_micro_batches_are_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = workplace(TwoLayers(), examples(19), memory=FakeMemory(rooms(9, 6, 3)))
    with caplog.at_level(logging.WARNING):
        trained(place, plan(19, 8))
    assert [record.getMessage() for record in caplog.records] == [
        "pi, round 1: micro-batches of 3 instead of 8; memory made them smaller 2 time(s)"
    ]


def test_a_machine_without_a_limit_cuts_nothing() -> None:
    task = TwoLayers()
    trained(workplace(task, examples(12), memory=FakeMemory(lambda n: None)), plan(12, 8))
    assert task.seen == [8, 4]


def test_where_not_one_example_fits_checkpointing_is_switched_on() -> None:
    memory = FakeMemory(lambda n: 1009)
    place = workplace(TwoLayers(), examples(12), memory=memory, checkpointed_bytes=4.0)
    update = trained(place, plan(12, 4))
    assert update.report.is_checkpointed
    assert update.report.micro_batch_size == 2  # 9 bytes of room, 4 an example
    assert torch.equal(update.values_P, sums(place, range(12)))


def test_checkpointing_stays_on_when_memory_is_there_again() -> None:
    memory = FakeMemory(lambda n: 1009 if n == 0 else 1400)
    place = workplace(TwoLayers(), examples(12), memory=memory, checkpointed_bytes=4.0)
    assert trained(place, plan(12, 4)).report.is_checkpointed
    assert trained(place, plan(12, 4)).report.is_checkpointed
    assert memory.checkpointed_to == [4.0]


@pytest.mark.parametrize(
    "foreseen",
    [
        pytest.param(None, id="not known"),
        pytest.param(10.0, id="no less than without"),
        pytest.param(9.5, id="less, and not enough"),
    ],
)
def test_where_checkpointing_would_not_help_the_device_stops_before_the_limit(
    foreseen: float | None,
) -> None:
    memory = FakeMemory(lambda n: 1009)
    place = workplace(TwoLayers(), examples(12), memory=memory, checkpointed_bytes=foreseen)
    with pytest.raises(OutOfMemory, match=r"pi, round 1: one example alone does not fit: by ") as e:
        trained(place, plan(12, 4))
    assert "activation checkpointing" in str(e.value)
    assert memory.begun == []


def test_running_out_of_memory_names_prediction_and_limit() -> None:
    memory = FakeMemory(lambda n: 300 << 20, base=290 << 20, each=20 << 20)
    place = workplace(TwoLayers(), examples(12), memory=memory)
    with pytest.raises(OutOfMemory, match="it takes 310 MiB of 300 MiB"):
        trained(place, plan(12, 4))


def test_what_was_summed_before_memory_ran_short_is_sent() -> None:
    place = workplace(TwoLayers(), examples(12), memory=FakeMemory(rooms(9, 9, 0)))
    update = trained(place, plan(12, 4))
    assert (update.report.reason, update.report.weight) == ("short of memory", 8)
    assert torch.equal(update.values_P, sums(place, range(8)))


def test_local_steps_that_were_taken_before_memory_ran_short_are_sent() -> None:
    place = workplace(TwoLayers(), examples(12), memory=FakeMemory(rooms(9, 9, 0)))
    update = trained(place, plan(12, 4, local_steps=3, local_learning_rate=2.0**-6))
    assert (update.report.reason, update.report.weight) == ("short of memory", 8)


def test_a_window_of_more_micro_batches_than_a_report_holds_ends_there() -> None:
    quota = 2 * MAX_STEPS
    place = workplace(TwoLayers(), examples(quota), memory=FakeMemory(rooms(1)))
    update = trained(place, plan(quota, 2))
    assert len(update.report.steps) == MAX_STEPS
    assert (update.report.reason, update.report.weight) == ("short of memory", MAX_STEPS)
    assert update.report.num_left == quota - MAX_STEPS
    assert torch.equal(update.values_P, sums(place, range(MAX_STEPS)))


class FitsCheckpointed(TwoLayers):
    """An allocation fails, in half of the backward pass, unless checkpointing is on."""

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        loss, weight = super().loss_sum(model, batch)
        if len(self.seen) > 1 and not is_on(model):
            (loss * 0.5).backward()  # type: ignore[no-untyped-call]
            raise MemoryError
        return loss, weight


def test_after_a_failed_allocation_at_one_example_the_window_is_done_again_checkpointed() -> None:
    place = workplace(FitsCheckpointed(), examples(12))
    update = trained(place, plan(12, 4))
    assert torch.equal(update.values_P, sums(place, range(12)))
    assert update.report.is_checkpointed
    assert (update.report.micro_batch_size, update.report.num_examples) == (1, 12)


def test_a_model_without_blocks_is_out_of_memory_and_the_error_says_why() -> None:
    class OneLayer(TwoLayers):
        def new_model(self) -> nn.Module:
            return nn.Linear(3, 1)

        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            raise MemoryError

    with pytest.raises(OutOfMemory, match="the model has no blocks to checkpoint"):
        trained(workplace(OneLayer(), examples(4)), plan(4, 2))
