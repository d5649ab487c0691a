"""The figures of a round's clients as columns: a table for each round, in a file that grows.

A line of rounds.jsonl holds the clients of a small round themselves. A round of more than 32
clients has a table in rounds.tables, and its line says where: a thousand clients take a fifteenth
of the space and a tenth of the time that they take as text, and each table is read only when
somebody looks into it. A table is a safetensors file (compressed by zlib): a tensor for each
number, the lists of all clients one behind the other, and texts as indices of the different ones.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from headwater.common.errors import StateError
from headwater.common.parsed_text import json_of
from headwater.server.rounds.round_row import Figure

LEVEL = 1  # of zlib: higher ones take several times as long and save a tenth
MAX_BYTES = 1 << 29
"""Of a table once it is read: of half a million clients with thirty steps each, and no more."""
TEXTS = ("name", "reason", "plan")
LISTS = ("step_seconds", "step_loss", "step_gradient_norm", "gradient_variance")
LENGTH, TEXT = "num_steps", "texts"
"""How many entries the lists of each client have; and the different texts, as JSON."""

Column = NDArray[np.float64] | NDArray[np.int64]


class ClientTable(Sequence[Mapping[str, Any]]):
    """A round's clients: a sequence of their figures by name, kept as columns.

    A number that is unknown, or not finite, is NaN in a column and None in a client's figures.
    """

    def __init__(self, columns: Mapping[str, Column], texts: Mapping[str, Sequence[str]]) -> None:
        """``columns`` have an entry for each client, the ``LISTS`` one for each of their entries.

        The ``texts`` are the different ones of each name in ``TEXTS``, and its column the index.
        """
        self.columns = columns
        self._texts = texts

    @staticmethod
    def of(figures: Mapping[str, Figure]) -> ClientTable:
        """Return the table of ``headwater.server.rounds.round_row.ClientRows.columns``."""
        columns: dict[str, Column] = {}
        texts: dict[str, list[str]] = {}
        for name, values in figures.items():
            if name in TEXTS:
                known = {text: at for at, text in enumerate(dict.fromkeys(values))}
                columns[name] = np.array([known[text] for text in values], dtype=np.int64)
                texts[name] = [*known]
            else:
                kind = np.float64 if name in LISTS else None
                columns[name] = np.array(values, dtype=kind)
        return ClientTable(columns, texts)

    def column(self, name: str) -> Sequence[Any]:
        """Return one figure of all clients, as Python has it."""
        if name in TEXTS:
            known = self._texts[name]
            return [known[at] for at in self.columns[name].tolist()]
        plain = without_nan(self.columns[name])
        if name not in LISTS:
            return plain
        ends = np.cumsum(self.columns[LENGTH]).tolist()
        return [plain[start:end] for start, end in pairwise((0, *ends))]

    def to_bytes(self) -> bytes:
        """Return the table as it is stored."""
        texts = np.frombuffer(json.dumps(self._texts).encode(), dtype=np.uint8)
        return zlib.compress(save({**self.columns, TEXT: texts}), LEVEL)

    @staticmethod
    def of_bytes(data: bytes) -> ClientTable:
        """Return the table that ``to_bytes`` gave.

        Raises:
            ValueError: the bytes are of no table.
        """
        try:
            stream = zlib.decompressobj()
            content = stream.decompress(data, MAX_BYTES)
            if not stream.eof:
                raise ValueError(f"no table of clients: it is cut off, or beyond {MAX_BYTES:,} B")
            columns = load(content)
            texts = json_of(columns.pop(TEXT).tobytes())
        except (zlib.error, SafetensorError, KeyError) as error:
            raise ValueError(f"no table of clients: {error}") from error
        return ClientTable(columns, texts)

    def __len__(self) -> int:
        return len(self.columns["name"])

    @overload
    def __getitem__(self, at: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, at: slice) -> list[Mapping[str, Any]]: ...
    def __getitem__(self, at: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        return [*self][at]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        names = [name for name in self.columns if name != LENGTH]
        return (
            dict(zip(names, values, strict=True))
            for values in zip(*map(self.column, names), strict=True)
        )


def without_nan(column: Column) -> list[Any]:
    """Return a column's numbers; None for those that are not finite."""
    plain: list[Any] = column.tolist()
    if column.dtype.kind == "f" and not np.isfinite(column).all():
        return [value if math.isfinite(value) else None for value in plain]
    return plain


@dataclass(frozen=True)
class StoredTable(Sequence[Mapping[str, Any]]):
    """A table that is read from its file when somebody looks into it."""

    file: Path
    place: Mapping[str, int]
    """Where it is, as its row's line says."""

    @cached_property
    def table(self) -> ClientTable:
        """The table.

        Raises:
            StateError: it cannot be read.
        """
        try:
            with self.file.open("rb") as file:
                at, length = self.place["at"], self.place["num_bytes"]
                if at + length > self.file.stat().st_size:
                    raise ValueError(f"it has no table of {length:,} B at {at:,}")
                file.seek(at)
                table = ClientTable.of_bytes(file.read(length))
            if len(table) != len(self):
                raise ValueError(f"a table of {len(table)} clients, and {len(self)} in its line")
        except (OSError, ValueError) as error:
            raise StateError(
                f"the clients' figures in {self.file}: {error}",
                remedy="restore the file; what rounds have in common is in rounds.jsonl",
            ) from error
        return table

    def column(self, name: str) -> Sequence[Any]:
        """Return one figure of all clients."""
        return self.table.column(name)

    def __len__(self) -> int:
        return self.place["num_clients"]

    @overload
    def __getitem__(self, at: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, at: slice) -> list[Mapping[str, Any]]: ...
    def __getitem__(self, at: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        return self.table[at]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.table)
