"""Who shares a mask with whom in a large cohort: a sparse graph, and how sparse it may be.

(to be written out)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from common.shamir import MAX_HOLDERS

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
    """Return the smallest (k, t) that meets the bounds.

    Raises:
        NoSuchGraph: none does with k < num_devices and k <= max_neighbours.
    """
    raise NotImplementedError


def failure_bounds(
    size: GraphSize, *, num_devices: int, corrupted: float, dropout: float, mode: Mode
) -> FailureBounds:
    """Return what a device checks a server's (k, t) against, under its own assumptions."""
    raise NotImplementedError


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
        ThresholdTooLow: secrets would leak, or the graph fall apart, too often.
        ThresholdTooHigh: the sum could not be opened too often.
    """
    raise NotImplementedError


def neighbours(
    names: Sequence[str], *, num_neighbours: int, seed: bytes
) -> dict[str, tuple[str, ...]]:
    """Return each device's neighbours, sorted; the same for everybody who knows names and seed.

    The order of ``names`` does not matter. ``num_neighbours`` >= len(names) - 1 gives the complete
    graph.

    Raises:
        ValueError: a name twice, or an odd ``num_neighbours`` below len(names) - 1.
    """
    raise NotImplementedError
