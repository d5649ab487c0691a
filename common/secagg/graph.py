"""Who shares a mask with whom in a large cohort: a sparse graph, and how sparse it may be.

In a complete graph each device adds n - 1 masks. A graph of k neighbours each, k growing like the
logarithm of n, is as good but for failures as rare as wished (Bell et al., "Secure Single-Server
Aggregation with (Poly)Logarithmic Overhead", CCS 2020, section 3). The devices stand in a circle in
an order drawn from a public seed, and each has the k/2 before and the k/2 behind it as neighbours
(Harary's graph on a random permutation). Of n devices at most C = ceil(corrupted n) are in league
with the server and at most D = ceil(dropout n) drop out, independently of the seed. What can fail:

insecure
    Some device has so many corrupted neighbours that they open both or the wrong one of its
    secrets. Semi-honest: t of them hold t shares. Active: a lying server may ask some of the honest
    neighbours for the one share and some for the other, corrupted ones give both; with X corrupted
    it sees k + X shares and needs 2t. X is hypergeometric (n - 1, C, k); all n devices are summed.
disconnected
    Without the corrupted and the dropped the graph falls apart, and the server learns the sums of
    its parts. On the circle that takes two disjoint runs of k/2 missing devices; all pairs of runs
    are summed.
unrecoverable
    Some device has fewer than t surviving neighbours, its share stays closed, and the round is
    aborted. The dropped around a survivor are hypergeometric (n - 1, D, k), around one that dropped
    out (n - 1, D - 1, k); all n devices are summed.

The first two must each be at most 2^-(sigma + 1), together 2^-sigma; the third at most 2^-eta. All
of it is computed in integers, without rounding.

Who can choose the seed can try many. The seed is the session's digest, in which everybody's fresh
keys went: N tries of a lying server (with other keys for its own devices, say) take log2 N off
sigma. Sparse graphs in active mode therefore deserve ``security_bits`` above 40, or a cohort of at
most 64, whose graph is complete.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from headwater.common.errors import NoSuchGraph, ThresholdTooHigh, ThresholdTooLow
from headwater.common.secagg.shamir import MAX_HOLDERS

SECURITY_BITS = 40
CORRECTNESS_BITS = 30

Mode = Literal["semi-honest", "active"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSize:
    """k neighbours for each device, t of whose shares bring a secret back."""

    num_neighbours: int
    threshold: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureBounds:
    """Upper bounds of what can go wrong, as log2 of a probability (-inf: it cannot)."""

    insecure_bits: float
    disconnected_bits: float
    unrecoverable_bits: float


@functools.cache
def graph_size(
    num_devices: int,
    *,
    corrupted: float,
    dropout: float,
    mode: Mode,
    security_bits: int = SECURITY_BITS,
    correctness_bits: int = CORRECTNESS_BITS,
    max_neighbours: int = MAX_HOLDERS,
) -> GraphSize:
    """Return the smallest (k, t) that meets the bounds: the least even k, and its least t.

    As t is a whole number the bounds are a saw-tooth in k, and a single k may meet them by chance
    (244 of 1,000 do and 246 do not, with a third corrupted and a tenth dropped out in active mode).
    A k is taken if the next even one does as well.

    Raises:
        NoSuchGraph: none does with k < num_devices and k <= max_neighbours, the most holders that
            a secret can have.
        ValueError: fewer than two devices, or shares that are not in 0..1.
    """
    odds = _Odds.of(num_devices, corrupted=corrupted, dropout=dropout, mode=mode)

    def threshold(k: int) -> int | None:
        t = odds.least_threshold(k, security_bits + 1)
        is_secure = t <= k and odds.disconnected(k) <= -(security_bits + 1)
        return t if is_secure and odds.unrecoverable(k, t) <= -correctness_bits else None

    for k in range(2, min(num_devices, max_neighbours + 1), 2):
        t = threshold(k)
        if t is not None and (k + 2 >= num_devices or threshold(k + 2) is not None):
            return GraphSize(num_neighbours=k, threshold=t)
    raise NoSuchGraph(
        f"no sparse graph of {num_devices} devices and at most {max_neighbours} neighbours bears "
        f"{corrupted:.0%} corrupted and {dropout:.0%} dropped out in {mode} mode"
    )


def failure_bounds(
    size: GraphSize, *, num_devices: int, corrupted: float, dropout: float, mode: Mode
) -> FailureBounds:
    """Return what can go wrong with a (k, t), under the caller's own assumptions.

    Raises:
        ValueError: as ``graph_size``, or k and t with 1 <= t <= k < num_devices not holding.
    """
    odds = _Odds.of(num_devices, corrupted=corrupted, dropout=dropout, mode=mode)
    k, t = size.num_neighbours, size.threshold
    if not 1 <= t <= k < num_devices:
        raise ValueError(f"{t} shares of {k} neighbours among {num_devices} devices")
    return FailureBounds(
        insecure_bits=odds.insecure(k, t),
        disconnected_bits=odds.disconnected(k),
        unrecoverable_bits=odds.unrecoverable(k, t),
    )


def check_graph_size(
    size: GraphSize,
    *,
    num_devices: int,
    corrupted: float,
    dropout: float,
    mode: Mode,
    security_bits: int = SECURITY_BITS,
    correctness_bits: int = CORRECTNESS_BITS,
) -> None:
    """Refuse a (k, t) that does not meet the bounds under the caller's own assumptions.

    Raises:
        ThresholdTooLow: secrets would be opened, or the graph fall apart, too often; or k and t
            are no sizes of a graph at all.
        ThresholdTooHigh: the round would be aborted too often.
    """
    said = (
        f"{size.threshold} shares of {size.num_neighbours} neighbours among {num_devices} devices"
    )
    try:
        bounds = failure_bounds(
            size, num_devices=num_devices, corrupted=corrupted, dropout=dropout, mode=mode
        )
    except ValueError as error:
        raise ThresholdTooLow(f"{said}: no sizes of a graph") from error
    assumed = f"with {corrupted:.0%} corrupted and {dropout:.0%} dropped out in {mode} mode"
    for what, bits in (
        ("open somebody's secret", bounds.insecure_bits),
        ("leave the graph in parts", bounds.disconnected_bits),
    ):
        if bits > -(security_bits + 1):
            raise ThresholdTooLow(
                f"{said} {what} with a probability of up to 2^{bits:.1f}, {assumed}; at most "
                f"2^-{security_bits + 1} was expected"
            )
    if bounds.unrecoverable_bits > -correctness_bits:
        raise ThresholdTooHigh(
            f"{said} fail to open the sum with a probability of up to "
            f"2^{bounds.unrecoverable_bits:.1f}, {assumed}; at most 2^-{correctness_bits} was "
            "expected"
        )


def neighbours(
    names: Sequence[str], *, num_neighbours: int, seed: bytes
) -> dict[str, tuple[str, ...]]:
    """Return each device's neighbours, sorted; the same for everybody who knows names and seed.

    The order of ``names`` does not matter: devices stand in the order of SHA-256(seed, name).
    ``num_neighbours`` >= len(names) - 1 gives the complete graph.

    Raises:
        ValueError: a name twice; or a ``num_neighbours`` that is odd, or below 2, in a graph that
            is not complete.
    """
    if len(set(names)) != len(names):
        raise ValueError("a name stands twice in the graph")
    circle = sorted(names, key=lambda name: hashlib.sha256(seed + name.encode()).digest())
    half, is_odd = divmod(num_neighbours, 2)
    if num_neighbours >= len(circle) - 1:
        return {name: tuple(sorted(set(names) - {name})) for name in sorted(names)}
    if is_odd or half < 1:
        raise ValueError(f"{num_neighbours} neighbours do not stand evenly on both sides")
    near = [offset for offset in range(-half, half + 1) if offset]
    return {
        name: tuple(sorted(circle[(at + offset) % len(circle)] for offset in near))
        for at, name in sorted(enumerate(circle), key=lambda place: place[1])
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Odds:
    """The probabilities above, as log2, for n devices of which C are corrupted and D drop out."""

    n: int
    num_corrupted: int
    num_dropped: int
    is_active: bool

    @classmethod
    def of(cls, num_devices: int, *, corrupted: float, dropout: float, mode: Mode) -> _Odds:
        if num_devices < 2 or not 0 <= corrupted <= 1 or not 0 <= dropout <= 1:
            raise ValueError(
                f"{num_devices} devices with shares of {corrupted} corrupted and {dropout} dropped"
            )
        # Up, but not for a rounding error: 0.07 x 100 is 7.000000000000001.
        num_corrupted = math.ceil(corrupted * num_devices - 1e-6)
        num_dropped = math.ceil(dropout * num_devices - 1e-6)
        return cls(
            n=num_devices,
            num_corrupted=min(num_corrupted, num_devices - 1),
            num_dropped=min(num_dropped, num_devices - 1),
            is_active=mode == "active",
        )

    def insecure(self, k: int, t: int) -> float:
        most = 2 * t - k if self.is_active else t
        ways = sum(w for i, w in _ways_down(self.n - 1, self.num_corrupted, k) if i >= most)
        return _log2_ratio(self.n * ways, math.comb(self.n - 1, k))

    def least_threshold(self, k: int, bits: int) -> int:
        """Return the least t for which ``insecure`` is at most -bits; it may be more than k."""
        allowed = math.comb(self.n - 1, k)
        tail = 0
        least = 0  # of corrupted neighbours that may not be had
        for i, ways in _ways_down(self.n - 1, self.num_corrupted, k):
            tail += ways
            if (self.n * tail) << bits > allowed:
                least = i + 1
                break
        return max(-(-(k + least) // 2) if self.is_active else least, 1)

    def disconnected(self, k: int) -> float:
        num_missing = min(self.num_corrupted + self.num_dropped, self.n)
        in_runs = 2 * (k // 2)
        if k >= self.n - 1 or num_missing < in_runs:
            return -math.inf
        ways = math.comb(self.n, 2) * math.comb(self.n - in_runs, num_missing - in_runs)
        return _log2_ratio(ways, math.comb(self.n, num_missing))

    def unrecoverable(self, k: int, t: int) -> float:
        # A device that dropped out has one dropped device fewer around it.
        ways = (self.n - self.num_dropped) * self._too_few(k, t, self.num_dropped)
        if self.num_dropped:
            ways += self.num_dropped * self._too_few(k, t, self.num_dropped - 1)
        return _log2_ratio(ways, math.comb(self.n - 1, k))

    def _too_few(self, k: int, t: int, num_dropped: int) -> int:
        """Count the neighbourhoods in which so many dropped out that fewer than t are left."""
        return sum(w for i, w in _ways_down(self.n - 1, num_dropped, k) if k - i < t)


def _ways_down(population: int, marked: int, drawn: int) -> Iterator[tuple[int, int]]:
    """Yield (i, comb(marked, i) comb(population - marked, drawn - i)) from the largest i down."""
    i = min(marked, drawn)
    plain = population - marked
    ways = math.comb(marked, i) * math.comb(plain, drawn - i)
    while ways:
        yield i, ways
        ways = ways * i * (plain - drawn + i) // ((marked - i + 1) * (drawn - i + 1))
        i -= 1


def _log2_ratio(above: int, below: int) -> float:
    """Return log2(above / below) of integers far beyond float64, and -inf for 0."""
    return math.log2(above) - math.log2(below) if above else -math.inf
