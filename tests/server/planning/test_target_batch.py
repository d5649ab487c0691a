"""A round's target, in its three ways."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import CheckpointCorrupt
from headwater.common.settings import schema as settings
from headwater.server.planning.noise_scale import DECAY, RoundNoise
from headwater.server.planning.target_batch import (
    MAX_CHANGE,
    MIN_PER_CLIENT,
    BatchTotals,
    Target,
    described,
    evened,
    examples_for,
    following,
)


def plan(**changes: Any) -> settings.PlanSettings:
    return settings.PlanSettings.model_validate(changes)


def target(*, most: int = 1, **changes: Any) -> Target:
    return Target(plan(**changes), max_weight_per_example=most)


def of(num_examples: int, weight: float) -> BatchTotals:
    return BatchTotals(num_examples=num_examples, summed_weight=weight, sent_weight=weight)


def noise(scale: float) -> RoundNoise:
    return RoundNoise(variance=scale, squared_gradient=1.0, heterogeneity=0.0, measured_share=1.0)


def test_a_fixed_target_does_not_depend_on_earlier_batches() -> None:
    fixed = target(effective_batch_size=64)
    assert fixed.open(num_invited=1000) == 64
    fixed.commit(of(3, 9), noise(1e6))
    assert fixed.open(num_invited=1000) == 64
    assert fixed.by == "examples"


def test_where_k_is_set_there_is_no_target() -> None:
    assert target(accumulation_steps=2).by is None


def test_tokens_are_counted_in_the_unit_of_the_task_s_weight() -> None:
    unit = 2.0**-16
    tokens = Target(plan(tokens_per_update=1000), max_weight_per_example=2 << 16, weight_unit=unit)
    assert tokens.open(num_invited=3) == 500
    tokens.commit(of(16, 20 / unit), None)  # 1.25 an example
    assert tokens.open(num_invited=3) == 800


def test_tokens_are_divided_by_the_maximum_of_an_example_and_then_by_the_mean() -> None:
    tokens = target(tokens_per_update=1000, most=64)
    assert tokens.open(num_invited=3) == math.ceil(1000 / 64)
    tokens.commit(of(16, 400), None)  # 25 an example
    assert tokens.open(num_invited=3) == 40
    tokens.commit(of(40, 2000), None)  # 50 an example
    mean = (DECAY * 400 + 2000) / (DECAY * 16 + 40)
    assert tokens.open(num_invited=3) == math.ceil(1000 / mean)


@given(st.integers(1, 2**31), st.floats(1e-3, 1e6))
def test_the_examples_for_a_number_of_tokens_are_the_fewest_that_contain_them(
    tokens: int, weight: float
) -> None:
    found = examples_for(tokens, weight)
    assert found * weight >= tokens * (1 - 2.0**-50)
    assert found == 1 or (found - 1) * weight < tokens * (1 + 2.0**-50)


def test_a_target_follows_the_noise_scale_by_a_factor_of_two_a_round_at_most() -> None:
    followed = target(follow_noise_scale=True, effective_batch_size=100)
    seen = [followed.open(num_invited=4)]
    for scale in (1e6, 1e6, 1e6, 1e-6, 1e-6):
        followed.noise_scale = type(followed.noise_scale)()  # as if it were known from this round
        followed.commit(of(seen[-1], seen[-1]), noise(scale))
        seen.append(followed.open(num_invited=4))
    assert seen == [100, 200, 400, 800, 400, 200]


def test_a_target_that_follows_ends_at_the_noise_scale_over_the_weight_of_an_example() -> None:
    followed = target(follow_noise_scale=True, effective_batch_size=100, most=64)
    for _ in range(20):
        seen = followed.open(num_invited=4)
        followed.commit(of(seen, 25 * seen), noise(10_000.0))
    assert followed.open(num_invited=4) == 400


def test_with_dataset_weighting_the_noise_scale_is_in_the_weight_that_was_sent() -> None:
    followed = target(follow_noise_scale=True, effective_batch_size=100)
    for _ in range(20):
        seen = followed.open(num_invited=4)
        followed.commit(
            BatchTotals(num_examples=seen, summed_weight=seen, sent_weight=5 * seen), noise(1000.0)
        )
    assert followed.open(num_invited=4) == 200


def test_a_target_that_follows_leaves_each_client_enough_to_measure_the_noise_again() -> None:
    followed = target(follow_noise_scale=True, effective_batch_size=512)
    for _ in range(20):
        followed.commit(of(512, 512), noise(1.0))
    assert followed.open(num_invited=30) == 30 * MIN_PER_CLIENT
    assert followed.open(num_invited=3) <= 30 * MIN_PER_CLIENT


def test_a_target_stays_while_the_noise_scale_is_not_known() -> None:
    followed = target(follow_noise_scale=True, effective_batch_size=100)
    for unknown in (
        None,
        RoundNoise(variance=5.0, squared_gradient=-1.0, heterogeneity=0.0, measured_share=1.0),
    ):
        followed.commit(of(100, 100), unknown)
        assert followed.open(num_invited=4) == 100


@given(
    current=st.integers(1, 2**31),
    scale=st.none() | st.floats(5e-324, 1e308),
    weight=st.floats(1e-6, 1e6),
    most=st.integers(1, 2**31),
)
def test_the_next_target_is_near_the_last_and_within_its_bounds(
    current: int, scale: float | None, weight: float, most: int
) -> None:
    found = following(current, scale, weight_per_example=weight, most=most)
    assert 1 <= found <= most
    assert found <= MAX_CHANGE * current
    assert found >= min(math.floor(current / MAX_CHANGE), most)


@given(quota=st.integers(1, 5000), size=st.integers(1, 600))
def test_an_evened_cut_takes_no_more_memory_and_no_more_steps_than_two(
    quota: int, size: int
) -> None:
    (found,) = evened(np.array([quota]), np.array([size])).tolist()
    assert 1 <= found <= size
    steps, planned = math.ceil(quota / found), math.ceil(quota / size)
    assert steps <= max(planned, 2)
    assert steps >= min(quota, 2)
    # The first and the last of the sizes are apart by nearly half of the whole, or more.
    assert quota < 2 or quota - found >= (quota - 1) // 2


def test_only_a_followed_noise_scale_changes_the_cut() -> None:
    quotas, planned = np.array([8, 17]), np.array([8, 16])
    assert target().micro_batch_size(quotas, planned).tolist() == [8, 16]
    followed = target(follow_noise_scale=True)
    assert followed.micro_batch_size(quotas, planned).tolist() == [4, 9]


def test_a_restored_state_gives_the_targets_of_an_unbroken_run() -> None:
    one = target(follow_noise_scale=True, effective_batch_size=100, most=9)
    for round_number in range(5):
        one.commit(of(one.open(num_invited=2), 700 / 3), noise(300 / (round_number + 1)))
    other = target(follow_noise_scale=True, effective_batch_size=100, most=9)
    other.restore(json.loads(json.dumps(one.state())))
    for _ in range(5):
        assert other.open(num_invited=2) == one.open(num_invited=2)
        assert other.noise_scale == one.noise_scale
        assert other.weight_per_example == one.weight_per_example
        for kept in (one, other):
            kept.commit(of(50, 70), noise(1 / 3))


def test_an_empty_state_leaves_the_initial_target() -> None:
    fresh = target(follow_noise_scale=True)
    fresh.restore({})
    assert fresh.open(num_invited=1) == 512


def test_a_state_without_a_figure_is_corrupt_and_the_error_names_it() -> None:
    state = target().state()
    del state["variance"]
    with pytest.raises(CheckpointCorrupt, match="variance"):
        target().restore(state)


@pytest.mark.parametrize(
    ("changes", "most", "line"),
    [
        ({}, 1, "the planner shares out 512 examples per round"),
        (
            {"tokens_per_update": 524_288, "micro_batch_size": 4},
            2048,
            "524,288 tokens / (4 x 2,048) = 64 micro-batches in round 1",
        ),
        ({"tokens_per_update": 524_288}, 2048, "524,288 tokens / 2,048 = 256 examples in round 1"),
        ({"tokens_per_update": 1000}, 64, "1,000 tokens / 64 = 15.6 examples in round 1"),
        ({"tokens_per_update": 1000}, 1, "1,000 tokens / 1 = 1,000 examples"),
        (
            {"follow_noise_scale": True},
            1,
            "follows the gradient noise scale, from 512 examples per round to 65,536 at most",
        ),
    ],
)
def test_the_arithmetic_is_announced(changes: dict[str, Any], most: int, line: str) -> None:
    assert line in described(plan(**changes), max_weight_per_example=most)
