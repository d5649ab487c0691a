"""``headwater-simulate sweep``: executes the runs that are not done yet and compares the points."""

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
from headwater.simulation.sweep.grid import Sweep, SweepRun, plan_runs, read_sweep
from headwater.simulation.sweep.plot import draw_sweep
from headwater.simulation.sweep.pool import run_all
from headwater.simulation.sweep.results import (
    POINTS_FILE,
    RUNS_FILE,
    Summary,
    choose_metric,
    read_result,
    short_names,
    summarize,
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
    """Execute the sweep's runs that are not done, and write the tables and the plot of all runs.

    The arguments win over the file. Returns True if every run has ended, complete or diverged.
    After Ctrl-C, or with failed runs, the same call continues the sweep.

    Raises:
        SettingsError: the file or a setting is wrong, or another process executes this sweep.
        StateError: the folder cannot be written.
    """
    tree, table = read_sweep(file)
    lists = {key: value if isinstance(value, list) else [value] for key, value in grid.items()}
    sweep = Sweep(
        seeds=seeds or table.seeds, metric=metric or table.metric, grid={**table.grid, **lists}
    )
    folder = out or Path("runs") / (f"sweep-{file.stem}" if file is not None else "sweep")
    chosen = {key: value for key, value in overrides.items() if value is not None}
    runs = plan_runs(tree, sweep, chosen, out=folder)
    with _locked(folder):
        remaining = [run for run in runs if read_result(run) is None]
        num_points = len(runs) // len(sweep.seeds)
        num_done = len(runs) - len(remaining)
        done = f"; {num_done} runs are done" if num_done else ""
        console.print(
            f"[bold]{escape(str(runs[0].settings.task))}[/]: {num_points} points x "
            f"{len(sweep.seeds)} seeds = {len(runs)} runs in {folder}{done}",
            soft_wrap=True,
        )
        try:
            failed = _execute(remaining, jobs)
        except KeyboardInterrupt:
            console.print("stopped; the same command continues from the committed rounds")
            raise typer.Exit(130) from None
        finally:
            _report(folder, runs, sweep.metric)
    for run, reason in failed:
        console.print(f"[bold red]failed[/] {run.folder}: {escape(reason)}", soft_wrap=True)
    return not failed


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a sweep's folder; the end of the process releases it.

    Raises:
        SettingsError: another process holds it.
        StateError: the folder cannot be written.
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
                f"another process executes the sweep in {folder}",
                remedy="wait for its end, or choose another --out",
            ) from error
        yield


def _execute(runs: Sequence[SweepRun], jobs: int) -> list[tuple[SweepRun, str]]:
    """Execute the runs under a progress bar over all rounds; return each failed run and why."""
    failed, last_line, num_ended = [], "", 0
    rounds = {run.folder: 0 for run in runs}
    bar = Progress(
        TextColumn("{task.fields[runs]} runs, round"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[line]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar, closing(run_all(runs, jobs=jobs)) as updates:
        total = sum(run.settings.rounds for run in runs)
        shown = bar.add_task("rounds", total=total, runs=f"0/{len(runs)}", line="")
        for run, progress in updates:
            rounds[run.folder] = run.settings.rounds if progress.ended else progress.round
            if progress.ended is None:
                last_line = progress.line
            else:
                num_ended += 1
                if progress.ended == "failed":
                    failed.append((run, progress.line))
                if not console.is_terminal:
                    name = f"{run.folder.parent.name}/{run.folder.name}"
                    outcome = ": ".join(filter(None, (progress.ended, progress.line)))
                    line = f"run {num_ended:>4}/{len(runs)}  {name}  {outcome}"
                    console.print(escape(line), soft_wrap=True)
            bar.update(
                shown,
                completed=sum(rounds.values()),
                runs=f"{num_ended}/{len(runs)}",
                line=last_line,
            )
    return failed


def _report(folder: Path, runs: Sequence[SweepRun], preferred_metric: str | None) -> None:
    """Write the tables and the plot of the runs that have ended, and print the points."""
    results = [result for run in runs if (result := read_result(run)) is not None]
    if not results:
        return
    metric = choose_metric(results, preferred_metric)
    summaries = summarize(runs, results, metric)
    write_tables(folder, summaries, results, metric)
    plot = draw_sweep(folder, summaries, metric)
    console.print(table_of(summaries, metric))
    if len(results) < len(runs):
        console.print(f"  {len(results)} of {len(runs)} runs are done; the same command continues")
    files = {"points": folder / POINTS_FILE, "runs": folder / RUNS_FILE, "plot": plot}
    for title, path in files.items():
        if path is not None:
            console.print(f"  {title:<12}{path}", soft_wrap=True)


def table_of(summaries: Sequence[Summary], metric: str) -> Table:
    """Return the points as a table, best first: mean and spread of the metric over the seeds."""
    names = short_names([one.point for one in summaries])
    table = Table(box=None, pad_edge=False, title_justify="left")
    for name in names.values() or ["point"]:
        table.add_column(name, overflow="fold")
    for title in ("seeds", metric.replace("_", " "), "spread", "range"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in summaries:
        settings = [str(one.point[key]) for key in names] or ["as it is"]
        seeds = f"{len(one.values)}/{one.num_runs}"
        table.add_row(*map(escape, settings), seeds, *_cells(one))
    return table


def _cells(one: Summary) -> tuple[str, str, str]:
    """Return the cells mean, spread and range of a point."""
    diverged = f"{one.num_diverged} diverged" if one.num_diverged else ""
    if one.mean is None:
        return diverged or "-", "", ""
    spread = "" if one.spread is None else f"{one.spread:.4f}"
    values = f"{min(one.values):.4f} to {max(one.values):.4f}"
    return f"{one.mean:.4f}", spread, f"{values}, {diverged}" if diverged else values
