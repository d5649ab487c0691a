"""The law with the device's last word: however a window was cut short or smaller, its sum is exact.

Memory that shrinks and grows at will, activations computed twice, an owner who gives less, a pace
that is not the foreseen one: what is sent is the sum over a beginning of the window, and weighs
what that was summed over.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from headwater.client.device.interfaces import TimeShare
from headwater.client.features import train_round
from headwater.client.memory.activation_checkpointing import (
    Recomputed,
    is_on,
    switch_off,
    switch_on,
)
from headwater.client.training.context import TrainingContext
from headwater.client.training.sampler import SamplerPosition, window
from headwater.common.errors import OutOfMemory
from headwater.common.messages import Plan
from headwater.common.task import Task
from tests import reference
from tests.laws.architectures import ARCHITECTURES, NUM_EXAMPLES
from tests.training_contexts import FakeMemory, training_context

RELATIVE = 1e-6


def place_of(task: Task) -> TrainingContext:
    place = training_context(task, TensorDataset(torch.zeros(1)))
    return replace(place, examples=task.train_examples(data=None, part=0, num_parts=1))


def plan_of(quota: int, size: int, finish_seconds: float | None = None) -> Plan:
    return Plan(
        round=0,
        run_seed=0,
        model_version=0,
        quota=quota,
        micro_batch_size=size,
        share=1.0,
        finish_seconds=finish_seconds,
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@given(
    quota=st.integers(1, NUM_EXAMPLES),
    size=st.integers(1, 17),
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=20),
    share=st.floats(0.05, 1.0),
    checkpointed_bytes=st.none() | st.floats(0.5, 12.0),
    # An example takes a second: from a fifth below the quota to a fifth above it.
    finish=st.none() | st.floats(1.0, 1.5 * NUM_EXAMPLES),
)
@settings(max_examples=settings().max_examples // 2)
def test_what_is_sent_is_the_gradient_of_a_beginning_of_the_window(
    architecture: str,
    quota: int,
    size: int,
    sizes: list[int],
    share: float,
    checkpointed_bytes: float | None,
    finish: float | None,
) -> None:
    task = ARCHITECTURES[architecture]
    memory = FakeMemory(lambda n: 1000 + 10 * sizes[min(n, len(sizes) - 1)])
    place = replace(
        place_of(task),
        memory=memory,
        checkpointed_bytes=checkpointed_bytes,
        time_share=lambda: TimeShare(share=share, reason="busy"),
    )
    asked = plan_of(quota, size, finish)
    part = window(
        SamplerPosition(),
        quota=quota,
        num_more=asked.max_examples - quota,
        run_seed=0,
        name="pi",
        num_examples=NUM_EXAMPLES,
    )
    try:
        update = train_round(asked, part, place)
    except OutOfMemory:
        assert 0 in sizes
        return
    taken = part.positions[: update.report.num_examples]
    mean_P = reference.mean_gradient(task, place.image.model, [(place.examples, taken)])
    exact_P = mean_P * update.report.weight
    gap = float((update.values_P.double() - exact_P).norm())
    assert gap <= RELATIVE * float(exact_P.norm())
    assert update.report.weight == sum(step.weight for step in update.report.steps)
    assert update.report.num_examples <= asked.max_examples


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@given(
    quota=st.integers(1, NUM_EXAMPLES),
    size=st.integers(1, 17),
    extents=st.lists(st.sampled_from(Recomputed), max_size=3),
)
@settings(max_examples=settings().max_examples // 5)
def test_activations_computed_twice_change_no_bit(
    architecture: str, quota: int, size: int, extents: list[Recomputed]
) -> None:
    place = place_of(ARCHITECTURES[architecture])
    part = window(SamplerPosition(), quota=quota, run_seed=0, name="pi", num_examples=NUM_EXAMPLES)
    kept_P = train_round(plan_of(quota, size), part, place).values_P.clone()
    assert switch_on(place.image.model, dict(enumerate(extents)))
    is_any_on = is_on(place.image.model)
    try:
        update = train_round(plan_of(quota, size), part, place)
    finally:
        switch_off(place.image.model)
    assert update.report.is_checkpointed == is_any_on
    assert torch.equal(update.values_P, kept_P)
