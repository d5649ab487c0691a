"""How a task's examples are dealt out to the devices of a run, as one writes it: ``dirichlet:0.3``.

======================  ==========================================================================
``task``                as the task itself splits them in ``train_examples``
``iid``                 evenly, and at random
``dirichlet:ALPHA``     each label by shares of its own, from Dirichlet(ALPHA); 0.5 if not given
``labels:N``            N labels on each device; 2 if not given
``column:NAME``         by a column: all that one author wrote is on one device
``quantity:SIGMA``      at random, in sizes that are lognormal; 1 if not given
``quantity:dirichlet:BETA``  the same in sizes by Dirichlet(BETA)
======================  ==========================================================================

``dirichlet`` and ``labels`` take the name of another column than ``label`` behind a second colon.
What the words lead to is worked out in ``common.data.partition``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["iid", "dirichlet", "labels", "column", "quantity"]
Law = Literal["lognormal", "dirichlet"]

TASK = "task"
LABEL = "label"
EXPECTED = (
    "expected task, iid, dirichlet:ALPHA, labels:N, column:NAME, quantity:SIGMA or "
    "quantity:dirichlet:BETA"
)
# What one may do where there are too few examples for a partition.
FEWER = "ask for fewer devices (--clients, --num-parts)"
DRAW = "let each draw its own: --examples-per-device N, and devices share examples"
LARGEST = 1e6
LARGEST_SIGMA = 5.0
MOST_LABELS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A partition, and the seed by which every process deals it out alike.

    ``amount`` is ALPHA, N, SIGMA or BETA, and has no meaning in the kinds without one. With
    ``examples_per_device`` each device draws so many of all examples for itself, whatever the
    others have; without it every example is on exactly one device.
    """

    kind: Kind
    amount: float = 0.0
    law: Law = "lognormal"
    column: str | None = None
    examples_per_device: int | None = None
    seed: int = 0


def rule_of(text: str, *, examples_per_device: int | None, seed: int) -> Rule | None:
    """Return the rule that a text stands for; None for ``task``, which needs none.

    Raises:
        ValueError: it is none of the texts above, or a number is out of range.
    """
    name, *given = text.split(":")
    if name == TASK and not given:
        if examples_per_device is not None:
            raise ValueError("the task's own split knows no number of examples per device")
        return None
    read = _READERS.get(name)
    if read is None:
        raise ValueError(EXPECTED)
    return replace(read(given), examples_per_device=examples_per_device, seed=seed)


def _iid(given: Sequence[str]) -> Rule:
    _take(given, 0)
    return Rule(kind="iid")


def _dirichlet(given: Sequence[str]) -> Rule:
    alpha, column = _take(given, 2)
    return Rule(kind="dirichlet", amount=_positive(alpha or "0.5"), column=column or LABEL)


def _labels(given: Sequence[str]) -> Rule:
    number, column = _take(given, 2)
    if number and not (number.isascii() and number.isdigit() and 0 < int(number) <= MOST_LABELS):
        raise ValueError(f"labels:{number}: expected a whole number from 1")
    return Rule(kind="labels", amount=int(number or "2"), column=column or LABEL)


def _column(given: Sequence[str]) -> Rule:
    (column,) = _take(given, 1)
    if not column:
        raise ValueError("expected the column's name, as in column:author")
    return Rule(kind="column", column=column)


def _quantity(given: Sequence[str]) -> Rule:
    if given and given[0] in ("lognormal", "dirichlet"):
        law, amount = _take(given, 2)
        if law == "dirichlet":
            return Rule(kind="quantity", law="dirichlet", amount=_positive(amount or "0.5"))
        given = given[1:]
    (sigma,) = _take(given, 1)
    return Rule(kind="quantity", amount=_positive(sigma or "1", at_most=LARGEST_SIGMA))


_READERS: dict[str, Callable[[Sequence[str]], Rule]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "labels": _labels,
    "column": _column,
    "quantity": _quantity,
}


def _take(given: Sequence[str], most: int) -> tuple[str, ...]:
    """Return ``most`` words, empty where there are fewer; more are a ValueError."""
    if len(given) > most:
        raise ValueError(f"{given[most]!r} is too much: {EXPECTED}")
    return (*given, *[""] * (most - len(given)))


def _positive(text: str, *, at_most: float = LARGEST) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"expected a number, found {text!r}: {EXPECTED}") from None
    if not (math.isfinite(number) and 1e-3 <= number <= at_most):
        raise ValueError(f"expected a number from 0.001 to {at_most:g}, found {text}")
    return number
