"""What a run costs, in four resources, and how much of one of them each algorithm may use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import TypeAdapter, ValidationError

from headwater.common.errors import SettingsError
from headwater.common.settings.fields import Bytes
from headwater.common.wording import bytes_text, counted

Resource = Literal["rounds", "bytes", "examples", "seconds"]
"""Server steps; bytes up and down; examples used by all devices; seconds of the devices' clock."""
RESOURCES: tuple[Resource, ...] = get_args(Resource)
Cost = Mapping[Resource, float]

MAX_ROUNDS = 10_000
SEARCH_SHARE = 3
"""A run of the rate search has a third of the budget's rounds."""
MIN_SEARCH_ROUNDS = 3
SEARCH_ROUNDS = 10
"""The rounds of a search run where the budget is not in rounds, whose cost is not known yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """An amount of one resource."""

    resource: Resource
    amount: float

    @property
    def search_rounds(self) -> int:
        """The rounds of one run of the rate search."""
        if self.resource != "rounds":
            return SEARCH_ROUNDS
        rounds = int(self.amount)
        return min(max(math.ceil(rounds / SEARCH_SHARE), MIN_SEARCH_ROUNDS), rounds)

    def rounds_within(self, cost: Cost) -> int:
        """Return the rounds that use up the budget, by what a search run cost: 1 to MAX_ROUNDS."""
        if self.resource == "rounds":
            return int(self.amount)
        each = cost[self.resource] / cost["rounds"]
        return min(max(math.ceil(self.amount / each), 1), MAX_ROUNDS) if each else MAX_ROUNDS

    def __str__(self) -> str:
        return amount_text(self.resource, self.amount)


def parse_budget(text: str) -> Budget:
    """Read ``rounds=50``, ``bytes=20MB``, ``examples=50000`` or ``seconds=600``.

    Raises:
        SettingsError: another form, or an amount that is not positive.
    """
    resource, separator, given = text.partition("=")
    wrong = SettingsError(
        f"--budget: expected rounds=N, bytes=N, examples=N or seconds=N, found {text!r:.100}",
        remedy="give one of them, for example --budget rounds=50 or --budget bytes=20MB",
    )
    if resource not in RESOURCES or not separator:
        raise wrong
    try:
        amount = float(TypeAdapter(Bytes).validate_python(given) if "B" in given.upper() else given)
    except (ValueError, ValidationError):
        raise wrong from None
    if not 0 < amount < math.inf or (resource != "seconds" and amount % 1):
        raise wrong
    if resource == "rounds" and amount > MAX_ROUNDS:
        raise SettingsError(
            f"--budget: {amount:,.0f} rounds are more than a comparison takes",
            remedy=f"give at most {MAX_ROUNDS:,}",
        )
    return Budget(resource=resource, amount=amount)


def amount_text(resource: Resource, amount: float) -> str:
    """Return an amount in words: ``19 rounds``, ``3.1 MB``, ``12,400 examples``, ``8.3 s``."""
    match resource:
        case "rounds":
            return counted(round(amount), "round")
        case "examples":
            return counted(round(amount), "example")
        case "bytes":
            return bytes_text(amount)
        case "seconds":
            return f"{amount:,.0f} s" if amount >= 100 else f"{amount:.3g} s"
