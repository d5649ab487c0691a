"""A sweep: every combination of some settings, each with several seeds, a run for each.

A sweep's file is a settings file with a table ``[sweep]`` (``docs/sweep.md``). Each run has a
folder of its own, whose name holds a digest of all that the run depends on: its settings, and the
content of the task's file and of those of the fleet and its faults. So a sweep that is started
again takes up what it finds of the same runs, and results of other settings never mix with its own.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings, load
from headwater.simulation.fleet.profiles import with_fleet

MOST_RUNS = 10_000
SLUG_CHARACTERS = 80

Point = dict[str, Any]
"""What tells one combination from another: dotted settings and their values."""


class Sweep(BaseModel):
    """The table ``[sweep]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seeds: Annotated[tuple[Annotated[int, Field(ge=0, le=2**53)], ...], Field(min_length=1)] = (
        0,
        1,
        2,
    )
    metric: str | None = None
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweptRun:
    """One run: a combination of settings, a seed, and the folder that it leaves its files in."""

    point: Point
    seed: int
    settings: Settings

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        assert self.settings.out is not None
        return self.settings.out


def read_sweep(path: Path | None) -> tuple[dict[str, Any], Sweep]:
    """Return the settings' tree of a sweep's file, and its table ``[sweep]``.

    Raises:
        SettingsError: the file is not there, is not TOML, or the table is wrong.
    """
    if path is None:
        return {}, Sweep()
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"cannot read the sweep's file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not a TOML file: {error}") from error
    try:
        return tree, Sweep.model_validate(tree.pop("sweep", {}))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in ("sweep", *first["loc"]))
        raise SettingsError(
            f"{path}: {where}: {first['msg'].lower()} (found {first['input']!r:.200})",
            remedy="see docs/sweep.md for the table's keys",
        ) from error


def planned(
    tree: Mapping[str, Any], sweep: Sweep, overrides: Mapping[str, Any], *, out: Path
) -> list[SweptRun]:
    """Return the runs of a sweep: the grid's last setting and then the seeds change fastest.

    ``overrides`` are dotted settings that hold for all runs, over the tree; the grid wins.

    Raises:
        SettingsError: a setting is unknown or out of range; one that a sweep sets by itself; more
            than ``MOST_RUNS`` runs, or two that are the same.
    """
    for key in ("seed", "out"):
        if key in tree or key in sweep.grid or overrides.get(key) is not None:
            raise SettingsError(
                f"{key} is set, and a sweep sets it by itself",
                remedy="give the seeds as [sweep] seeds or --seeds, the folder as --out",
            )
    num_runs = len(sweep.seeds)
    for values in sweep.grid.values():
        num_runs *= len(values)
    if num_runs > MOST_RUNS:
        raise SettingsError(
            f"the grid comes to {num_runs:,} runs, at most {MOST_RUNS:,}", remedy="sweep fewer"
        )
    runs = [
        _planned(tree, overrides, point, seed, out)
        for point in points(sweep.grid)
        for seed in sweep.seeds
    ]
    if len({run.folder for run in runs}) < len(runs):
        raise SettingsError(
            "two runs of the sweep are the same", remedy="give each value and each seed once"
        )
    return runs


def points(grid: Mapping[str, Sequence[Any]]) -> Iterator[Point]:
    """Yield the cartesian product of a grid's values; of an empty grid, one point with nothing."""
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _planned(
    tree: Mapping[str, Any], overrides: Mapping[str, Any], point: Point, seed: int, out: Path
) -> SweptRun:
    # ``load`` lays the dotted keys into the tree's own dictionaries.
    laid = {**copy.deepcopy(dict(tree)), **overrides, **point, "seed": seed}
    name = slug(point) or "as-it-is"
    try:
        settings = with_fleet(load(None, laid))
    except SettingsError as error:
        said = error.message.removeprefix("the command line: ")
        raise SettingsError(f"the sweep at {name}: {said}", remedy=error.remedy) from error
    folder = out / f"{name}-{digest(settings)}" / f"seed-{seed}"
    return SweptRun(point=point, seed=seed, settings=settings.model_copy(update={"out": folder}))


def slug(point: Point) -> str:
    """Return a point as part of a folder's name, cut to ``SLUG_CHARACTERS``."""
    words = [f"{key.rpartition('.')[2]}={value}" for key, value in point.items()]
    return re.sub(r"[^A-Za-z0-9._=+,-]+", "_", ",".join(words))[:SLUG_CHARACTERS].strip("._,-")


def digest(settings: Settings) -> str:
    """Return what names a run's settings but for its seed, and the files that it reads, in hex."""
    told = settings.model_dump(mode="json", exclude={"seed", "out"})
    sha = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    task = Path(settings.task.rpartition(":")[0]) if settings.task is not None else None
    for path in (task, settings.simulation.fleet, settings.simulation.faults):
        content = path.read_bytes() if path is not None and path.is_file() else b""
        sha.update(hashlib.sha256(content).digest())
    return sha.hexdigest()[:10]
