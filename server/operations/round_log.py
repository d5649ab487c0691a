"""A run's log files: rounds.jsonl, which has one JSON object a round, and curves.png."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from torch import nn

from headwater.common.errors import RunFolderGone, StateError, system_remedy
from headwater.common.parsed_text import json_of
from headwater.common.settings.schema import Settings
from headwater.common.system.atomic_file import (
    atomic_writer,
    make_private_folder,
    regular,
    write_atomically,
)
from headwater.server.operations.curves import curves
from headwater.server.operations.log_limits import (
    RowsFile,
    older_file,
    tables_beside,
)
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.round_row import ClientRow, ClientRows, MaskedClientRow, RoundRow

log = logging.getLogger(__name__)

ROUNDS = "rounds.jsonl"
MAX_IN_LINE = 32
"""A round of more clients has a table of them (``server.operations.client_table``)."""
CURVES = "curves.png"
EVENTS = "tensorboard"
REPORT = "report.html"
STEP_FIGURES = ("step_gradient_norm", "gradient_variance")
"""A client's figures of its steps that may be unknown."""
FIELDS: Mapping[str, Callable[[], object] | None] = {
    field.name: None if field.default_factory is MISSING else field.default_factory
    for field in fields(RoundRow)
} | {"clients": list, "below_share": list}
EMPTY: tuple[object, ...] = ({}, [], ())
MAY_BE_OMITTED = {
    field.name
    for field in fields(RoundRow)
    if field.default is None or field.default in EMPTY or field.default_factory is not MISSING
} | {"loss"}
"""What a line leaves out where it is unknown or empty."""


class RoundLog(Observer):
    """Appends each round to rounds.jsonl, and draws curves.png.

    Of a run without a last round only the latest rows stay (``server.operations.log_limits``).
    """

    def __init__(self, *, draws_curves: bool = True) -> None:
        """Without ``draws_curves`` there is no curves.png, which takes longer than a short run."""
        self._draws_curves = draws_curves
        self._folder: Path | None = None
        self._task: str | None = None
        self._file: RowsFile
        self._has_tables = True
        self._is_gone = False

    def started(self, settings: Settings, *, round_number: int, model: nn.Module) -> None:
        """Open the files and drop the rows after ``round_number``, the last checkpoint's round.

        The checkpoints of the dropped rounds were never written: they are run again. A run without
        a folder has no files.

        Raises:
            StateError: the folder cannot be written.
        """
        folder = settings.out
        if folder is None:
            return
        try:
            make_private_folder(folder)
            for path in (older_file(folder / ROUNDS), folder / ROUNDS):
                _drop_rows_after(round_number, path)
            is_bounded = settings.num_rounds is None
            self._file = RowsFile(folder / ROUNDS, is_bounded=is_bounded)
        except OSError as error:
            raise StateError(
                f"cannot write {folder / ROUNDS}: {error.strerror}",
                remedy=system_remedy(str(error)) or "choose another --out",
            ) from error
        self._folder, self._task = folder, settings.task
        self._has_tables = settings.standby.shared_state is None  # a standby gets the lines alone

    def stepped(self, row: RoundRow) -> None:
        """Write one round's row.

        Raises:
            RunFolderGone: the file of the rounds was removed, perhaps with its folder.
            StateError: the disk is full.
        """
        if self._folder is None:
            return
        if not (self._folder / ROUNDS).exists():
            self._is_gone = True
            raise RunFolderGone(f"{self._folder / ROUNDS} was removed while the run went on")
        try:
            clients = self._clients_of(row)
            self._file.write(line_of_row(row, clients, ended_at=round(time.time(), 3)))
        except OSError as error:
            raise StateError(
                f"round {row.round} cannot be written to {self._folder}: {error.strerror}",
                remedy="free space and go on with --resume",
            ) from error

    def _clients_of(self, row: RoundRow) -> list[dict[str, Any]] | Mapping[str, int]:
        """Return what the row's line says of its clients: their figures, or where their table is.

        Raises:
            OSError: the disk is full.
        """
        is_small = len(row.clients) <= MAX_IN_LINE or not self._has_tables
        if is_small or not isinstance(row.clients, ClientRows):
            return [_fields(client) for client in row.clients]
        from headwater.server.operations.client_table import ClientTable

        table = ClientTable.of(row.clients.columns()).to_bytes()
        at = self._file.write_table(table)
        return {"at": at, "num_bytes": len(table), "num_clients": len(row.clients)}

    def ended(self) -> None:
        """Close the files and draw the curves; on a full disk only the curves are missing.

        Of a folder that is gone nothing is made anew.
        """
        if self._folder is None:
            return
        try:
            self._file.close()
            if self._draws_curves and not self._is_gone:
                _draw(self._folder, self._task)
        except OSError as error:
            log.warning("no %s in %s: %s", CURVES, self._folder, error.strerror)


def row_to_dict(row: RoundRow) -> dict[str, Any]:
    """Return a row's fields by name; ``dataclasses.asdict`` would copy every step's figures."""
    return {
        **_fields(row),
        "clients": [_fields(client) for client in row.clients],
        "masked_clients": [_fields(client) for client in row.masked_clients],
    }


def row_of_dict(fields: Mapping[str, Any]) -> RoundRow:
    """Return a row from its line in rounds.jsonl; NaN where the line has null for a number.

    Raises:
        TypeError: a field is missing.
    """

    def known(kind: type[RoundRow | ClientRow | MaskedClientRow], given: Mapping[str, Any]) -> Any:
        names = kind.__dataclass_fields__
        return kind(**{name: value for name, value in given.items() if name in names})

    changed = {
        "loss": math.nan if fields["loss"] is None else fields["loss"],
        "metrics": {
            name: math.nan if value is None else value for name, value in fields["metrics"].items()
        },
        "clients": [known(ClientRow, client) for client in fields["clients"]],
        "masked_clients": [known(MaskedClientRow, one) for one in fields.get("masked_clients", [])],
    }
    row: RoundRow = known(RoundRow, {**fields, **changed})
    return row


def line_of_row(
    row: RoundRow, clients: list[dict[str, Any]] | Mapping[str, int], *, ended_at: float
) -> str:
    """Return a row's line of rounds.jsonl, without what is unknown or empty.

    ``clients`` are their figures, which the line has as columns, or where their table is.
    ``ended_at`` is in seconds since 1970.
    """
    masked = _columns([_fields(client) for client in row.masked_clients])
    table = _columns(clients) if isinstance(clients, list) else clients
    fields = {**_fields(row), "ended_at": ended_at, "clients": table, "masked_clients": masked}
    try:
        return _dumped(_known(fields))
    except ValueError:
        return _dumped(_known(_without_nan(fields)))


def _dumped(fields: object) -> str:
    return json.dumps(fields, allow_nan=False, separators=(",", ":"))


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in fields.items()
        if name not in MAY_BE_OMITTED or (value is not None and value not in EMPTY)
    }


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a column for each figure; one value for all if it is the same, but of the names.

    Lists of unknown numbers, one for each step, are left out.
    """
    columns: dict[str, Any] = {}
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows]
        if isinstance(values[0], list):
            unknown = [[None] * len(steps) for steps in columns.get("step_seconds", ())]
            if name not in STEP_FIGURES or values != unknown:
                columns[name] = values
        else:
            is_same = name != "name" and values.count(values[0]) == len(values)
            columns[name] = values[0] if is_same else values
    return columns


def row_of_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a parsed line: with what it leaves out, and each client's figures by name.

    A line of an earlier version has all of it, and stays as it is.
    """
    row = {
        name: line.get(name, None if of_round is None else of_round())
        for name, of_round in FIELDS.items()
        if name in line or name in MAY_BE_OMITTED
    }
    row |= {name: value for name, value in line.items() if name not in row}
    for name in ("clients", "masked_clients"):
        if isinstance(row[name], dict) and not _is_place(row[name]):
            row[name] = _rows_of_columns(row[name])
    return row


def _rows_of_columns(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    number = len(columns["name"])
    full = {
        name: values if isinstance(values, list) else [values] * number
        for name, values in columns.items()
    }
    for name in STEP_FIGURES if "step_seconds" in full else ():
        full.setdefault(name, [[None] * len(steps) for steps in full["step_seconds"]])
    return [dict(zip(full, values, strict=True)) for values in zip(*full.values(), strict=True)]


def _fields(row: RoundRow | ClientRow | MaskedClientRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in type(row).__slots__}


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinities by null, which JSON has no numbers for; a test loss may be one."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read rounds.jsonl as dictionaries; a line that a crash cut off is skipped.

    Of a long run without a last round it reads the file of the rows before, too.
    """
    return [*rows_in(folder)]


def rows_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what ``read_rows`` returns, row by row.

    Raises:
        OSError: the file cannot be read.
    """
    for path in (older_file(folder / ROUNDS), folder / ROUNDS):
        if path.exists():
            yield from _rows_of(path)


def _drop_rows_after(round_number: int, path: Path) -> None:
    """Rewrite a file of rows without those after a round; a missing rounds.jsonl becomes empty."""
    if not path.exists() and path.name != ROUNDS:
        return
    kept = [row for row in _lines_of(path) if row["round"] <= round_number] if path.exists() else []
    write_atomically(path, "".join(_dumped(row) + "\n" for row in kept).encode())
    places = [row["clients"] for row in kept if _is_place(row.get("clients"))]
    if (tables := tables_beside(path)).exists():
        end = max((one["at"] + one["num_bytes"] for one in places), default=0)
        os.truncate(tables, min(end, tables.stat().st_size))


def _rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a file's rows; the clients of a large round are read when somebody looks at them."""
    for line in _lines_of(path):
        row = row_of_line(line)
        if isinstance(row["clients"], dict):
            from headwater.server.operations.client_table import stored_table

            row["clients"] = stored_table(tables_beside(path), row["clients"])
        yield row


def _lines_of(path: Path) -> Iterator[dict[str, Any]]:
    with regular(path).open("rb") as lines:
        for line in lines:
            try:
                row = json_of(line)
            except ValueError:  # also bytes that are no text, as a power failure leaves them
                row = None
            if isinstance(row, dict) and isinstance(row.get("round"), int) and _has_clients(row):
                yield row
            else:
                log.warning("%s: an incomplete line is skipped", path)


def _is_place(clients: object) -> bool:
    """Whether a line's clients are a place in a file of tables."""
    return isinstance(clients, dict) and "at" in clients


def _has_clients(row: Mapping[str, Any]) -> bool:
    """Whether a line's clients are none, a list, columns, or a place in a file of tables."""
    clients = row.get("clients")
    if isinstance(clients, dict) and _is_place(clients):
        numbers = [clients.get(name) for name in ("at", "num_bytes", "num_clients")]
        return all(type(number) is int and 0 <= number < 2**62 for number in numbers)
    return all(
        one is None or isinstance(one, list) or (isinstance(one, dict) and _are_columns(one))
        for one in (clients, row.get("masked_clients"))
    )


def _are_columns(columns: Mapping[str, Any]) -> bool:
    lists = [values for values in columns.values() if isinstance(values, list)]
    names, steps = columns.get("name"), columns.get("step_seconds", [])
    return (
        isinstance(names, list)
        and all(len(values) == len(names) for values in lists)
        and isinstance(steps, list)
        and all(isinstance(each, list) for each in steps)
    )


def _draw(folder: Path, task: str | None) -> None:
    """Draw curves.png; what cannot be drawn is said, and ends no run.

    Devices tell some of its figures.
    """
    rows = read_rows(folder)
    if not rows:
        return
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no curves.png: pip install 'headwater[server]' draws one")
        return
    try:
        figure = curves(rows, task=task)
        with atomic_writer(folder / CURVES, is_durable=False) as part:
            figure.savefig(part, dpi=120, format="png")
    except (ArithmeticError, ValueError) as error:
        log.warning("no %s: %s", CURVES, error)
