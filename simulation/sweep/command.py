"""``headwater-simulate sweep``: run what is not done yet, and show how the points compare."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from headwater.common.errors import SettingsError, StateError
from headwater.common.system.console import console
from headwater.simulation.sweep.grid import Sweep, SweptRun, planned, read_sweep
from headwater.simulation.sweep.plot import draw_sweep, named
from headwater.simulation.sweep.pool import Told, run_all
from headwater.simulation.sweep.results import (
    POINTS_FILE,
    RUNS_FILE,
    Result,
    Summary,
    metric_of,
    result_of,
    short_names,
    summaries,
    write_tables,
)

LOCK = "sweep.lock"


def run_sweep(
    file: Path | None,
    *,
    grid: dict[str, Any],
    seeds: tuple[int, ...] | None,
    metric: str | None,
    jobs: int,
    out: Path | None,
    overrides: dict[str, Any],
) -> bool:
    """Run a sweep's runs that have not ended yet, and leave tables and a plot of all.

    What is given here wins over the file. True if every run has ended, as it should or by
    diverging. After Ctrl-C, or with failed runs, the same call goes on.

    Raises:
        SettingsError: the file or a setting is wrong, or another process is at this sweep.
        StateError: the folder cannot be written.
    """
    tree, told = read_sweep(file)
    lists = {key: value if isinstance(value, list) else [value] for key, value in grid.items()}
    sweep = Sweep(
        seeds=seeds or told.seeds, metric=metric or told.metric, grid={**told.grid, **lists}
    )
    folder = out or Path("runs") / (f"sweep-{file.stem}" if file is not None else "sweep")
    given = {key: value for key, value in overrides.items() if value is not None}
    runs = planned(tree, sweep, given, out=folder)
    with _alone_in(folder):
        left = [run for run in runs if result_of(run) is None]
        num_points = len(runs) // len(sweep.seeds)
        done = f"; {len(runs) - len(left)} runs are done" if len(left) < len(runs) else ""
        console.print(
            f"[bold]{escape(str(runs[0].settings.task))}[/]: {num_points} points x "
            f"{len(sweep.seeds)} seeds = {len(runs)} runs in {folder}{done}",
            soft_wrap=True,
        )
        try:
            failed = _run(left, jobs)
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on from what was committed")
            raise typer.Exit(130) from None
        finally:
            _conclude(folder, runs, sweep.metric)
    for run, why in failed:
        console.print(f"[bold red]failed[/] {run.folder}: {escape(why)}", soft_wrap=True)
    return not failed


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold a sweep's folder; a process that ends lets it go.

    Raises:
        SettingsError: another process holds it.
        StateError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a")
    except OSError as error:
        raise StateError(
            f"cannot write {folder}: {error.strerror}", remedy="choose another --out"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SettingsError(
                f"another process is at the sweep in {folder}",
                remedy="wait for it, or choose another --out",
            ) from error
        yield


def _run(runs: Sequence[SweptRun], jobs: int) -> list[tuple[SweptRun, str]]:
    """Run what is left, with a bar over all rounds; return the runs that failed, and why."""
    failed, line = [], ""
    rounds = {str(run.folder): 0 for run in runs}
    num_ended = 0
    bar = Progress(
        TextColumn("{task.fields[runs]} runs, round"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[line]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar, closing(run_all(runs, jobs=jobs)) as news:
        total = sum(run.settings.rounds for run in runs)
        shown = bar.add_task("rounds", total=total, runs=f"0/{len(runs)}", line="")
        for told in news:
            key = str(told.run.folder)
            rounds[key] = told.run.settings.rounds if told.ended else told.round
            if told.ended:
                num_ended += 1
                if told.ended == "failed":
                    failed.append((told.run, told.line))
                if not console.is_terminal:
                    console.print(_line_of(told, num_ended, len(runs)), soft_wrap=True)
            else:
                line = told.line
            bar.update(
                shown,
                completed=sum(rounds.values()),
                runs=f"{num_ended}/{len(runs)}",
                line=line,
            )
    return failed


def _line_of(told: Told, number: int, of: int) -> str:
    where = f"{told.run.folder.parent.name}/{told.run.folder.name}"
    said = f"{told.ended}: {told.line}" if told.line else told.ended
    return escape(f"run {number:>4}/{of}  {where}  {said}")


def _conclude(folder: Path, runs: Sequence[SweptRun], asked: str | None) -> None:
    """Write and show what there is of a sweep, which may not be all."""
    results = [found for run in runs if (found := result_of(run)) is not None]
    if not results:
        return
    metric = metric_of(results, asked)
    summed = summaries(runs, results, metric)
    write_tables(folder, summed, results, metric)
    plot = draw_sweep(folder, summed, metric)
    console.print(table_of(summed, metric))
    _say_files(folder, plot, results, runs)


def _say_files(
    folder: Path, plot: Path | None, results: Sequence[Result], runs: Sequence[SweptRun]
) -> None:
    if len(results) < len(runs):
        console.print(f"  {len(results)} of {len(runs)} runs are done; the same command goes on")
    for title, path in (
        ("points", folder / POINTS_FILE),
        ("runs", folder / RUNS_FILE),
        ("plot", plot),
    ):
        if path is not None:
            console.print(f"  {title:<12}{path}", soft_wrap=True)


def table_of(summed: Sequence[Summary], metric: str) -> Table:
    """Return the points as a table, best first: mean and spread of the metric over the seeds."""
    names = short_names([one.point for one in summed])
    table = Table(box=None, pad_edge=False, title_justify="left")
    for name in names.values() or ["point"]:
        table.add_column(name, overflow="fold")
    for title in ("seeds", metric.replace("_", " "), "spread", "range"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in summed:
        settings = [str(one.point[key]) for key in names] or [named(one.point, names)]
        seeds = f"{len(one.values)}/{one.num_runs}"
        table.add_row(*map(escape, settings), seeds, *_figures(one))
    return table


def _figures(one: Summary) -> tuple[str, str, str]:
    diverged = f"{one.num_diverged} diverged" if one.num_diverged else ""
    if one.mean is None:
        return diverged or "-", "", ""
    spread = "" if one.spread is None else f"{one.spread:.4f}"
    span = f"{min(one.values):.4f} to {max(one.values):.4f}"
    return f"{one.mean:.4f}", spread, f"{span}, {diverged}" if diverged else span
