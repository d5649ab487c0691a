"""Who is invited to a round: everybody, or a seeded sample that gives each device its turn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def select(names: Sequence[str], *, size: int | None, seed: int, round_number: int) -> list[str]:
    """Return the invited names, sorted by name.

    A sample walks through a seeded shuffle of the population, ``size`` names a round, so that each
    device is invited once before any is invited twice, as long as the population stays the same.
    The choice depends on the names, the seed and the round alone.
    """
    if size is None or size >= len(names):
        return _in_order(names)
    per_pass = -(-len(names) // size)
    lap, turn = divmod(round_number - 1, per_pass)
    shuffled = _shuffled(names, seed, lap)
    invited = shuffled[turn * size : (turn + 1) * size]
    # The last turn of a lap is filled up from its start.
    return _in_order([*invited, *shuffled[: size - len(invited)]])


def _shuffled(names: Sequence[str], seed: int, lap: int) -> list[str]:
    def key(name: str) -> bytes:
        return hashlib.sha256(f"{seed}\x1f{lap}\x1f{name}".encode()).digest()

    return sorted(names, key=key)


def _in_order(names: Sequence[str]) -> list[str]:
    """Sort names so that 2 comes before 10."""
    return sorted(names, key=lambda n: (0, int(n), n) if n.isdecimal() else (1, 0, n))
