"""Robust rules against plain definitions, and their independence of order and of claimed counts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headwater.common.errors import StateError, TooFewClients
from headwater.common.model.layout import ModelLayout
from headwater.common.model.parameters import ModelImage
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.aggregation.norm_watch import scaled_to
from headwater.server.robust import robust_rules
from headwater.server.robust.held_updates import HeldUpdates
from headwater.server.robust.robust_rules import Rule, num_attackers, num_needed

ROBUST: tuple[Rule, ...] = ("clipped", "trimmed-mean", "median", "krum")
NUM_VALUES = 6


def layout() -> ModelLayout:
    return ModelImage(torch.nn.Linear(NUM_VALUES - 1, 1)).layout


def updates(number: int, seed: int = 0) -> tuple[NDArray[np.float32], list[int]]:
    """Return updates around a common gradient, with different weights."""
    draw = np.random.default_rng(seed)
    weights = draw.integers(1, 50, number)
    means = draw.normal(1.0, 0.1, (number, NUM_VALUES))
    return (means * weights[:, None]).astype(np.float32), weights.tolist()


def combine(
    rule: Rule, rows: NDArray[np.float32], weights: list[int], share: float = 0.2
) -> NDArray[np.float32]:
    held = HeldUpdates(rule, num_parameters=NUM_VALUES, share=share, ram_bytes=1 << 20, folder=None)
    total = CohortSum(layout())
    total.open(num_clients=len(weights), planned_weight=sum(weights))
    held.open(num_clients=len(weights))
    for row, weight in zip(rows, weights, strict=True):
        held.hold(torch.from_numpy(row), weight)
    assert held.weight == sum(weights)
    return held.mean(total).numpy().copy()


def means_of(rows: NDArray[np.float32], weights: list[int]) -> NDArray[np.float64]:
    return rows / np.array(weights, dtype=np.float64)[:, None]


def test_the_trimmed_mean_and_the_median_are_those_of_their_definitions() -> None:
    rows, weights = updates(10)
    ordered = np.sort(means_of(rows, weights), axis=0)
    assert np.allclose(combine("trimmed-mean", rows, weights), ordered[2:8].mean(axis=0))
    assert np.allclose(combine("median", rows, weights), ordered[4:6].mean(axis=0))


def test_krum_returns_the_update_with_the_nearest_neighbours() -> None:
    rows, weights = updates(9)
    means = means_of(rows, weights)
    scores = []
    for at in range(9):
        distances = sorted(float(((means[at] - other) ** 2).sum()) for other in means)[1:]
        scores.append(sum(distances[: 9 - 2 - 2]))
    expected = means[int(np.argmin(scores))]
    assert np.allclose(combine("krum", rows, weights), expected, rtol=1e-6)


def test_clipped_reduces_norms_to_the_median_and_weighs_as_the_sum_does() -> None:
    rows, weights = updates(5)
    rows[0] *= 1e20
    means = means_of(rows, weights)
    norms = np.linalg.norm(means, axis=1)
    scaled = rows * np.minimum(1.0, np.median(norms) / norms)[:, None]
    assert np.allclose(combine("clipped", rows, weights), scaled.sum(axis=0) / sum(weights))


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("lie", [3e38, -1e30, 0.0])
def test_a_fifth_of_false_updates_moves_no_coordinate_far(rule: Rule, lie: float) -> None:
    rows, weights = updates(10)
    rows[:2] = lie
    assert np.abs(combine(rule, rows, weights) - 1.0).max() < 1.0


@pytest.mark.parametrize("rule", ROBUST)
@given(seed=st.integers(0, 1000), order=st.permutations(range(7)))
def test_the_order_of_arrival_changes_no_bit(rule: Rule, seed: int, order: list[int]) -> None:
    rows, weights = updates(7, seed)
    shuffled = combine(rule, rows[order], [weights[at] for at in order])
    assert shuffled.tobytes() == combine(rule, rows, weights).tobytes()


@pytest.mark.parametrize("rule", ["trimmed-mean", "median", "krum"])
def test_a_claimed_weight_buys_no_votes(rule: Rule) -> None:
    rows, weights = updates(7)
    scaled, claimed = rows.copy(), list(weights)
    scaled[3], claimed[3] = rows[3] * 1024, weights[3] * 1024
    assert np.allclose(combine(rule, scaled, claimed), combine(rule, rows, weights), rtol=1e-6)


@pytest.mark.parametrize("rule", ROBUST)
def test_chunks_of_coordinates_change_no_more_than_rounding(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, weights = updates(9)
    whole = combine(rule, rows, weights)
    monkeypatch.setattr(robust_rules, "CHUNK_BYTES", 9 * 8 * 2)  # two coordinates at a time
    assert np.allclose(combine(rule, rows, weights), whole, rtol=1e-6)


def test_vectors_beyond_the_memory_limit_are_held_in_a_file() -> None:
    rows, weights = updates(9)
    held = HeldUpdates("krum", num_parameters=NUM_VALUES, share=0.2, ram_bytes=0, folder=None)
    held.open(num_clients=9)
    assert isinstance(held._rows, np.memmap)
    for row, weight in zip(rows, weights, strict=True):
        held.hold(torch.from_numpy(row), weight)
    found = held.mean(CohortSum(layout())).numpy()
    assert found.tobytes() == combine("krum", rows, weights).tobytes()


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    held = HeldUpdates("median", num_parameters=NUM_VALUES, share=0.2, ram_bytes=0, folder=None)
    with pytest.raises(StateError, match="No space left"):
        held.open(num_clients=9)


@pytest.mark.parametrize(
    ("rule", "number", "needed"),
    [("median", 1, 1), ("clipped", 1, 1), ("trimmed-mean", 2, 3), ("krum", 4, 5), ("krum", 10, 7)],
)
def test_a_rule_needs_enough_updates_for_its_share_of_false_ones(
    rule: Rule, number: int, needed: int
) -> None:
    assert num_needed(rule, number, share=0.2) == needed
    rows, weights = updates(number)
    if number < needed:
        with pytest.raises(TooFewClients):
            combine(rule, rows, weights)
    else:
        combine(rule, rows, weights)


def test_the_share_is_rounded_up() -> None:
    assert [num_attackers(number, share=0.2) for number in (1, 5, 6, 10, 15)] == [1, 1, 2, 2, 3]


@given(st.floats(1e-30, 3e38), st.floats(1e-20, 1e10))
def test_scaling_leaves_the_norm_at_the_limit(size: float, limit: float) -> None:
    values_P = torch.full((4,), size)
    norm = 2 * float(values_P[0])
    found = scaled_to(values_P, norm=norm, limit=limit)
    expected = min(norm, limit)
    assert float(found.double().norm()) == pytest.approx(expected, rel=1e-5)


def test_no_rule_changes_the_updates_of_a_device() -> None:
    rows, weights = updates(5)
    before = rows.copy()
    for rule, _ in itertools.product(ROBUST, range(1)):
        combine(rule, rows, weights)
    assert np.array_equal(rows, before)
