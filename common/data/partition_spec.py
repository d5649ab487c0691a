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
from collections.abc import Sequence
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
    match text.split(":"):
        case ["task"]:
            if examples_per_device is not None:
                raise ValueError("the task's own split takes no number of examples per device")
            return None
        case ["iid"]:
            rule = PartitionRule(kind="iid")
        case ["dirichlet", *words] if len(words) <= 2:
            alpha, column = _defaults(words, "0.5", LABEL)
            rule = PartitionRule(kind="dirichlet", amount=_positive(alpha), column=column)
        case ["labels", *words] if len(words) <= 2:
            number, column = _defaults(words, "2", LABEL)
            rule = PartitionRule(kind="labels", amount=_num_labels(number), column=column)
        case ["column", column] if column:
            rule = PartitionRule(kind="column", column=column)
        case ["quantity", "dirichlet", *words] if len(words) <= 1:
            (beta,) = _defaults(words, "0.5")
            rule = PartitionRule(kind="quantity", law="dirichlet", amount=_positive(beta))
        case ["quantity", "lognormal", *words] | ["quantity", *words] if len(words) <= 1:
            (sigma,) = _defaults(words, "1")
            rule = PartitionRule(kind="quantity", amount=_positive(sigma, at_most=MAX_SIGMA))
        case _:
            raise ValueError(EXPECTED)
    return replace(rule, examples_per_device=examples_per_device, seed=seed)


def _defaults(words: Sequence[str], *defaults: str) -> tuple[str, ...]:
    """Return the words, with the default for each that is missing or empty."""
    given = (*words, *[""] * (len(defaults) - len(words)))
    return tuple(word or default for word, default in zip(given, defaults, strict=True))


def _num_labels(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= MAX_LABELS):
        raise ValueError(f"labels:{text}: expected an integer from 1 to {MAX_LABELS:,}")
    return int(text)


def _positive(text: str, *, at_most: float = MAX_AMOUNT) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"expected a number, found {text!r}: {EXPECTED}") from None
    if not (math.isfinite(number) and 1e-3 <= number <= at_most):
        raise ValueError(f"expected a number from 0.001 to {at_most:g}, found {text}")
    return number
