"""Excludes clients from the following rounds that broke the protocol, or may not take part.

A client is excluded for ten rounds the first time and for twice as many each further time. It
returns afterwards, because a broken device may have been repaired. ``server.secagg.blame`` decides
which clients are at fault. A client whose owner allows no further round returns earlier if it
connects again, because the owner may have changed the limit.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headwater.common.errors import (
    CorruptUpdate,
    ExamplesForgotten,
    HeadwaterError,
    OversizeUpdate,
    PrivacyBudgetElsewhere,
    PrivacyBudgetSpent,
    PrivacyRequired,
)

FIRST_ROUNDS = 10
MAX_DOUBLINGS = 16
MAX_REASON_CHARACTERS = 200  # limit of ``DescribeRequest.left_out``
OWNERS_REASONS: dict[type[HeadwaterError], str] = {
    PrivacyBudgetSpent: "its owner allows no further update",
    PrivacyBudgetElsewhere: "its data are another name's, which has spent their privacy",
    PrivacyRequired: "its owner allows rounds with noise alone",
    ExamplesForgotten: "it lost the state that says which examples it has used",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusion:
    """One client's exclusion: its last round (inclusive), how many there were, and the reason."""

    through_round: int
    times: int
    why: str
    is_by_owner: bool = False
    is_for_model: bool = False
    """Whether it ends with the round, as the client has masked too much at the round's model."""


def owners_reasons(refused: Mapping[str, HeadwaterError]) -> dict[str, str]:
    """Return the clients that may take part in no round like the last one, with the reasons.

    Their owners do not allow it, or have to restore the client's state first.
    """
    return {
        name: f"{error.code}: {OWNERS_REASONS[type(error)]}"
        for name, error in refused.items()
        if type(error) in OWNERS_REASONS
    }


def breaches(refused: Mapping[str, HeadwaterError]) -> dict[str, str]:
    """Return the clients whose answers were no messages of the protocol, with the reasons.

    Each such answer costs the server the reading of it, and the next one would be like it.
    """
    return {
        name: f"{error.code}: its answer was no message of the protocol"
        for name, error in refused.items()
        if isinstance(error, CorruptUpdate | OversizeUpdate)
    }


def exclude(
    known: Mapping[str, Exclusion],
    reasons: Mapping[str, str],
    *,
    round_number: int,
    is_by_owner: bool = False,
) -> dict[str, Exclusion]:
    """Return the exclusions after an attempt at a round; ``reasons`` are those of the clients."""
    after = dict(known)
    for name, why in reasons.items():
        times = after[name].times + 1 if name in after else 1
        rounds = FIRST_ROUNDS << min(times - 1, MAX_DOUBLINGS)
        through = round_number + rounds
        after[name] = Exclusion(
            through_round=through, times=times, why=why, is_by_owner=is_by_owner
        )
    return after


def sit_out(
    known: Mapping[str, Exclusion], names: Iterable[str], *, round_number: int
) -> dict[str, Exclusion]:
    """Return the exclusions after clients refused to mask more at the model of a round.

    Such a client is excluded from this round alone. It is at no fault, so a later exclusion is no
    longer for it.
    """
    new = {
        name: Exclusion(
            through_round=round_number,
            times=known[name].times if name in known else 0,
            why="it masked most of its examples at this model",
            is_for_model=True,
        )
        for name in names
    }
    return {**known, **new}


def without_owners(
    known: Mapping[str, Exclusion], names: Container[str] | None = None
) -> dict[str, Exclusion]:
    """Return the exclusions without the owners' own of these clients; of all if None."""
    return {
        name: one
        for name, one in known.items()
        if not one.is_by_owner or (names is not None and name not in names)
    }


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
