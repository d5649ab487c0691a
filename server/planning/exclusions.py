"""Excludes clients that made a secure session fail from the following rounds.

A client is excluded for ten rounds the first time and for twice as many each further time. It
returns afterwards, because a broken device may have been repaired. ``server.secagg.blame`` decides
which clients are at fault.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from typing import Any

FIRST_ROUNDS = 10
MAX_DOUBLINGS = 16
MAX_REASON_CHARACTERS = 200  # limit of ``DescribeRequest.left_out``


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusion:
    """One client's exclusion: its last round (inclusive), how many there were, and the reason."""

    through_round: int
    times: int
    why: str


def exclude(
    known: Mapping[str, Exclusion], at_fault: Mapping[str, str], *, round_number: int
) -> dict[str, Exclusion]:
    """Return the exclusions after an attempt at a round; ``at_fault`` maps clients to reasons."""
    after = dict(known)
    for name, why in at_fault.items():
        times = after[name].times + 1 if name in after else 1
        rounds = FIRST_ROUNDS << min(times - 1, MAX_DOUBLINGS)
        after[name] = Exclusion(through_round=round_number + rounds, times=times, why=why)
    return after


def excluded_in(
    known: Mapping[str, Exclusion], names: Container[str], *, round_number: int
) -> dict[str, str]:
    """Return which of the clients ``names`` are excluded from a round, with the reasons."""
    return {
        name: f"until round {one.through_round + 1}, as {one.why}"[:MAX_REASON_CHARACTERS]
        for name, one in known.items()
        if name in names and round_number <= one.through_round
    }


def to_json(known: Mapping[str, Exclusion]) -> dict[str, dict[str, Any]]:
    """Return plain data for the checkpoint."""
    return {name: asdict(one) for name, one in known.items()}


def from_json(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Exclusion]:
    """Return the exclusions that ``to_json`` wrote."""
    return {name: Exclusion(**row) for name, row in rows.items()}
