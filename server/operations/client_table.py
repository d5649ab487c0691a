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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from headwater.common.system.atomic_file import regular
from headwater.server.rounds.round_row import Figure

LEVEL = 1  # of zlib: higher ones take several times as long and save a tenth
MAX_BYTES = 1 << 29
"""Of a table once it is read: of half a million clients with thirty steps each, and no more."""
TEXTS = ("name", "reason", "plan")
LISTS = ("step_seconds", "step_loss", "step_gradient_norm", "gradient_variance")
LENGTH, TEXT = "num_steps", "texts"
"""How many entries the lists of each client have; and the different texts, as JSON."""

Column = NDArray[np.float64] | NDArray[np.int64]


Contents = tuple[Mapping[str, Column], Mapping[str, Sequence[str]]]
"""The columns, and the different texts of each name in ``TEXTS``, of which its column has indices.

A column has an entry for each client, one of the ``LISTS`` one for each of their entries."""


class ClientTable(Sequence[Mapping[str, Any]]):
    """A round's clients: a sequence of their figures by name, kept as columns.

    A number that is unknown, or not finite, is NaN in a column and None in a client's figures.
    """

    def __init__(self, num_clients: int, read: Callable[[], Contents]) -> None:
        """``read`` is called when somebody looks into the table."""
        self._num_clients = num_clients
        self._read = read

    @cached_property
    def _contents(self) -> Contents:
        return self._read()

    @property
    def columns(self) -> Mapping[str, Column]:
        """The columns by name."""
        return self._contents[0]

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
        return ClientTable(len(columns["name"]), lambda: (columns, texts))

    def column(self, name: str) -> Sequence[Any]:
        """Return one figure of all clients, as Python has it."""
        if name in TEXTS:
            known = self._contents[1][name]
            return [known[at] for at in self.columns[name].tolist()]
        plain = without_nan(self.columns[name])
        if name not in LISTS:
            return plain
        ends = np.cumsum(self.columns[LENGTH]).tolist()
        return [plain[start:end] for start, end in pairwise((0, *ends))]

    def to_bytes(self) -> bytes:
        """Return the table as it is stored."""
        texts = np.frombuffer(json.dumps(self._contents[1]).encode(), dtype=np.uint8)
        return zlib.compress(save({**self.columns, TEXT: texts}), LEVEL)

    def __len__(self) -> int:
        return self._num_clients

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


def stored_table(file: Path, place: Mapping[str, int]) -> ClientTable:
    """Return the table at a place in a file, as its row's line says; it is read when it is needed.

    Raises, when it is read:
        StateError: it cannot be read.
    """

    def read() -> Contents:
        at, length = place["at"], place["num_bytes"]
        try:
            with regular(file).open("rb") as tables:
                if at + length > file.stat().st_size:
                    raise ValueError(f"it has no table of {length:,} B at {at:,}")
                tables.seek(at)
                columns, texts = _contents_of(tables.read(length))
            if (number := len(columns["name"])) != place["num_clients"]:
                raise ValueError(
                    f"a table of {number} clients, and {place['num_clients']} in its line"
                )
        except (OSError, ValueError) as error:
            raise StateError(
                f"the clients' figures in {file}: {error}",
                remedy="restore the file; what rounds have in common is in rounds.jsonl",
            ) from error
        return columns, texts

    return ClientTable(place["num_clients"], read)


def _contents_of(data: bytes) -> Contents:
    """Return the contents of the table whose ``to_bytes`` these are; ValueError if of none."""
    try:
        stream = zlib.decompressobj()
        content = stream.decompress(data, MAX_BYTES)
        if not stream.eof:
            raise ValueError(f"no table of clients: it is cut off, or beyond {MAX_BYTES:,} B")
        columns = load(content)
        return columns, json_of(columns.pop(TEXT).tobytes())
    except (zlib.error, SafetensorError, KeyError) as error:
        raise ValueError(f"no table of clients: {error}") from error
