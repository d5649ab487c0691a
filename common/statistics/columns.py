"""The columns that a task measures, and their sums as they travel: two rows of numbers.

The task says in ``measured`` what it measures under which name, and its method ``statistics`` gives
the values of one example. A device adds them up in float64 and sends them in float32: counts up to
2^24 are exact, and each moment is off by up to 2^-25 of itself. So a mean is off by up to 2^-24 of
the width of its bounds and a variance by up to 2^-22 of the squared width, whatever the number of
devices. Counts are exact.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import ValidationError

from headwater.common.errors import CorruptUpdate, TaskError
from headwater.common.statistics.kinds import KINDS, Floats, Ints, Kind
from headwater.common.statistics.terms import FoundSums
from headwater.common.user_code.failures import running

MEASURED, STATISTICS, USE = "measured", "statistics", "use_statistics"
"""What a task has: its columns, the values of one example, and what takes the result."""
_BEFORE, _GIVEN = "_before_statistics", "_given_statistics"
REMEDY = "see docs/task.md, Statistics before training"
CHUNK = 1024
"""Examples whose values are held until they are added."""


class Statistics(Mapping[str, Any]):
    """What was found of each column, by its name; see ``FoundMoments`` and the others."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._found = dict(found)

    def __getitem__(self, name: str) -> Any:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; a NaN is None."""
        return {name: _plain(asdict(one)) for name, one in self._found.items()}


def _plain(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: [None if one != one else one for one in value] if isinstance(value, list) else value
        for key, value in found.items()
    }


@dataclass(frozen=True)
class Columns:
    """The columns that a task measures, in the order of their names."""

    of: Mapping[str, Kind]
    task: str = ""
    """The name of the task's class: another task measures something else."""

    @property
    def num_counts(self) -> int:
        """The length of the row of counts of all columns."""
        return sum(kind.num_counts for kind in self.of.values())

    @property
    def num_moments(self) -> int:
        """The length of the row of moments of all columns."""
        return sum(kind.num_moments for kind in self.of.values())

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the task's name, and of names, kinds and bounds, in hexadecimal.

        Both sides must have the same.
        """
        names = {kind: name for name, kind in KINDS.items()}
        plain = {name: [names[type(kind)], kind.fields()] for name, kind in self.of.items()}
        text = json.dumps([self.task, plain], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def example_bound(self) -> float:
        """The L2 norm of what an example adds to both rows, with one value in each column."""
        return math.sqrt(sum(kind.squared_bound for kind in self.of.values()))

    def clipped_sums(self, task: Any, examples: Iterable[Any]) -> tuple[Floats, Floats, int]:
        """Return the rows over some examples, none of which adds more than ``example_bound``.

        An example with several values in a column adds in proportion less. The last number says
        how many examples were clipped so.

        Raises:
            TaskFailed, TaskError: see ``sums``.
        """
        total = np.zeros(self.num_counts + self.num_moments)
        num_clipped = 0
        for example in examples:
            counts_C, moments_M = self.sums(task, [example])
            row: Floats = np.concatenate([counts_C.astype(np.float64), moments_M])
            norm = float(np.linalg.norm(row))
            if norm > self.example_bound:
                num_clipped += 1
                row *= self.example_bound / norm
            total += row
        return total[: self.num_counts], total[self.num_counts :], num_clipped

    def sums(self, task: Any, examples: Iterable[Any]) -> tuple[Ints, Floats]:
        """Return the rows of counts and moments over some examples.

        Raises:
            TaskFailed: the task's ``statistics`` raised an exception.
            TaskError: it returned other names, or a value that cannot be measured.
        """
        counts_C = np.zeros(self.num_counts, np.int64)
        moments_M = np.zeros(self.num_moments)
        held: list[Mapping[str, Any]] = []
        for example in examples:
            held.append(self._values(task, example))
            if len(held) == CHUNK:
                self._add(held, counts_C, moments_M)
                held = []
        if held:
            self._add(held, counts_C, moments_M)
        return counts_C, moments_M

    def _values(self, task: Any, example: Any) -> Mapping[str, Any]:
        with running(STATISTICS, remedy=REMEDY):
            found = task.statistics(example)
        if not isinstance(found, Mapping) or found.keys() != self.of.keys():
            what = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found)
            raise TaskError(
                f"statistics must return a value for each of {', '.join(self.of)}, found {what}",
                remedy=f"return a dict with the names of {MEASURED}",
            )
        return found

    def _add(self, values: Sequence[Mapping[str, Any]], counts_C: Ints, moments_M: Floats) -> None:
        for name, kind, counts, moments in self._cut(counts_C, moments_M):
            try:
                kind.add([one[name] for one in values], counts, moments)
            except TaskError as error:
                raise TaskError(f"{name}: {error.message}", remedy=error.remedy) from error

    def _cut(self, counts_C: Ints, moments_M: Floats) -> Iterator[tuple[str, Kind, Ints, Floats]]:
        at, to = 0, 0
        for name, kind in self.of.items():
            counts = counts_C[at : at + kind.num_counts]
            moments = moments_M[to : to + kind.num_moments]
            at, to = at + kind.num_counts, to + kind.num_moments
            yield name, kind, counts, moments

    def check(self, counts: Sequence[float], moments: Sequence[float]) -> None:
        """Check rows that were added up over all devices: a device may have sent anything.

        Raises:
            CorruptUpdate: no examples have such sums; names the column.
        """
        self._check_lengths(counts, moments)
        rows = self._cut(np.rint(np.array(counts)).astype(np.int64), np.array(moments, np.float64))
        for name, kind, own_C, own_M in rows:
            if own_C.min(initial=0) < 0 or not kind.are_possible(own_C, own_M):
                raise CorruptUpdate(
                    f"the statistics of {name}: no examples have such sums, so a device sent "
                    "others than its own",
                    remedy="find the device by leaving some out, and begin again",
                )

    def _check_lengths(self, counts: Sequence[float], moments: Sequence[float]) -> None:
        if (len(counts), len(moments)) != (self.num_counts, self.num_moments):
            raise TaskError(
                f"found statistics of {len(counts):,} counts and {len(moments):,} moments, the "
                f"task measures {self.num_counts:,} and {self.num_moments:,}",
                remedy="begin a new run: the task measures something else now",
            )

    def found(
        self, counts: Sequence[int], moments: Sequence[float], noise: float = 0.0
    ) -> Statistics:
        """Return what rows that were added up over all devices say; see ``check`` as well.

        ``noise`` is the standard deviation of the noise in each number.

        Raises:
            TaskError: they are not of these columns.
        """
        self._check_lengths(counts, moments)
        rows = self._cut(np.array(counts, np.int64), np.array(moments, np.float64))
        return Statistics({name: kind.found(c, m, noise) for name, kind, c, m in rows})


def columns_of(task: Any) -> Columns:
    """Return the columns that a task measures.

    Raises:
        TaskError: it has no method ``statistics``, or no ``measured`` that says what.
    """
    measured, name = getattr(task, MEASURED, None), type(task).__name__
    if not callable(getattr(task, STATISTICS, None)) or not isinstance(measured, Mapping):
        raise TaskError(
            f"the settings ask for statistics, and the task {name} does not say which: it needs a "
            f"method {STATISTICS}(example) and a dict {MEASURED}",
            remedy=REMEDY,
        )
    kinds = tuple(KINDS.values())
    wrong = [key for key, one in measured.items() if type(one) not in kinds]
    if wrong or not measured or not all(isinstance(key, str) for key in measured):
        raise TaskError(
            f"{name}.{MEASURED} must have names, each with a headwater.Moments, Histogram or "
            f"Counts{', not so: ' + ', '.join(map(str, wrong)) if wrong else ''}",
            remedy=REMEDY,
        )
    return Columns({key: measured[key] for key in sorted(measured)}, name)


def give(task: Any, found: Statistics) -> None:
    """Give a task what was found, if it has ``use_statistics``.

    Raises:
        TaskFailed: it raised an exception.
    """
    use = getattr(task, USE, None)
    if use is not None:
        if not hasattr(task, _BEFORE):
            setattr(task, _BEFORE, dict(vars(task)))
        with running(USE, remedy=REMEDY):
            use(found)


def lacks_statistics(task: Any) -> bool:
    """Return whether a task uses statistics, and was given none."""
    return hasattr(task, USE) and not hasattr(task, _BEFORE)


def take_back(task: Any) -> None:
    """Leave a task with the attributes that it had before it was first given statistics."""
    before = getattr(task, _BEFORE, None)
    if before is not None:
        vars(task).clear()
        vars(task).update(before)


def give_once(task: Any, found: FoundSums, statistics: Callable[[], Statistics]) -> None:
    """Give a task the same sums no second time: many simulated devices have one task.

    Raises:
        TaskError, TaskFailed: as ``statistics`` and ``give`` do.
    """
    if vars(task).get(_GIVEN) is not found:
        give(task, statistics())
        setattr(task, _GIVEN, found)


def give_recorded(task: Any, row: Mapping[str, Any]) -> None:
    """Give a task the statistics in the record of a model's file.

    Raises:
        TaskError: the task measures something else, or the record is none.
        TaskFailed: see ``give``.
    """
    columns = columns_of(task)
    if row.get("columns") != columns.digest:
        raise TaskError(
            f"the model was trained with other statistics than {type(task).__name__} measures: "
            "other names, bounds or labels",
            remedy="name the task that it was trained with",
        )
    try:
        found = FoundSums.model_validate({key: one for key, one in row.items() if key != "columns"})
        if not found.noise:
            columns.check(found.counts, found.moments)
    except (ValidationError, CorruptUpdate) as error:
        raise TaskError(f"the statistics in the model's file are none: {error}") from error
    give(task, columns.found(found.counts, found.moments, found.noise))
