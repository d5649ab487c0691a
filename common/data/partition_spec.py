"""Parses the text of a partition, such as ``dirichlet:0.3``, into a rule.

======================  ==========================================================================
``task``                as the task itself splits them in ``train_examples``
``iid``                 evenly, and at random
``dirichlet:ALPHA``     each label by its own proportions from Dirichlet(ALPHA); default 0.5
``labels:N``            N labels on each device; default 2
``column:NAME``         by a column: for example, all texts of one author are on one device
``quantity:SIGMA``      at random, with lognormal sizes; default 1
``quantity:dirichlet:BETA``  at random, with sizes by Dirichlet(BETA); default 0.5
======================  ==========================================================================

``dirichlet`` and ``labels`` take the name of another column than ``label`` after a second colon.
``common.data.partition`` computes the partition of a rule.
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
# Remedies if there are too few examples for a partition.
USE_FEWER_DEVICES = "ask for fewer devices (--clients, --num-parts)"
DRAW_INSTEAD = "let each draw its own: --examples-per-device N, and devices share examples"
MAX_AMOUNT = 1e6
MAX_SIGMA = 5.0
MAX_LABELS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionRule:
    """A parsed partition, and the seed with which every process computes the same one.

    ``amount`` is ALPHA, N, SIGMA or BETA, and unused in the kinds without one. With
    ``examples_per_device`` each device draws so many of all examples, independently of the others;
    without it every example is on exactly one device.
    """

    kind: Kind
    amount: float = 0.0
    law: Law = "lognormal"
    column: str | None = None
    examples_per_device: int | None = None
    seed: int = 0


def parse_rule(text: str, *, examples_per_device: int | None, seed: int) -> PartitionRule | None:
    """Return the rule of a text; None for ``task``, which needs none.

    Raises:
        ValueError: the text is none of those above, or a number is out of range.
    """
    name, *words = text.split(":")
    if name == TASK and not words:
        if examples_per_device is not None:
            raise ValueError("the task's own split takes no number of examples per device")
        return None
    parse = _READERS.get(name)
    if parse is None:
        raise ValueError(EXPECTED)
    return replace(parse(words), examples_per_device=examples_per_device, seed=seed)


def _iid(words: Sequence[str]) -> PartitionRule:
    _take(words, 0)
    return PartitionRule(kind="iid")


def _dirichlet(words: Sequence[str]) -> PartitionRule:
    alpha, column = _take(words, 2)
    return PartitionRule(kind="dirichlet", amount=_positive(alpha or "0.5"), column=column or LABEL)


def _labels(words: Sequence[str]) -> PartitionRule:
    number, column = _take(words, 2)
    if number and not (number.isascii() and number.isdigit() and 0 < int(number) <= MAX_LABELS):
        raise ValueError(f"labels:{number}: expected an integer from 1")
    return PartitionRule(kind="labels", amount=int(number or "2"), column=column or LABEL)


def _column(words: Sequence[str]) -> PartitionRule:
    (column,) = _take(words, 1)
    if not column:
        raise ValueError("expected the column's name, as in column:author")
    return PartitionRule(kind="column", column=column)


def _quantity(words: Sequence[str]) -> PartitionRule:
    if words and words[0] in ("lognormal", "dirichlet"):
        law, amount = _take(words, 2)
        if law == "dirichlet":
            return PartitionRule(
                kind="quantity", law="dirichlet", amount=_positive(amount or "0.5")
            )
        words = words[1:]
    (sigma,) = _take(words, 1)
    return PartitionRule(kind="quantity", amount=_positive(sigma or "1", at_most=MAX_SIGMA))


_READERS: dict[str, Callable[[Sequence[str]], PartitionRule]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "labels": _labels,
    "column": _column,
    "quantity": _quantity,
}


def _take(words: Sequence[str], max_words: int) -> tuple[str, ...]:
    """Return the words, padded with "" to ``max_words``; more words are a ValueError."""
    if len(words) > max_words:
        raise ValueError(f"{words[max_words]!r} is one word too many: {EXPECTED}")
    return (*words, *[""] * (max_words - len(words)))


def _positive(text: str, *, at_most: float = MAX_AMOUNT) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"expected a number, found {text!r}: {EXPECTED}") from None
    if not (math.isfinite(number) and 1e-3 <= number <= at_most):
        raise ValueError(f"expected a number from 0.001 to {at_most:g}, found {text}")
    return number
