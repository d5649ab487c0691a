"""Caches around the server's pure planning functions, for simulations of many clients.

A simulator plans the same cohort again and again, in rounds of milliseconds. The caches return
exactly what the functions would return.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from typing import Any

from headwater.common.settings.schema import PlanSettings
from headwater.server.planning.cohort import population_order
from headwater.server.planning.device_estimates import DeviceEstimate
from headwater.server.planning.planner import Assignment, SizeBound, assign
from headwater.server.planning.round_plans import Decisions


def cached_decisions() -> Decisions:
    """Return the planner's functions with caches of their last results."""
    return Decisions(order=CachedOrder(), assign=CachedAssign())


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


class CachedAssign:
    """``assign``, called only for the clients that have changed since the last call.

    With K set, a client's assignment depends on that client alone. Otherwise the quotas depend on
    the whole cohort, and are computed again if any client has changed.
    """

    def __init__(self) -> None:
        self._names: Sequence[str] = ()
        self._estimates: Sequence[DeviceEstimate] = ()
        self._others: tuple[Any, ...] = ()
        self._assigned: dict[str, Assignment] = {}
        self._shared: dict[tuple[object, ...], Assignment] = {}

    def __call__(
        self,
        names: Sequence[str],
        estimates: Sequence[DeviceEstimate],
        exceptions: Mapping[str, str],
        plan: PlanSettings,
        **others: Any,
    ) -> dict[str, Assignment]:
        is_k_set = plan.accumulation_steps is not None
        inputs: tuple[Any, ...] = (exceptions, plan, () if is_k_set else others)
        # The estimate of a client that has not changed is the same object.
        changed = list(map(operator.is_not, estimates, self._estimates))
        if names != self._names or inputs != self._others:
            changed, self._assigned, self._shared = [True] * len(names), {}, {}
        self._names, self._estimates, self._others = names, estimates, inputs
        if any(changed) and not is_k_set:
            self._assigned = assign(names, estimates, exceptions, plan, **others)
        elif any(changed):
            self._assigned = dict(self._assigned)  # the earlier result is the caller's
            some = list(compress(names, changed)), list(compress(estimates, changed))
            for name, one in assign(*some, exceptions, plan, **others).items():
                self._assigned[name] = self._shared.setdefault(_inputs_of_set_k(one), one)
        return self._assigned


def _inputs_of_set_k(one: Assignment) -> tuple[object, ...]:
    """Return the values that a plan and its reason follow from with K set."""
    known, is_memory = one.estimate, one.size_bound is SizeBound.MEMORY
    return (
        *(one.quota, one.max_micro_batch_size, one.size_bound, one.exception),
        known.deadline_share,
        known.vitals.memory_limit_bytes if is_memory else None,
    )
