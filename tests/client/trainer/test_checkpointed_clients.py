"""Where memory may be short, the check keeps glibc's heap free of holes; else it stays fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from headwater.client.memory import pass_memory
from headwater.client.memory.activation_checkpointing import Recomputed, choice_of, is_on
from headwater.client.memory.pass_memory import PassMemory, Stretch
from headwater.client.memory.peak_model import ProcessMemory, resident_bytes
from headwater.client.trainer import checkpointed_clients
from headwater.client.trainer.checkpointed_clients import CheckpointedClients
from headwater.client.training.context import TrainingContext
from headwater.common.system import heap
from headwater.common.system.heap import MAX_MMAP_THRESHOLD_BYTES, MMAP_THRESHOLD_BYTES
from tests.training_contexts import training_context

COMPACT = [(heap.M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)]
FAST = [
    (heap.M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD_BYTES),
    (heap.M_TRIM_THRESHOLD, 2 * MAX_MMAP_THRESHOLD_BYTES),
]


class Deep:
    """Nine layers, which can be computed again."""

    scale = 1.0

    def new_model(self) -> nn.Module:
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(9)])

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return TensorDataset(torch.ones(8, 65536, 4))

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        return (model(batch[0]).sum() * 1e-38).mul(self.scale).mul(1e38), len(batch[0])


@pytest.fixture
def mallopt(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The parameters that glibc got."""
    called: list[tuple[int, int]] = []
    monkeypatch.setattr(heap, "_mallopt", lambda name, value: called.append((name, value)))
    monkeypatch.setattr(heap, "_keeps_freed_blocks", False)
    return called


def context_below(limit_over_rest: float) -> TrainingContext:
    limit = int(limit_over_rest * resident_bytes())
    memory = ProcessMemory(lambda: limit)
    task = Deep()
    data = task.train_examples(data=None, part=0, num_parts=1)
    return training_context(task, data, memory=memory)


def fit(limit_over_rest: float) -> CheckpointedClients:
    context = context_below(limit_over_rest)
    clients = CheckpointedClients(context.image)
    clients.fit(context)
    assert not context.accumulator.values_P.any()
    return clients


def test_a_model_that_takes_most_of_the_limit_is_measured_in_a_heap_without_holes(
    mallopt: list[tuple[int, int]],
) -> None:
    fit(1.5)
    assert mallopt == [*COMPACT, *FAST]  # and training is fast, as a plain pass fits


def test_the_example_of_a_measured_pass_is_known_unless_its_gradient_is_not_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpointed_clients, "WORKING_FACTOR", 1e9)  # so a pass is measured
    passed = fit(1.5).passed
    assert passed is not None
    assert passed.seconds > 0.0
    assert math.isfinite(passed.sums.loss)
    assert passed.sums.weight == 1
    monkeypatch.setattr(Deep, "scale", 1e39)
    clients = fit(1.5)
    assert clients.pass_memory is not None
    assert clients.passed is None


def test_the_example_of_an_earlier_check_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointed_clients, "WORKING_FACTOR", 1e9)
    clients = fit(1.5)
    assert clients.passed is not None
    monkeypatch.setattr(checkpointed_clients, "WORKING_FACTOR", 1.0)  # now a plain pass fits
    clients.fit(context_below(1.5))
    assert clients.passed is None


def test_a_model_far_below_the_limit_leaves_the_heap_as_it_is(
    mallopt: list[tuple[int, int]],
) -> None:
    fit(100.0)
    assert mallopt == []


@pytest.mark.parametrize(("heap_gaps", "last"), [(0.22, FAST), (1e9, COMPACT)])
def test_where_nothing_is_dropped_blocks_come_from_the_heap_if_its_gaps_fit(
    mallopt: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    heap_gaps: float,
    last: list[tuple[int, int]],
) -> None:
    monkeypatch.setattr(checkpointed_clients, "WORKING_FACTOR", 1e9)  # so a pass is measured
    monkeypatch.setattr(pass_memory, "HEAP_GAPS", heap_gaps)
    fit(1.5)
    assert mallopt[-len(last) :] == last


def test_room_is_left_for_a_frozen_part_that_is_read_from_its_file_in_each_pass() -> None:
    """The kernel may drop its pages, so that no limit counts them."""
    context = context_below(1.5)
    context.image.frozen_file_bytes = resident_bytes()  # more than the limit leaves
    clients = CheckpointedClients(context.image)
    clients.fit(context)  # and is not refused: with what there is, it works
    extents = {*choice_of(context.image.model).values()}
    assert extents == {Recomputed.ALL}
    plain = context_below(1.5)
    CheckpointedClients(plain.image).fit(plain)
    assert not is_on(plain.image.model)


BLOCKS, MIB = range(10), 1 << 20


@pytest.mark.parametrize(
    ("room_mib", "expected"),
    [
        (1000 + 1220, {}),  # 1,000 MiB of activations and their gaps fit
        (1000 + 1219, {0: Recomputed.CHEAP}),
        (1000 + 920, dict.fromkeys(BLOCKS, Recomputed.CHEAP)),  # of 600 MiB the heap uses half
        (1000 + 919, dict.fromkeys(BLOCKS[:8], Recomputed.CHEAP) | {0: Recomputed.ALL}),
        (
            1000 + 650,  # four of ten blocks run again, and none would without the heap
            dict.fromkeys(BLOCKS, Recomputed.CHEAP) | dict.fromkeys(BLOCKS[:4], Recomputed.ALL),
        ),
        (1000 + 600, None),  # five would
        (1000 + 210, None),
    ],
)
def test_where_the_gaps_of_the_heap_do_not_fit_more_is_computed_again(
    room_mib: int, expected: dict[int, Recomputed] | None
) -> None:
    measured = PassMemory(
        rest_bytes=1000 * MIB,
        inner_bytes=dict.fromkeys(BLOCKS, 100 * MIB),
        cheap_bytes=dict.fromkeys(BLOCKS, 60 * MIB),
        seconds=dict.fromkeys(BLOCKS, 1.0),
        order=tuple(reversed(BLOCKS)),
        stretches=(Stretch(peak_bytes=1000 * MIB, num_done=0),),
    )
    found = checkpointed_clients._choice_in_heap(measured, float(room_mib * MIB))
    nothing = dict.fromkeys(BLOCKS, Recomputed.NOTHING)
    assert found == (None if expected is None else nothing | expected)
