"""The rounds of a run, and the clients in them, as columns: ready for pandas.

records = headwater.load_rounds("runs/first")
pandas.DataFrame(records.clients).groupby("name")["seconds"].median()
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.common.errors import SettingsError, StateError
from headwater.server.operations.round_log import ROUNDS, read_rows
from headwater.server.rounds.round_row import ClientRow, MaskedClientRow, column_of

Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRecords:
    """A run's records: equal-length columns of its rounds, and of the clients in each of them.

    A number that is unknown is NaN. Metrics are columns of their own, as ``metrics.accuracy``.
    """

    rounds: Columns
    clients: Columns
    """A row for each client of each round; ``round`` says which. Their steps' lists are objects."""
    masked_clients: Columns
    """The same of masked rounds: what each was planned, and its seconds."""


def load_rounds(folder: str | os.PathLike[str]) -> RoundRecords:
    """Return the records of a run, from the folder that it writes (``--out``).

    Raises:
        SettingsError: the folder holds no rounds.
        StateError: the file cannot be read, or the clients' figures of a large round; or a line is
            one that no run has written.
    """
    path = Path(folder)
    try:
        rows = read_rows(path)
        figures = [_numbers(row) for row in rows]
    except OSError as error:
        raise StateError(f"{path / ROUNDS} cannot be read: {error.strerror}") from error
    except (AttributeError, KeyError) as error:
        raise StateError(
            f"{path / ROUNDS} has a line that no run has written: {error!r}",
            remedy="restore it from a backup, or take the line out",
        ) from error
    if not rows:
        raise SettingsError(
            f"{path / ROUNDS} holds no rounds", remedy="name a run's folder, its --out"
        )
    names = dict.fromkeys(name for one in figures for name in one)
    return RoundRecords(
        rounds={name: _column([one.get(name) for one in figures]) for name in names},
        clients=_clients(rows, "clients", ClientRow),
        masked_clients=_clients(rows, "masked_clients", MaskedClientRow),
    )


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's own numbers and texts, and its metrics."""
    own = {
        name: value
        for name, value in row.items()
        if value is None or isinstance(value, int | float | str)
    }
    return own | {f"metrics.{name}": value for name, value in row["metrics"].items()}


def _clients(
    rows: Sequence[Mapping[str, Any]], key: str, kind: type[ClientRow | MaskedClientRow]
) -> Columns:
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for row in rows:
        if clients := row.get(key):
            found["round"] += [row["round"]] * len(clients)
            for field in fields(kind):
                found[field.name] += column_of(clients, field.name)
    return {name: _column(values) for name, values in found.items()}


def _column(values: Sequence[Any]) -> NDArray[Any]:
    """Return a column: of numbers if all are, with NaN for what is unknown; else of objects."""
    known = [value for value in values if value is not None]
    if known and all(isinstance(value, bool) for value in values):
        return np.array(values)
    if all(isinstance(value, int | float) for value in known):
        return np.array([math.nan if value is None else value for value in values])
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
