"""Adds up the sums beside the model's, and divides each once.

They are added as integers, as the model's is (``cohort_sum``): the order of the updates changes no
bit. The scale is the one that the terms name, so that a sum does not depend on earlier rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.common.errors import SettingsError
from headwater.common.messages import Plan
from headwater.common.terms import SumOf
from headwater.server.aggregation.cohort_sum import CohortSum, PartialSum


@dataclass(frozen=True, slots=True)
class _Length:
    """What a cohort sum needs of a layout: one tensor of this length."""

    num_parameters: int

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return ((0, self.num_parameters),)


def sums_of(plans: Iterable[Plan], num_values: int) -> dict[str, SumOf]:
    """Return all sums that plans of one round ask for, of a model of so many parameters.

    Raises:
        SettingsError: two plans ask for unlike sums of one name.
    """
    kinds = {tuple(map(id, plan.terms.values())): plan for plan in plans if plan.terms}
    found: dict[str, SumOf] = {}
    for plan in kinds.values():
        for key, asked in plan.extra_sums(num_values).of.items():
            if found.setdefault(key, asked) != asked:
                raise SettingsError(
                    f"the plans of round {plan.round} ask for unlike sums {key!r}",
                    remedy="give sums that differ from client to client names of their own",
                )
    return found


class ExtraSums:
    """The named sums of one round."""

    def __init__(self, asked: Mapping[str, SumOf]) -> None:
        self.asked = asked
        self._sums: dict[str, CohortSum] = {}
        for key, one in asked.items():
            self._sums[key] = CohortSum(_Length(one.length))
            self._sums[key].open(num_clients=1, planned_weight=1, scale_bits=one.scale_bits)

    @classmethod
    def of(cls, plans: Iterable[Plan], num_values: int) -> ExtraSums | None:
        """Return what adds up the sums of a round's plans; None if they ask for none.

        Raises:
            SettingsError: see ``sums_of``.
        """
        asked = sums_of(plans, num_values)
        return cls(asked) if asked else None

    def add(self, sums: Mapping[str, Tensor], *, weight: int, times: int) -> None:
        """Add those of one update; its plan may ask for fewer.

        In a mean it counts ``times``, as in the model's; a plain sum is of what was sent.
        """
        for key, values in sums.items():
            factor = times if self.asked[key].is_mean else 1
            self._sums[key].fold(values, weight, times=factor)

    def parts(self) -> dict[str, PartialSum]:
        """Return what was added so far, for the sums of the server above."""
        return {key: total.part() for key, total in self._sums.items()}

    def check_parts(
        self,
        parts: Mapping[str, PartialSum],
        weights: Mapping[str, Sequence[int]],
        *,
        name: str,
    ) -> None:
        """Check an aggregator's sums; ``weights`` are those of the updates that each is of.

        Raises:
            CorruptUpdate: no so many updates within their limit have such a sum.
        """
        for key, part in parts.items():
            self._sums[key].check_part(
                part,
                name=f"{name}: the sum {key}",
                limits=[self.asked[key].limit] * len(weights.get(key, ())),
            )

    def add_parts(
        self, parts: Mapping[str, PartialSum], weights: Mapping[str, Sequence[int]]
    ) -> None:
        """Add checked sums: the same integers as if their updates had been added."""
        for key, part in parts.items():
            self._sums[key].add_part(part, sum(weights.get(key, ())))

    @property
    def num_values(self) -> int:
        """The length of all sums together."""
        return sum(one.length for one in self.asked.values())

    def add_integers(self, draw: Callable[[int], NDArray[np.int64]]) -> None:
        """Add noise to the integers of all sums: ``draw`` returns so many of them."""
        for total in self._sums.values():
            total.add_integers(draw)

    def close(self) -> dict[str, Tensor]:
        """Return each sum in float64; a mean is divided by the weight of its updates."""
        found = {}
        for key, total in self._sums.items():
            part = total.part()
            values = part.integers_P.astype(np.float64) * 2.0 ** -part.scale_bits[0]
            if self.asked[key].is_mean:
                values /= max(total.weight, 1)  # of no weight there is no mean, but zeros
            found[key] = torch.from_numpy(values)
        return found
