"""The sparse mask graph of a large cohort: its edges, its size, and its probabilities of failure.

In a complete graph each device adds n - 1 masks. A graph with k neighbours each, where k grows like
log n, is as good except for failures as rare as required (Bell et al., "Secure Single-Server
Aggregation with (Poly)Logarithmic Overhead", CCS 2020, section 3). The devices form a circle in an
order drawn from a public seed; the neighbours of each are the k/2 before and the k/2 after it
(Harary's graph on a random permutation). Of n devices at most C = ceil(corrupted n) collude with
the server and at most D = ceil(dropout n) drop out, independently of the seed. The failures are:

insecure
    Some device has so many corrupted neighbours that they open both or the wrong one of its
    secrets. Semi-honest: t of them hold t shares. Active: a malicious server may request the one
    share from some honest neighbours and the other share from the rest, and corrupted neighbours
    give both; with X corrupted it gets k + X shares and needs 2t. X is hypergeometric
    (n - 1, C, k); the probabilities of all n devices are summed.
disconnected
    Without the corrupted and the dropped devices the graph falls apart, and the server learns the
    sums of its parts. On the circle that takes two disjoint runs of k/2 missing devices; the
    probabilities of all pairs of runs are summed.
unrecoverable
    Some device has fewer than t surviving neighbours, its secret cannot be recovered, and the round
    is aborted. The number of dropped neighbours is hypergeometric (n - 1, D, k) for a survivor and
    (n - 1, D - 1, k) for a dropped device; the probabilities of all n devices are summed.

The first two must each be at most 2^-(sigma + 1), together 2^-sigma; the third at most 2^-eta. All
counts are exact integers.

Whoever chooses the seed can try many. The seed is the session's digest, which depends on the fresh
keys of all members: N tries of a malicious server (for example with new keys for its own devices)
take log2 N off sigma. Sparse graphs in active mode therefore deserve ``security_bits`` above 40, or
a cohort of at most 64 members, whose graph is complete.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from headwater.common.errors import NoSuchGraph, ThresholdTooHigh, ThresholdTooLow
from headwater.common.secagg.shamir import MAX_HOLDERS

SECURITY_BITS = 40
CORRECTNESS_BITS = 30

Mode = Literal["semi-honest", "active"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSize:
    """k neighbours for each device; t of their shares recover its secret."""

    num_neighbours: int
    threshold: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureBounds:
    """Upper bounds of the failure probabilities, as log2 (-inf: the failure is impossible)."""

    insecure_bits: float
    disconnected_bits: float
    unrecoverable_bits: float


def ceil_fraction(fraction: float, total: int) -> int:
    """Return the least integer that is at least ``fraction`` of ``total``.

    The fraction is taken as the decimal number that it prints as, so no float rounding enters: 0.07
    of 100 is 7, though the float product is 7.000000000000001. Every count that follows from a
    fraction of corrupted, dropped or surviving members comes from here, on both sides.
    """
    return math.ceil(_decimal(fraction) * total)


@functools.lru_cache(maxsize=64)
def _decimal(fraction: float) -> Fraction:
    return Fraction(str(fraction))


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

    Because t is an integer the bounds are a saw-tooth in k, and a single k may meet them by chance:
    of 1,000 devices, a third corrupted and a tenth dropped in active mode, k = 244 meets them and
    k = 246 does not. A k is accepted if the next even one meets the bounds too.

    Raises:
        NoSuchGraph: no k < num_devices with k <= max_neighbours, the most holders that a secret can
            have, meets them.
        ValueError: fewer than two devices, or fractions that are not in 0..1.
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
        f"no sparse graph of {num_devices} devices with at most {max_neighbours} neighbours "
        f"tolerates {corrupted:.1%} corrupted and {dropout:.1%} dropped out in {mode} mode"
    )


def failure_bounds(
    size: GraphSize, *, num_devices: int, corrupted: float, dropout: float, mode: Mode
) -> FailureBounds:
    """Return the failure bounds of a (k, t) under the caller's own assumptions.

    Raises:
        ValueError: as ``graph_size``, or not 1 <= t <= k < num_devices.
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
        ThresholdTooLow: secrets would be opened, or the graph would fall apart, too often; or
            there is no graph of this k and t.
        ThresholdTooHigh: the round would be aborted too often.
    """
    sizes = (
        f"{size.threshold} shares of {size.num_neighbours} neighbours among {num_devices} devices"
    )
    try:
        bounds = failure_bounds(
            size, num_devices=num_devices, corrupted=corrupted, dropout=dropout, mode=mode
        )
    except ValueError as error:
        raise ThresholdTooLow(f"{sizes}: there is no such graph") from error
    assumed = f"with {corrupted:.1%} corrupted and {dropout:.1%} dropped out in {mode} mode"
    for failure, bits in (
        ("open a device's secret", bounds.insecure_bits),
        ("split the graph into parts", bounds.disconnected_bits),
    ):
        if bits > -(security_bits + 1):
            raise ThresholdTooLow(
                f"{sizes} {failure} with a probability of up to 2^{bits:.1f}, {assumed}; at most "
                f"2^-{security_bits + 1} was expected"
            )
    if bounds.unrecoverable_bits > -correctness_bits:
        raise ThresholdTooHigh(
            f"{sizes} fail to open the sum with a probability of up to "
            f"2^{bounds.unrecoverable_bits:.1f}, {assumed}; at most 2^-{correctness_bits} was "
            "expected"
        )


def neighbours(
    names: Sequence[str], *, num_neighbours: int, seed: bytes
) -> dict[str, tuple[str, ...]]:
    """Return each device's neighbours, sorted; every process with the same names and seed agrees.

    The order of ``names`` does not matter: the circle is ordered by SHA-256(seed, name).
    ``num_neighbours`` >= len(names) - 1 gives the complete graph.

    Raises:
        ValueError: a name twice; or a ``num_neighbours`` that is odd, or below 2, in a graph that
            is not complete.
    """
    if len(set(names)) != len(names):
        raise ValueError("a name is twice in the graph")
    circle = sorted(names, key=lambda name: hashlib.sha256(seed + name.encode()).digest())
    half, is_odd = divmod(num_neighbours, 2)
    if num_neighbours >= len(circle) - 1:
        return {name: tuple(sorted(set(names) - {name})) for name in sorted(names)}
    if is_odd or half < 1:
        raise ValueError(f"{num_neighbours} neighbours cannot be split evenly between both sides")
    offsets = [offset for offset in range(-half, half + 1) if offset]
    return {
        name: tuple(sorted(circle[(at + offset) % len(circle)] for offset in offsets))
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
                f"{num_devices} devices, fractions of {corrupted} corrupted and {dropout} dropped"
            )
        return cls(
            n=num_devices,
            num_corrupted=min(ceil_fraction(corrupted, num_devices), num_devices - 1),
            num_dropped=min(ceil_fraction(dropout, num_devices), num_devices - 1),
            is_active=mode == "active",
        )

    def insecure(self, k: int, t: int) -> float:
        needed = 2 * t - k if self.is_active else t
        ways = sum(w for i, w in _ways_down(self.n - 1, self.num_corrupted, k) if i >= needed)
        return _log2_ratio(self.n * ways, math.comb(self.n - 1, k))

    def least_threshold(self, k: int, bits: int) -> int:
        """Return the least t for which ``insecure`` is at most -bits; it may be more than k."""
        allowed = math.comb(self.n - 1, k)
        tail = 0
        least = 0  # the least number of corrupted neighbours that breaks a secret
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
        # For a device that dropped out, one dropped device fewer is among the others.
        ways = (self.n - self.num_dropped) * self._too_few(k, t, self.num_dropped)
        if self.num_dropped:
            ways += self.num_dropped * self._too_few(k, t, self.num_dropped - 1)
        return _log2_ratio(ways, math.comb(self.n - 1, k))

    def _too_few(self, k: int, t: int, num_dropped: int) -> int:
        """Count the neighbourhoods in which fewer than t devices survive."""
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
