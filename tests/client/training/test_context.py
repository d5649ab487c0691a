"""What is computed again where memory falls short: by the measured pass, in the heap or not."""

from __future__ import annotations

import pytest

from headwater.client.memory.activation_checkpointing import Recomputed, choice_of, switch_on
from headwater.client.memory.pass_memory import PassMemory, Stretch
from headwater.client.training.context import TrainingContext
from headwater.common.system import heap
from tests.client.trainer.test_checkpointed_clients import Deep
from tests.training_contexts import FakeMemory, training_context

MIB = 1 << 20
GUARD_MIB = 64
MEASURED = PassMemory(
    rest_bytes=1000 * MIB,
    inner_bytes={0: 500 * MIB},
    cheap_bytes={0: 200 * MIB},
    seconds={0: 1.0},
    order=(0,),
    stretches=(Stretch(peak_bytes=1050 * MIB, num_done=0),),
)


def context_of(*, room_mib: int, each_mib: int) -> TrainingContext:
    """Return a context whose limit leaves this room above what is resident."""
    limit = (1000 + room_mib + GUARD_MIB) * MIB
    memory = FakeMemory(lambda _: limit, base=1000.0 * MIB, each=float(each_mib * MIB))
    task = Deep()
    data = task.train_examples(data=None, part=0, num_parts=1)
    context = training_context(task, data, memory=memory, pass_memory=MEASURED)
    switch_on(context.image.model, MEASURED.nothing)
    return context


@pytest.fixture
def in_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors come from the heap, as far as the client knows."""
    monkeypatch.setattr(heap, "_mallopt", lambda *_: None)
    monkeypatch.setattr(heap, "_keeps_freed_blocks", True)


@pytest.mark.usefixtures("in_heap")
def test_the_gaps_of_the_heap_do_not_count_against_what_is_computed_again() -> None:
    in_heap_mib = MEASURED.in_heap().peak_bytes(MEASURED.nothing) // MIB - 1000
    context = context_of(room_mib=100, each_mib=in_heap_mib)
    found = context.fitting_with_checkpointing(1.0)
    assert found is not None
    assert found >= 1
    assert choice_of(context.image.model) == {0: Recomputed.ALL}


def test_for_a_longer_example_as_much_is_computed_again_as_it_needs() -> None:
    context = context_of(room_mib=560, each_mib=550)  # 1.2 of that does not fit
    found = context.fitting_with_checkpointing(1.2, least=1.2)
    assert found is not None
    assert found >= 1
    assert choice_of(context.image.model) == {0: Recomputed.CHEAP}


def test_an_example_that_does_not_fit_with_all_computed_again_changes_nothing() -> None:
    context = context_of(room_mib=560, each_mib=550)
    assert context.fitting_with_checkpointing(12.0, least=12.0) == 0
    assert choice_of(context.image.model) == {0: Recomputed.NOTHING}
