"""What devices report of their memory, link and time share, as columns: only what enters a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headwater.common.messages import Vitals

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Columns:
    """A dataclass whose fields are columns of n rows, or such a dataclass themselves."""

    __slots__ = ()

    @classmethod
    def _names(cls) -> list[str]:
        return [one.name for one in fields(cls)]  # type: ignore[arg-type]

    def some(self, at: Ints) -> Self:
        """Return a copy of these rows."""
        return type(self)(**{name: _some(getattr(self, name), at) for name in self._names()})

    def put(self, at: Ints, rows: Self) -> None:
        """Replace the rows at ``at``."""
        for name in self._names():
            column, other = getattr(self, name), getattr(rows, name)
            if isinstance(column, Columns):
                column.put(at, other)
            else:
                column[at] = other

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return several tables as one, one behind the other; at least one."""
        columns: dict[str, Any] = {}
        for name in cls._names():
            each = [getattr(part, name) for part in parts]
            first = each[0]
            is_table = isinstance(first, Columns)
            columns[name] = type(first).joined(each) if is_table else np.concatenate(each)
        return cls(**columns)


def _some(column: Any, at: Ints) -> Any:
    return column.some(at) if isinstance(column, Columns) else column[at]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VitalsColumns(Columns, Sequence[Vitals]):
    """Fields of n devices' vitals, which say what each is; NaN where a device reports none."""

    memory_limit_bytes: Floats
    base_bytes: Floats
    bytes_per_example: Floats
    is_on_battery: Floats
    upload_bytes_per_second: Floats
    download_bytes_per_second: Floats
    share: Floats

    @classmethod
    def of(cls, vitals: Iterable[Vitals]) -> VitalsColumns:
        """Return the columns of some vitals."""
        rows = list(vitals)
        return cls(
            **{
                name: np.array([getattr(one, name) for one in rows], dtype=np.float64)
                for name in cls._names()
            }
        )

    def follow(self, at: Ints, reported: VitalsColumns) -> None:
        """Replace what is known in these rows by what is reported, where the report has a value."""
        for name in self._names():
            known, new = getattr(self, name), getattr(reported, name)
            known[at] = np.where(np.isnan(new), known[at], new)

    def told(self) -> list[dict[str, Any]]:
        """Return each device's values as plain data, without those at their defaults."""
        rows: list[dict[str, Any]] = [{} for _ in range(len(self))]
        for name in self._names():
            column, kind = getattr(self, name), _KINDS.get(name, float)
            is_told = column != 1.0 if name == SHARE else ~np.isnan(column)
            for at in np.flatnonzero(is_told).tolist():
                rows[at][name] = kind(column[at])
        return rows

    def __len__(self) -> int:
        return len(self.share)

    def __getitem__(self, row: int) -> Vitals:  # type: ignore[override]
        """Return one device's vitals."""
        found = {name: float(getattr(self, name)[row]) for name in self._names()}
        told = {name: value for name, value in found.items() if value == value}
        return Vitals(**{name: _KINDS.get(name, float)(value) for name, value in told.items()})


SHARE = "share"
_KINDS: dict[str, type] = {"memory_limit_bytes": int, "base_bytes": int, "is_on_battery": bool}
