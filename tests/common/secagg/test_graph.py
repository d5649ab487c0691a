"""Sparse graphs: sizes of the specification, and failure bounds against counting every case."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import NoSuchGraph, ThresholdTooHigh, ThresholdTooLow
from headwater.common.secagg.graph import (
    FailureBounds,
    GraphSize,
    Mode,
    ceil_fraction,
    check_graph_size,
    failure_bounds,
    graph_size,
    neighbours,
)
from headwater.common.secagg.shamir import MAX_HOLDERS

SEED = bytes(range(32))
MODES: tuple[Mode, ...] = ("semi-honest", "active")

# corrupted, dropout: (k, t semi-honest, k, t active) for n = 100, 200, 1000; sigma 40, eta 30.
SIZES = {
    (0.05, 0.05): ((12, 6, 16, 11), (22, 11, 32, 22), (34, 18, 62, 43)),
    (0.1, 0.1): ((22, 11, 32, 22), (36, 19, 60, 41), (52, 28, 114, 78)),
    (0.2, 0.1): ((32, 21, 42, 32), (50, 31, 78, 58), (76, 47, 162, 118)),
    (0.33, 0.1): ((42, 32, 54, 44), (68, 48, 98, 78), (114, 78, 248, 192)),
    (0.1, 0.3): ((36, 11, 72, 42), (60, 21, 140, 81), (102, 39, 462, 273)),
}
CASES = [
    (n, corrupted, dropout, mode, GraphSize(num_neighbours=k, threshold=t))
    for (corrupted, dropout), rows in SIZES.items()
    for n, row in zip((100, 200, 1000), rows, strict=True)
    for mode, k, t in zip(MODES, row[::2], row[1::2], strict=True)
]


@pytest.mark.parametrize(("n", "corrupted", "dropout", "mode", "size"), CASES)
def test_sizes_are_those_of_the_specification(
    n: int, corrupted: float, dropout: float, mode: Mode, size: GraphSize
) -> None:
    found = graph_size(n, corrupted=corrupted, dropout=dropout, mode=mode, max_neighbours=n)
    assert found == size


@pytest.mark.parametrize(("n", "corrupted", "dropout", "mode", "size"), CASES)
def test_the_check_accepts_these_sizes_and_refuses_smaller_ones(
    n: int, corrupted: float, dropout: float, mode: Mode, size: GraphSize
) -> None:
    def check(k: int, t: int) -> None:
        check_graph_size(
            GraphSize(num_neighbours=k, threshold=t),
            num_devices=n,
            corrupted=corrupted,
            dropout=dropout,
            mode=mode,
        )

    k, t = size.num_neighbours, size.threshold
    check(k, t)
    with pytest.raises(ThresholdTooLow, match="open a device's secret"):
        check(k, t - 1)
    with pytest.raises(ThresholdTooHigh, match="fail to open the sum"):
        check(k, k)
    with pytest.raises((ThresholdTooLow, ThresholdTooHigh)):
        # The least t of a smaller graph is too high for its dropouts, and every lower one too low.
        check(k - 2, graph_least_threshold(k - 2, n=n, corrupted=corrupted, mode=mode))


def graph_least_threshold(k: int, *, n: int, corrupted: float, mode: Mode) -> int:
    return next(
        t
        for t in range(k // 2, k + 1)
        if failure_bounds(
            GraphSize(num_neighbours=k, threshold=t),
            num_devices=n,
            corrupted=corrupted,
            dropout=0,
            mode=mode,
        ).insecure_bits
        <= -41
    )


def probability_of_too_many(n: int, marked: int, k: int, t: float) -> Fraction:
    """Count every choice of marked devices among the n - 1 others of one that has k neighbours."""
    choices = list(itertools.combinations(range(n - 1), marked))
    return Fraction(sum(sum(i < k for i in choice) >= t for choice in choices), len(choices))


def log2(value: Fraction) -> float:
    return math.log2(value) if value else -math.inf


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("k", "t"), [(2, 1), (4, 2), (4, 3), (6, 4), (6, 6)])
@pytest.mark.parametrize(("corrupted", "dropout"), [(0.0, 0.0), (0.2, 0.3), (0.4, 0.2), (0.3, 0.6)])
def test_bounds_are_those_of_counting_every_case(
    mode: Mode, k: int, t: int, corrupted: float, dropout: float
) -> None:
    n = 10
    num_corrupted, num_dropped = round(corrupted * n), round(dropout * n)
    found = failure_bounds(
        GraphSize(num_neighbours=k, threshold=t),
        num_devices=n,
        corrupted=corrupted,
        dropout=dropout,
        mode=mode,
    )
    needed = 2 * t - k if mode == "active" else t
    insecure = n * probability_of_too_many(n, num_corrupted, k, needed)
    too_few = (n - num_dropped) * probability_of_too_many(n, num_dropped, k, k - t + 1)
    if num_dropped:
        too_few += num_dropped * probability_of_too_many(n, num_dropped - 1, k, k - t + 1)
    assert found.insecure_bits == pytest.approx(log2(insecure), abs=1e-9)
    assert found.unrecoverable_bits == pytest.approx(log2(too_few), abs=1e-9)


def is_connected(graph: dict[str, tuple[str, ...]], left: set[str]) -> bool:
    reached, frontier = set[str](), set(sorted(left)[:1])
    while frontier:
        reached |= frontier
        frontier = {peer for name in frontier for peer in graph[name]} & left - reached
    return reached == left


@pytest.mark.parametrize(
    ("n", "k", "missing"), [(9, 2, 2), (9, 4, 4), (10, 4, 5), (11, 6, 6), (11, 4, 3)]
)
def test_the_graph_falls_apart_no_more_often_than_the_bound_says(
    n: int, k: int, missing: int
) -> None:
    names = [f"d{i}" for i in range(n)]
    graph = neighbours(names, num_neighbours=k, seed=SEED)
    choices = [set(c) for c in itertools.combinations(names, missing)]
    apart = Fraction(sum(not is_connected(graph, set(names) - c) for c in choices), len(choices))
    bound = failure_bounds(
        GraphSize(num_neighbours=k, threshold=1),
        num_devices=n,
        corrupted=missing / n,
        dropout=0.0,
        mode="semi-honest",
    ).disconnected_bits
    assert log2(apart) <= bound + 1e-9
    assert (apart == 0) == (bound == -math.inf)


def test_failures_are_impossible_without_corruption_and_dropout() -> None:
    found = failure_bounds(
        GraphSize(num_neighbours=4, threshold=1),
        num_devices=100,
        corrupted=0.0,
        dropout=0.0,
        mode="semi-honest",
    )
    assert found == FailureBounds(
        insecure_bits=-math.inf, disconnected_bits=-math.inf, unrecoverable_bits=-math.inf
    )


def test_a_graph_never_has_more_neighbours_than_a_secret_has_holders() -> None:
    with pytest.raises(NoSuchGraph, match=f"at most {MAX_HOLDERS} neighbours"):
        graph_size(1000, corrupted=0.1, dropout=0.3, mode="active")  # 462 neighbours


@pytest.mark.parametrize("mode", MODES)
def test_no_graph_tolerates_that_all_devices_are_missing(mode: Mode) -> None:
    with pytest.raises(NoSuchGraph, match=mode):
        graph_size(100, corrupted=0.5, dropout=0.6, mode=mode)


@given(st.integers(0, 1000), st.integers(0, 10**6))
def test_a_fraction_of_a_count_is_rounded_up_exactly(thousandths: int, count: int) -> None:
    assert ceil_fraction(thousandths / 1000, count) == -(-thousandths * count // 1000)


def test_a_fraction_of_the_devices_is_rounded_up_to_a_whole_device() -> None:
    # A twentieth of 130 is 6.5, taken as 7; a hundredth of 700 is 7, not 8.
    odd = failure_bounds(
        GraphSize(num_neighbours=20, threshold=7),
        num_devices=130,
        corrupted=0.05,
        dropout=0.0,
        mode="semi-honest",
    )
    assert odd.insecure_bits == pytest.approx(
        math.log2(130 * math.comb(20, 7)) - math.log2(math.comb(129, 7))
    )
    even = failure_bounds(
        GraphSize(num_neighbours=20, threshold=8),
        num_devices=700,
        corrupted=0.01,
        dropout=0.0,
        mode="semi-honest",
    )
    assert even.insecure_bits == -math.inf


@pytest.mark.parametrize("fraction", [-0.1, 1.1, math.nan])
def test_a_fraction_outside_0_to_1_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="fractions"):
        graph_size(100, corrupted=fraction, dropout=0.1, mode="active")
    with pytest.raises(ValueError, match="fractions"):
        graph_size(100, corrupted=0.1, dropout=fraction, mode="active")


@pytest.mark.parametrize(("k", "t"), [(0, 0), (4, 0), (4, 5), (100, 60), (-2, -2)])
def test_a_k_and_t_that_no_graph_has_are_refused(k: int, t: int) -> None:
    with pytest.raises(ThresholdTooLow, match="no such graph"):
        check_graph_size(
            GraphSize(num_neighbours=k, threshold=t),
            num_devices=100,
            corrupted=0.1,
            dropout=0.1,
            mode="active",
        )


def test_a_graph_that_may_fall_apart_is_refused() -> None:
    # 40 missing of 100 devices leave parts between runs of two missing devices.
    with pytest.raises(ThresholdTooLow, match="into parts"):
        check_graph_size(
            GraphSize(num_neighbours=4, threshold=1),
            num_devices=100,
            corrupted=0.0,
            dropout=0.4,
            mode="semi-honest",
        )


NAMES = st.sets(st.text("abcdef", min_size=1, max_size=4), min_size=3, max_size=30)


@given(NAMES, st.integers(1, 15), st.binary(max_size=32))
def test_each_device_has_k_neighbours_and_the_relation_is_mutual(
    names: set[str], half: int, seed: bytes
) -> None:
    graph = neighbours(sorted(names), num_neighbours=2 * half, seed=seed)
    assert set(graph) == names
    for name, peers in graph.items():
        assert len(peers) == len(set(peers)) == min(2 * half, len(names) - 1)
        assert name not in peers
        assert list(peers) == sorted(peers)
        assert all(name in graph[peer] for peer in peers)
    assert neighbours(sorted(names, reverse=True), num_neighbours=2 * half, seed=seed) == graph


def test_the_seed_decides_the_neighbours() -> None:
    names = [f"d{i}" for i in range(100)]
    graphs = [neighbours(names, num_neighbours=10, seed=bytes([i])) for i in range(200)]
    together = sum("d1" in graph["d0"] for graph in graphs)
    # Each seed makes them neighbours with probability 10/99: six standard deviations.
    expected = 200 * 10 / 99
    assert abs(together - expected) < 6 * math.sqrt(expected * 89 / 99)
    assert len({graph["d0"] for graph in graphs}) > 190


def test_n_minus_1_neighbours_are_all_other_devices() -> None:
    names = ["a", "b", "c", "d"]
    for k in (3, 4, 7):
        graph = neighbours(names, num_neighbours=k, seed=SEED)
        assert graph["b"] == ("a", "c", "d")


@pytest.mark.parametrize("k", [0, 1, 3, -2])
def test_an_odd_number_of_neighbours_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match="both sides"):
        neighbours([f"d{i}" for i in range(10)], num_neighbours=k, seed=SEED)


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        neighbours(["a", "b", "a"], num_neighbours=2, seed=SEED)
