"""The runs of a sweep: every combination of the grid's settings with every seed.

A sweep's file is a settings file with a table ``[sweep]`` (``docs/sweep.md``). Each run has its own
folder. The folder's name contains a digest of everything that the run depends on: its settings, and
the contents of the task's file, the fleet's file and the faults' file. So a repeated sweep finds
the runs that are done, and results of different settings never mix.
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
from headwater.common.parsed_text import toml_of
from headwater.common.settings.conflicts import check_effective
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load, with_default_task
from headwater.common.user_code.task_spec import source_file
from headwater.simulation.fleet.fleet_spec import with_fleet

MAX_RUNS = 10_000
MAX_SLUG_CHARACTERS = 80

Point = dict[str, Any]
"""One combination of the grid: dotted settings and their values."""


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
class SweepRun:
    """One run: a point of the grid, a seed, and the settings that follow from both."""

    point: Point
    seed: int
    settings: Settings
    is_trial: bool = False
    """Whether the run is a part of a comparison. It has no curves.png and no report.html, which
    take longer than a short run; if no device gives a usable answer at its rate, it has diverged.
    """

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        assert self.settings.out is not None
        return self.settings.out


def read_sweep(path: Path | None) -> tuple[dict[str, Any], Sweep]:
    """Return the settings tree of a sweep's file, and its table ``[sweep]``.

    Raises:
        SettingsError: the file does not exist, is not TOML, or the table is wrong.
    """
    if path is None:
        return {}, Sweep()
    try:
        tree = toml_of(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the sweep's file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not a TOML file: {error}") from error
    try:
        return tree, Sweep.model_validate(tree.pop("sweep", {}))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(step) for step in ("sweep", *first["loc"]))
        raise SettingsError(
            f"{path}: {key}: {first['msg'].lower()} (found {first['input']!r:.200})",
            remedy="see docs/sweep.md for the table's keys",
        ) from error


def plan_runs(
    tree: Mapping[str, Any], sweep: Sweep, overrides: Mapping[str, Any], *, out: Path
) -> list[SweepRun]:
    """Return the runs of a sweep; the seeds vary fastest, then the grid's last setting.

    ``overrides`` are dotted settings of all runs: they win over the tree, and the grid over them.

    Raises:
        SettingsError: a setting is unknown, out of range, or reserved for the sweep (seed, out);
            a run has no end; there are more than ``MAX_RUNS`` runs, or two equal ones; an override
            or a setting of the grid changes nothing in any of them.
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
    if num_runs > MAX_RUNS:
        raise SettingsError(
            f"the sweep has {num_runs:,} runs, and {MAX_RUNS:,} is the limit",
            remedy="give fewer values or seeds",
        )
    runs = [
        run_of(tree, overrides, point, seed, out=out, what="sweep")
        for point in points(sweep.grid)
        for seed in sweep.seeds
    ]
    if len({run.folder for run in runs}) < len(runs):
        raise SettingsError(
            "two runs of the sweep are the same", remedy="give each value and each seed once"
        )
    check_effective([run.settings for run in runs], {*overrides, *sweep.grid})
    return runs


def points(grid: Mapping[str, Sequence[Any]]) -> Iterator[Point]:
    """Yield the cartesian product of the grid's values; an empty grid has one empty point."""
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def run_of(
    tree: Mapping[str, Any],
    overrides: Mapping[str, Any],
    point: Point,
    seed: int,
    *,
    out: Path,
    what: str,
) -> SweepRun:
    """Return the run of a point and a seed; the point wins over the overrides, they over the tree.

    Raises:
        SettingsError: a setting is unknown or out of range; ``what`` the run is a part of is named.
    """
    # A copy, because ``load`` writes the dotted keys into the tree's own dictionaries.
    merged = {**copy.deepcopy(dict(tree)), **overrides, **point, "seed": seed}
    name = slug(point) or "as-it-is"
    try:
        settings = with_fleet(with_default_task(load(None, merged)))
    except SettingsError as error:
        message = error.message.removeprefix("the command line: ")
        raise SettingsError(f"the {what} at {name}: {message}", remedy=error.remedy) from error
    if settings.num_rounds is None:
        raise SettingsError(
            f"the {what} at {name}: a run of --rounds forever has no result to compare",
            remedy="set --rounds N",
        )
    folder = out / f"{name}-{digest(settings)}" / f"seed-{seed}"
    return SweepRun(point=point, seed=seed, settings=settings.model_copy(update={"out": folder}))


def slug(point: Point) -> str:
    """Return a point as part of a folder's name, at most ``MAX_SLUG_CHARACTERS`` long."""
    words = [f"{key.rpartition('.')[2]}={value}" for key, value in point.items()]
    return re.sub(r"[^A-Za-z0-9._=+,-]+", "_", ",".join(words))[:MAX_SLUG_CHARACTERS].strip("._,-")


def digest(settings: Settings) -> str:
    """Return ten hex digits over the settings, except seed and folder, and the files they name."""
    tree = settings.model_dump(mode="json", exclude={"seed", "out"})
    sha = hashlib.sha256(json.dumps(tree, sort_keys=True).encode())
    task = None if settings.task is None else source_file(settings.task)
    for path in (task, settings.simulation.fleet, settings.simulation.faults):
        content = path.read_bytes() if path is not None and path.is_file() else b""
        sha.update(hashlib.sha256(content).digest())
    return sha.hexdigest()[:10]
