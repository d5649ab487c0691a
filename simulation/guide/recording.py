"""The guide as files, which open without a server: its answers at some positions of each slider.

The answers are computed when the files are written, by the code that the live guide runs. A slider
then moves from one recorded position to the next. Of the run, which takes a moment for each
position, one slider moves at a time and the others stand where they stood at first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import headwater
from headwater.simulation.guide.run_lab import RunLab
from headwater.simulation.guide.web import FILES, LABS, Numbers, run_settings

Grid = Mapping[str, tuple[float, ...]]
"""The positions of a lab's sliders by name."""

GRIDS: Mapping[str, Grid] = {
    "memory": {
        "batch": (8, 16, 32, 64, 96, 128, 192, 256),
        "size": (1, 4, 8, 16, 32, 64, 128, 256),
        "limit": (4, 8, 16, 24, 48, 96, 128),
    },
    "loop": {"size": (1, 2, 3, 4, 5, 6, 7)},
    "sums": {
        "examples": (2, 10, 32, 64, 97, 100, 128, 256),
        "size": (1, 4, 8, 16, 32, 48, 64, 128),
    },
    "pace": {
        "devices": (2, 6, 12),
        "spread": (1, 4, 16),
        "examples": (64, 512, 4096),
        "size": (8, 64),
        "milliseconds": (1, 5, 50),
        "megabytes": (1, 10, 100),
        "link": (0.5, 2.5, 25),
    },
    "masks": {"devices": (3, 5, 10), "colluders": (0, 1, 2, 4, 9), "digit": (0, 3, 7)},
}
RUN_CENTRE: dict[str, float] = {
    "devices": 12,
    "spread": 4,
    "size": 8,
    "examples": 512,
    "dropout": 0,
    "steps": 1,
    "noise": 0,
}
RUN_GRID: Grid = {
    "devices": (4, 12),
    "spread": (4, 16),
    "size": (8, 64),
    "examples": (64, 512),
    "dropout": (0, 0.6),
    "steps": (1, 4),
    "noise": (0, 2),
}
RUN_FIELDS = (
    *("round", "loss", "metrics", "k_max", "k_min", "num_clients", "num_invited"),
    *("num_examples", "time", "epsilon"),
)
"""What the guide shows of a round."""
DIGITS = 5
MIN_POOLED = 24  # characters; a reference to the pool takes nine
NOW = "Every number here is computed on this machine, now, by Headwater's own code."
THEME = '<button id="theme"'
SCRIPT = '<script defer src="static/guide.js"></script>'


def guide_files() -> dict[str, bytes]:
    """Return the guide's files by path: index.html, static/ and the recorded answers in it."""
    page = FILES["guide.html"].read_text(encoding="utf-8")
    assert all(part in page for part in (NOW, THEME, SCRIPT))
    then = (
        f"Every number here was computed by the code of Headwater {headwater.__version__} when "
        "these pages were built. headwater-simulate guide computes every position on your machine."
    )
    page = page.replace(NOW, then)
    page = page.replace(THEME, '<a href="../index.html">Documents</a> ' + THEME)
    page = page.replace(SCRIPT, '<script defer src="static/recorded.js"></script>\n' + SCRIPT)
    files = {"index.html": page.encode()}
    for name, path in FILES.items():
        if name not in ("index.html", "guide.html", "page.js", "devices.js"):
            files[f"static/{name}"] = path.read_bytes()
    text = json.dumps(recorded(), separators=(",", ":"), allow_nan=False)
    return files | {"static/recorded.js": f"const RECORDED = {text};\n".encode()}


def recorded() -> dict[str, Any]:
    """Compute the answers of each lab, in the order of its grid, and the runs."""
    pool = Pool()
    labs = {
        name: {
            "grid": grid,
            "answers": [pool.put(LABS[name](_numbers(at))) for at in _positions(grid)],
        }
        for name, grid in GRIDS.items()
    }
    runs = {name: pool.put(found) for name, found in _runs()}
    labs["run"] = {"grid": RUN_GRID, "centre": RUN_CENTRE, "answers": runs}
    return {"labs": labs, "pool": pool.values}


def _positions(grid: Grid) -> Iterator[dict[str, float]]:
    for values in product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _numbers(position: Mapping[str, float]) -> Numbers:
    return Numbers({name: str(value) for name, value in position.items()})


def _runs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each recorded run with its key: "" or NAME=VALUE of the slider that was moved."""
    positions = {"": RUN_CENTRE}
    for name, values in RUN_GRID.items():
        for value in values:
            if value != RUN_CENTRE[name]:
                positions[f"{name}={value}"] = RUN_CENTRE | {name: value}
    for key, position in positions.items():
        settings, spread = run_settings(_numbers(position))
        lab = RunLab()
        lab.start(settings, spread=spread)
        lab.finish()
        state = lab.state()
        points = [{name: one[name] for name in RUN_FIELDS} for one in state["points"]]
        yield key, {"status": {"has_ended": True}, "points": points, "fault": state["fault"]}


class Pool:
    """Values of which answers hold many, each stored once; {"$": n} refers to the n-th."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[str, int] = {}

    def put(self, value: Any) -> Any:
        """Return a value with its numbers rounded and its long parts replaced by references."""
        match value:
            case float():
                return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
            case Mapping():
                value = {name: self.put(part) for name, part in value.items()}
            case list() | tuple():
                value = [self.put(part) for part in value]
            case str():
                pass
            case _:
                return value
        text = json.dumps(value)
        if len(text) < MIN_POOLED:
            return value
        if text not in self._places:
            self._places[text] = len(self.values)
            self.values.append(value)
        return {"$": self._places[text]}
