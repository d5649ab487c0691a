"""A cache of the order in which clients have their turns, for simulations of many clients.

A simulator plans the same cohort again and again, in rounds of milliseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headwater.server.planning.cohort import population_order


class CachedOrder:
    """``population_order``, computed once a lap: sorting a million names takes seconds.

    The names are those of a ``FleetRoster``: the same object while they are the same.
    """

    def __init__(self) -> None:
        self._lap: tuple[int, int] | None = None
        self._names: Collection[str] = ()
        self._listed: tuple[str, ...] = ()
        self._order: list[str] = []

    def __call__(self, names: Collection[str], seed: int, lap: int) -> Sequence[str]:
        is_same_lap = (seed, lap) == self._lap
        if is_same_lap and names is self._names:
            return self._order
        listed = tuple(names)
        if not is_same_lap or listed != self._listed:
            self._order = population_order(listed, seed, lap)
        self._lap, self._names, self._listed = (seed, lap), names, listed
        return self._order
