"""A round's plans as columns; a plan is a message that is made when it is sent or looked at.

For three laptops and 100,000 simulated devices alike: what the planner assigns becomes columns, the
features change these, and rounds are checked against them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headwater.common.messages import FINISH_DIVISOR, MAX_STEPS, Plan
from headwater.common.settings.schema import EvaluationSettings, Settings
from headwater.common.terms import Terms
from headwater.server.planning import plan_reasons
from headwater.server.planning.features import DraftPlans, PlanningMoments
from headwater.server.planning.memory_limit import SIZE_BOUNDS, SizeBound
from headwater.server.planning.planner import Assigned
from headwater.server.planning.vitals_columns import Floats, Ints

NamedTerms = Mapping[str, Terms]
MadeT = TypeVar("MadeT")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanTable(Mapping[str, Plan]):
    """The plans of n clients: columns of their figures, and by name the plan itself."""

    rows: Mapping[str, int]
    """The clients' rows, by name and in order."""
    round: Ints
    model_version: Ints
    quota: Ints
    micro_batch_size: Ints
    deadline_seconds: Floats
    """NaN where there is none; ``finish_seconds`` and ``share`` too."""
    finish_seconds: Floats
    share: Floats
    counted_round: Ints
    """0 where no sum contains an update; ``weigh_as``: where the sum keeps its own weight."""
    weigh_as: Ints
    terms: Sequence[NamedTerms]
    """What features ask, of each client."""
    reason: Callable[[str], str] = field(repr=False)
    """Says what bound a client's plan."""
    make: Callable[[str], Plan] = field(repr=False)
    """Makes a client's plan; those that are the same are one object."""
    _made: dict[str, Plan] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(plans: Mapping[str, Plan]) -> PlanTable:
        """Return plans that were made as a table."""
        if isinstance(plans, PlanTable):
            return plans

        def column(name: str, kind: type = np.int64) -> NDArray[Any]:
            values = [getattr(plan, name) for plan in plans.values()]
            return np.array(
                values if kind is np.float64 else [value or 0 for value in values], dtype=kind
            )

        figures: dict[str, Any] = {name: column(name) for name in _INTS}
        figures |= {name: column(name, np.float64) for name in _FLOATS}
        return PlanTable(
            rows={name: row for row, name in enumerate(plans)},
            **figures,
            terms=[plan.terms for plan in plans.values()],
            reason=lambda name: plans[name].reason,
            make=plans.__getitem__,
        )

    @property
    def first(self) -> Plan:
        """A plan, for what is the same in all."""
        return self[next(iter(self.rows))]

    @property
    def max_examples(self) -> Ints:
        """See ``Plan.max_examples``."""
        steps = -(-self.quota // self.micro_batch_size)
        room = np.maximum(MAX_STEPS - steps, 0) * self.micro_batch_size
        more = np.minimum(self.quota // FINISH_DIVISOR, room)
        return self.quota + np.where(np.isnan(self.finish_seconds), 0, more)

    @property
    def accumulation_steps(self) -> Ints:
        """K of each plan."""
        return -(-self.quota // self.micro_batch_size)

    def weights(
        self, max_weight: int, times_of: Callable[[Plan, int], int] | None = None
    ) -> list[int]:
        """Return the most that each update can weigh; ``times_of`` says how often one counts."""
        pairs = zip(self.weigh_as.tolist(), self.max_examples.tolist(), strict=True)
        each = [weigh_as or max_weight * most for weigh_as, most in pairs]
        if times_of is None:
            return each
        return [times_of(self[name], 1) * one for name, one in zip(self, each, strict=True)]

    def of_each(self, figure: Callable[[NamedTerms], Any]) -> list[Any]:
        """Return what follows from each client's terms alone; found once for each kind of them."""
        if len(set(map(id, self.terms))) == 1:
            return [figure(self.terms[0])] * len(self.terms)
        kinds = dict(zip(map(id, self.terms), self.terms, strict=True))
        found = {key: figure(terms) for key, terms in kinds.items()}
        return list(map(found.__getitem__, map(id, self.terms)))

    def of_each_kind(self) -> list[Plan]:
        """Return a plan of each kind of terms."""
        names = dict(zip(map(id, self.terms), self.rows, strict=True))
        return [self[name] for name in names.values()]

    def at(self, names: Iterable[str]) -> Ints:
        """Return these clients' rows."""
        return np.fromiter(map(self.rows.__getitem__, names), np.int64)

    def some(self, names: Sequence[str]) -> PlanTable:
        """Return the plans of these clients."""
        if len(names) == len(self) and all(map(operator.eq, names, self.rows)):
            return self
        at = self.at(names)
        return PlanTable(
            rows={name: row for row, name in enumerate(names)},
            **{name: getattr(self, name)[at] for name in (*_INTS, *_FLOATS)},
            terms=[self.terms[row] for row in at.tolist()],
            reason=self.reason,
            make=self.__getitem__,
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def __getitem__(self, name: str) -> Plan:
        plan = self._made.get(name)
        if plan is None:
            plan = self._made[name] = self.make(name)
        return plan


_INTS = ("round", "model_version", "quota", "micro_batch_size", "counted_round", "weigh_as")
_FLOATS = ("deadline_seconds", "finish_seconds", "share")
_OR_NONE = ("counted_round", "weigh_as")


def plans_of(
    assigned: Assigned,
    settings: Settings,
    *,
    round_number: int,
    counted: Mapping[str, int],
    weights: Mapping[str, int],
    micro_batch_size: Callable[[Ints, Ints], Ints],
    frozen: str | None,
    features: Sequence[PlanningMoments] = (),
) -> PlanTable:
    """Return the plans of what is assigned.

    ``counted`` is the last round whose sum includes a client's update; ``weights`` are those of
    dataset weighting; ``micro_batch_size`` may change the sizes for quotas and planned sizes;
    ``frozen`` is the digest of the model's frozen part.
    """
    chosen, number = settings.plan, len(assigned)
    common = {
        "run_seed": settings.seed,
        "max_tokens": chosen.max_tokens_per_micro_batch,
        "precision": chosen.precision,
        "held_out_fraction": held_out_fraction(settings.evaluation),
        "held_out": settings.evaluation.held_out,
        "frozen": frozen,
    }
    planned = assigned.micro_batch_size
    sizes = np.minimum(micro_batch_size(assigned.quota, planned), assigned.quota)
    drafts = DraftPlans(assigned, sizes, round_number=round_number)
    for feature in features:
        feature.write(drafts)
    deadline = settings.cohort.deadline_seconds
    figures: dict[str, Any] = {
        "round": np.full(number, round_number),
        "model_version": np.full(number, round_number - 1),
        "quota": assigned.quota,
        "micro_batch_size": drafts.micro_batch_size,
        # The device trains in this share of the deadline; the rest is for the transfers.
        "deadline_seconds": assigned.known.deadline_share
        * (np.nan if deadline is None else deadline),
        "finish_seconds": drafts.finish_seconds,
        "share": assigned.time_share,
        "counted_round": _or_zero(counted, assigned),
        "weigh_as": _or_zero(weights, assigned),
    }
    kinds = _Kinds(assigned, drafts, figures)

    def reason_of(row: int, name: str) -> str:
        size, finish = drafts.micro_batch_size[row], drafts.finish_seconds[row]
        is_cut = drafts.is_evened and size != planned[row]
        return plan_reasons.of_plan(
            assigned[name],
            finish_seconds=None if math.isnan(finish) else float(finish),
            quota_words=drafts.quota_words.get(name),
            more_words=drafts.more_words.get(name, ""),
        ) + (f", cut to {size} each to tell the noise" if is_cut else "")

    def plan_of(row: int, name: str) -> Plan:
        own = {key: _field(key, column[row].item()) for key, column in figures.items()}
        return Plan(**common, **own, reason=reason(name), terms=drafts.terms[row])

    reason, make = kinds.shared(reason_of), kinds.shared(plan_of)
    return PlanTable(rows=assigned.rows, **figures, terms=drafts.terms, reason=reason, make=make)


class _Kinds:
    """Tells which clients have one plan: all that enters a plan or its reason is the same."""

    def __init__(
        self, assigned: Assigned, drafts: DraftPlans, figures: Mapping[str, NDArray[Any]]
    ) -> None:
        self._assigned, self._drafts, self._figures = assigned, drafts, figures

    @cached_property
    def _table(self) -> Floats:
        """The figures that enter a plan or its reason, a row a client."""
        assigned, known = self._assigned, self._assigned.known
        is_memory = assigned.size_bound == SIZE_BOUNDS.index(SizeBound.MEMORY)
        columns = [
            *self._figures.values(),
            assigned.quota == known.num_examples,
            *(assigned.max_micro_batch_size, assigned.size_bound),
            *(assigned.speed_cut, assigned.ahead, assigned.transfers),
            np.where(is_memory, known.vitals.memory_limit_bytes, 0.0),
        ]
        if assigned.accumulation_steps is None:
            columns += [known.vitals.share, known.vitals.is_on_battery]
        return np.stack(columns, axis=1, dtype=np.float64)

    @property
    def _words(self) -> tuple[Mapping[str, str], ...]:
        return self._assigned.exceptions, self._drafts.quota_words, self._drafts.more_words

    @cached_property
    def _is_one(self) -> bool:
        """Whether all clients have one plan."""
        table, terms = self._table, self._drafts.terms
        if any(self._words) or len(set(map(id, terms))) > 1:
            return False
        return bool(np.array_equal(table, np.broadcast_to(table[0], table.shape), equal_nan=True))

    @cached_property
    def _keys(self) -> list[tuple[object, ...]]:
        table = self._table
        # A dict compares bytes faster than tuples of numbers.
        rows = table.view(f"S{table.shape[1] * table.itemsize}").ravel().tolist()
        texts = [map(one.get, self._assigned) for one in self._words]
        return list(zip(rows, map(id, self._drafts.terms), *texts, strict=True))

    def shared(self, make: Callable[[int, str], MadeT]) -> Callable[[str], MadeT]:
        """Return a function that makes something of a client's plan, once for each kind.

        The first client's needs no list of kinds: a round may look at no other.
        """
        made: dict[tuple[object, ...], MadeT] = {}
        first: list[MadeT] = []

        def of_client(name: str) -> MadeT:
            row = self._assigned.rows[name]
            if row == 0 and not first:
                first.append(make(row, name))
            if row == 0 or (first and self._is_one):
                return first[0]
            key = self._keys[row]
            if first and key == self._keys[0]:
                return first[0]
            if key not in made:
                made[key] = make(row, name)
            return made[key]

        return of_client


def _or_zero(known: Mapping[str, int], names: Collection[str]) -> Ints:
    found = map(known.get, names, repeat(0)) if known else repeat(0, len(names))
    return np.fromiter(found, np.int64, len(names))


def _field(name: str, value: Any) -> Any:
    """Return a plan's field: None where the column has NaN, or 0 for none."""
    return None if value != value or (name in _OR_NONE and not value) else value


def held_out_fraction(chosen: EvaluationSettings) -> float:
    """Return the fraction of its examples that each device holds out."""
    return chosen.held_out_fraction if chosen.on_devices else 0.0
