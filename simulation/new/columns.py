"""What the columns of a CSV file hold: numbers with their range, categories, or neither."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headwater.common.errors import SettingsError

MAX_CATEGORIES = 50
MAX_BAD_SHARE, MAX_NAMED_CELLS = 0.05, 3  # of cells in a column of numbers that are none
MAX_CLASSES_OF_NUMBERS = 10
"""A label of whole numbers with more different ones is predicted as a number."""
DIGITS = 6

Row = dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A CSV file and what its columns hold; the label's is not among them."""

    rows: Sequence[Row]
    label: str
    classes: tuple[str, ...]
    """Empty: the label is a number."""
    label_range: tuple[float, float] = (0.0, 1.0)
    numbers: dict[str, tuple[float, float]] = field(default_factory=dict)
    categories: dict[str, tuple[str, ...]] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)
    """Why columns are not used."""
    num_unlabelled: int = 0
    """Rows without a label, which were left out."""


def read_rows(path: Path) -> tuple[list[str], list[Row]]:
    """Return the names of the columns and the rows of a CSV file with a header.

    Raises:
        SettingsError: it cannot be read, has no rows or two columns of one name, or separates
            columns by something else.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines, restval="")
            names = [name for name in reader.fieldnames or [] if name]
            rows = [{name: (row[name] or "").strip() for name in names} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(
            f"{path} cannot be read: {why}", remedy="name a CSV file in UTF-8: --csv FILE"
        ) from error
    if len(names) == 1 and any(mark in names[0] for mark in ";\t"):
        raise SettingsError(
            f"{path} has other marks than commas between its columns",
            remedy="save it as CSV with commas, and a point in numbers",
        )
    if twice := [name for name, number in Counter(names).items() if number > 1]:
        raise SettingsError(
            f"{path} has two columns {twice[0]!r}, and a row one value of each name",
            remedy="give each column a name of its own",
        )
    if not rows:
        raise SettingsError(
            f"{path} has no rows below its header",
            remedy="name a CSV file with a header and a row for each example: --csv FILE",
        )
    return names, rows


def table_of(path: Path, *, label: str | None, is_regression: bool) -> Table:
    """Return a file's rows and columns; ``label`` is the last column if it is not named.

    Raises:
        SettingsError: see ``read_rows``; or there is no such column, or no label in it, or one
            alone, or more classes than a task should have.
    """
    names, rows = read_rows(path)
    label = label or names[-1]
    if label not in names:
        raise SettingsError(
            f"{path} has no column {label!r}",
            remedy=f"--label one of: {', '.join(map(repr, names))}",
        )
    labelled = [row for row in rows if row[label]]
    values = [row[label] for row in labelled]
    if not values:
        raise SettingsError(
            f"{path} has no value in the column {label!r}",
            remedy="name the column to predict: --label COLUMN",
        )
    numbers = _numbers(values)
    different = sorted(set(values))
    is_number = is_regression or (
        numbers is not None
        and (len(different) > MAX_CLASSES_OF_NUMBERS or not all(map(float.is_integer, numbers)))
    )
    if is_number and numbers is None:
        raise SettingsError(
            f"{path}: not every {label!r} is a number",
            remedy="`headwater new table` predicts a class; or name another column with --label",
        )
    if not is_number and len(different) > MAX_CATEGORIES:
        raise SettingsError(
            f"{path}: the column {label!r} has {len(different):,} different texts",
            remedy="name the column to predict: --label COLUMN",
        )
    if len(different) < 2:
        raise SettingsError(
            f"{path}: the column {label!r} has one value, {different[0]!r}: nothing is to learn",
            remedy="name the column to predict: --label COLUMN",
        )
    table = Table(
        rows=labelled,
        label=label,
        classes=() if is_number else tuple(different),
        label_range=_range(numbers) if is_number and numbers else (0.0, 1.0),
        num_unlabelled=len(rows) - len(labelled),
    )
    for name in names:
        if name != label:
            _sort(table, name)
    if not table.numbers and not table.categories:
        raise SettingsError(
            f"{path} has no column but {label!r} that a task could use",
            remedy="name a CSV file with more columns of numbers, or of few different texts",
        )
    return table


def _sort(table: Table, name: str) -> None:
    """Put a column among the numbers, the categories, or those that are passed over."""
    values = [row[name] for row in table.rows if row[name]]
    different = sorted(set(values))
    numbers = _numbers(values)
    if len(different) < 2:
        table.passed_over[name] = "it is the same in all rows"
    elif numbers is not None:
        table.numbers[name] = _range(numbers)
    elif len(different) <= MAX_CATEGORIES:
        table.categories[name] = tuple(different)
    elif bad := _few_bad_numbers(values):
        table.passed_over[name] = (
            f"its values are numbers but {', '.join(map(repr, bad))}: correct these, or leave the "
            "cells empty"
        )
    else:
        table.passed_over[name] = f"it has {len(different):,} different texts"


def _few_bad_numbers(values: Sequence[str]) -> list[str]:
    """Return the few values of a column of numbers that are none; nothing of another column."""
    bad = [value for value in values if _numbers([value]) is None]
    return bad[:MAX_NAMED_CELLS] if len(bad) <= MAX_BAD_SHARE * len(values) else []


def _numbers(values: Sequence[str]) -> list[float] | None:
    """Return the values as numbers; None if one is not a finite number."""
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def _range(numbers: Sequence[float]) -> tuple[float, float]:
    """Return the least and the largest number, with few digits: they stand in the task."""
    low, high = (float(f"{number:.{DIGITS}g}") for number in (min(numbers), max(numbers)))
    return low, high if high > low else low + 1.0
