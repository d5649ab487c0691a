"""Availability of simulated devices: a probability for each round, or the rounds of a trace.

A trace is a CSV file of one of three kinds, which its header identifies (``docs/fleet.md``)::

    round,share                      the probability for every device of the table
    device,first_round,last_round    both inclusive, rounds from 1
    device,from_seconds,to_seconds   half-open; a round covers ``round_seconds`` of the trace

A trace becomes a list of entries, numbered from 0, that repeats after the last one. Rounds, and not
the virtual clock, advance a trace's seconds, so that availability depends neither on the model nor
on the way a round is computed.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headwater.common.errors import SettingsError

MAX_ROWS, MAX_ENTRIES = 1_000_000, 10_000_000

BY_ROUND = ("round", "share")
BY_ROUNDS = ("device", "first_round", "last_round")
BY_SECONDS = ("device", "from_seconds", "to_seconds")


@dataclass(frozen=True, slots=True)
class RoundShares:
    """The probability of being available in each entry; the list of entries repeats."""

    entries: tuple[float, ...] = (1.0,)

    def at(self, index: int) -> float:
        """Return the probability in an entry, counted from 0."""
        return self.entries[index % len(self.entries)]

    @property
    def is_always(self) -> bool:
        """Whether the device is available in every round."""
        return min(self.entries) == 1


@dataclass(frozen=True, slots=True)
class Spans:
    """The entries in which a device is available: half-open spans with gaps between them."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    period: int

    def at(self, index: int) -> float:
        """Return 1 if the device is available in an entry, else 0."""
        entry = index % self.period
        last = bisect_right(self.starts, entry) - 1
        return 1.0 if last >= 0 and entry < self.ends[last] else 0.0

    @property
    def is_always(self) -> bool:
        """Whether the device is available in every round."""
        return (self.starts, self.ends) == ((0,), (self.period,))


Availability = RoundShares | Spans
ALWAYS = RoundShares()


def read_trace(
    path: Path, *, num_devices: int, round_seconds: float | None
) -> tuple[Availability, ...]:
    """Read a trace: the availability of each device of a table, numbered from 0 in the table.

    Raises:
        SettingsError: the file cannot be read, a line is wrong, a device is never available, or
            ``round_seconds`` is missing or not needed. The message names file and line.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = _Rows(path, csv.reader(file, strict=True))
            if (round_seconds is not None) != (rows.header == BY_SECONDS):
                is_needed = rows.header == BY_SECONDS
                raise rows.error(
                    f"round_seconds is {'not set' if is_needed else 'set'}, and the trace is "
                    f"{'' if is_needed else 'not '}in seconds"
                )
            if rows.header == BY_ROUND:
                return (_round_shares(rows),) * num_devices
            return _spans(rows, num_devices, round_seconds)
    except OSError as error:
        raise SettingsError(f"cannot read the trace {path}: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not a CSV file: {error}") from error


class _Rows:
    """The rows of a trace after its header; remembers the line number for error messages."""

    def __init__(self, path: Path, reader: Iterator[list[str]]) -> None:
        self._path = path
        self._reader = reader
        self._line = 1
        self.header = tuple(cell.strip() for cell in next(reader, []))
        if self.header not in (BY_ROUND, BY_ROUNDS, BY_SECONDS):
            kinds = "; ".join(map(",".join, (BY_ROUND, BY_ROUNDS, BY_SECONDS)))
            raise self.error(f"expected one of the headers {kinds}; found {','.join(self.header)}")

    def __iter__(self) -> Iterator[list[float]]:
        """Yield the numbers of each row; blank lines are skipped.

        Raises:
            SettingsError: a row has more or fewer cells than the header, or a cell that is not a
                finite number; or there are more than ``MAX_ROWS`` rows.
        """
        for cells in self._reader:
            self._line += 1
            if not cells:
                continue
            if self._line - 1 > MAX_ROWS:
                raise self.error(f"more than {MAX_ROWS:,} rows")
            if len(cells) != len(self.header):
                raise self.error(f"expected {len(self.header)} values, found {len(cells)}")
            yield [self._number(cell) for cell in cells]

    def _number(self, cell: str) -> float:
        try:
            number = float(cell)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise self.error(f"expected a number, found {cell.strip()!r:.40}")
        return number

    def error(self, message: str) -> SettingsError:
        """Return an error that names the current line."""
        return SettingsError(
            f"{self._path}: line {self._line}: {message}",
            remedy="see docs/fleet.md for the three kinds of traces",
        )


def _round_shares(rows: _Rows) -> RoundShares:
    entries: list[float] = []
    for number, share in rows:
        if number != len(entries) + 1:
            raise rows.error(f"expected round {len(entries) + 1}, found {number:g}")
        if not 0 <= share <= 1:
            raise rows.error(f"the share must be from 0 to 1, found {share:g}")
        entries.append(share)
    if not any(entries):
        raise rows.error("the devices are never available")
    return RoundShares(tuple(entries))


def _spans(rows: _Rows, num_devices: int, round_seconds: float | None) -> tuple[Availability, ...]:
    spans_of: list[list[tuple[int, int]]] = [[] for _ in range(num_devices)]
    period = 0
    for device, begin, end in rows:
        if not device.is_integer() or not 0 <= device < num_devices:
            raise rows.error(f"the device must be 0 to {num_devices - 1}, found {device:g}")
        if round_seconds is None:
            start, stop = _entries_of_rounds(rows, begin, end)
        else:
            start, stop = _entries_of_seconds(rows, begin, end, round_seconds)
            period = max(period, math.ceil(end / round_seconds))
        period = max(period, stop)
        if period > MAX_ENTRIES:
            raise rows.error(f"the trace is longer than {MAX_ENTRIES:,} rounds")
        if start < stop:
            spans_of[int(device)].append((start, stop))
    for device, spans in enumerate(spans_of):
        if not spans:
            raise rows.error(
                f"device {device} is not available at the start of any round of the trace"
            )
    return tuple(_merged(spans, period) for spans in spans_of)


def _entries_of_rounds(rows: _Rows, first: float, last: float) -> tuple[int, int]:
    if not (first.is_integer() and last.is_integer() and 1 <= first <= last):
        raise rows.error(f"expected whole rounds, 1 <= first <= last; found {first:g} and {last:g}")
    return int(first) - 1, int(last)


def _entries_of_seconds(
    rows: _Rows, begin: float, end: float, round_seconds: float
) -> tuple[int, int]:
    """Return the entries whose start, n x ``round_seconds``, is in [begin, end)."""
    if not 0 <= begin < end:
        raise rows.error(f"expected 0 <= from < to, found {begin:g} and {end:g}")
    return math.ceil(begin / round_seconds), math.ceil(end / round_seconds)


def _merged(spans: Iterable[tuple[int, int]], period: int) -> Spans:
    merged: list[list[int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return Spans(
        starts=tuple(start for start, _ in merged),
        ends=tuple(end for _, end in merged),
        period=period,
    )
