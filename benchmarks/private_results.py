"""The results of ``benchmarks.privacy``: a line for each run, kept in a file, and their means."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.measure import Figures

Case = tuple[str, str, int, float | None, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The test accuracy of a run, and the epsilon that it spent if it counts that itself."""

    way: str
    model: str
    devices: int
    epsilon: float | None
    seed: int
    accuracy: float = 0.0
    spent: float | None = None

    @property
    def case(self) -> Case:
        return self.way, self.model, self.devices, self.epsilon, self.seed


class Results:
    """The lines so far; new ones are appended to the file, if there is one."""

    def __init__(self, file: Path | None) -> None:
        """Begin with the lines that the file has."""
        self._file = file
        self._lines: dict[Case, Line] = {}
        if file is not None and file.exists():
            lines = [Line(**json.loads(text)) for text in file.read_text().splitlines()]
            self._lines = {line.case: line for line in lines}

    def __contains__(self, case: Case) -> bool:
        return case in self._lines

    def add(self, line: Line) -> None:
        """Add a line."""
        self._lines[line.case] = line
        if self._file is not None:
            with self._file.open("a") as out:
                print(json.dumps(asdict(line)), file=out)

    def figures(self) -> dict[str, Figures]:
        """Return mean, spread and number of seeds by model and fleet, epsilon, and way."""
        fleets: dict[str, list[Line]] = {}
        for line in self._lines.values():
            fleets.setdefault(f"{line.model}-{line.devices}", []).append(line)
        return {name: _by_epsilon(lines) for name, lines in sorted(fleets.items())}


def _by_epsilon(lines: Iterable[Line]) -> Figures:
    groups: dict[str, dict[str, list[Line]]] = {}
    for line in lines:
        name = "none" if line.epsilon is None else f"{line.epsilon:g}"
        groups.setdefault(f"epsilon_{name}", {}).setdefault(line.way, []).append(line)
    return {
        epsilon: {way: _summary(ways, way) for way in ways if not way.endswith("_twin")}
        for epsilon, ways in sorted(groups.items())
    }


def _summary(ways: dict[str, list[Line]], way: str) -> Figures:
    found = [line.accuracy for line in ways[way]]
    summary: Figures = {
        "mean": round(statistics.mean(found), 4),
        "spread": round(statistics.stdev(found), 4) if len(found) > 1 else None,
        "seeds": len(found),
        "spent": ways[way][0].spent,
    }
    twins = {line.seed: line.accuracy for line in ways.get(f"{way}_twin", [])}
    if twins:
        off = [line.accuracy - twins[line.seed] for line in ways[way]]
        summary |= {"most_off_twin": max(map(abs, off)), "mean_off_twin": statistics.mean(off)}
    return summary
