"""``headwater-simulate sweep``: executes the runs that are not done yet and compares the points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from headwater.common.system.console import console
from headwater.common.system.printable import printable, printable_name
from headwater.common.wording import counted
from headwater.simulation.sweep.execution import execute, locked
from headwater.simulation.sweep.grid import Sweep, SweepRun, plan_runs, read_sweep
from headwater.simulation.sweep.plot import draw_sweep
from headwater.simulation.sweep.results import (
    POINTS_FILE,
    RUNS_FILE,
    Summary,
    check_metric,
    choose_metric,
    read_result,
    short_names,
    summarize,
    write_tables,
)


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
    check_metric(sweep.metric)
    folder = out or Path("runs") / (f"sweep-{file.stem}" if file is not None else "sweep")
    chosen = {key: value for key, value in overrides.items() if value is not None}
    runs = plan_runs(tree, sweep, chosen, out=folder)
    with locked(folder):
        remaining = [run for run in runs if read_result(run) is None]
        num_points = len(runs) // len(sweep.seeds)
        num_done = len(runs) - len(remaining)
        done = f"; {num_done} of them done already" if num_done else ""
        console.print(
            f"[bold]{escape(printable(runs[0].settings.task))}[/]: "
            f"{counted(num_points, 'point')} x {counted(len(sweep.seeds), 'seed')} = "
            f"{counted(len(runs), 'run')} in {folder}{done}",
            soft_wrap=True,
        )
        try:
            failed = execute(remaining, jobs=jobs)
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on")
            raise typer.Exit(130) from None
        finally:
            _report(folder, runs, sweep.metric)
    for run, reason in failed:
        why = escape(printable(f"{run.folder}: {reason}"))
        console.print(f"[bold red]failed[/] {why}", soft_wrap=True)
    return not failed


def _report(folder: Path, runs: Sequence[SweepRun], preferred_metric: str | None) -> None:
    """Write the tables and the plot of the runs that have ended, and print the points."""
    results = [result for run in runs if (result := read_result(run)) is not None]
    if not results:
        return
    metric = choose_metric(results, preferred_metric)
    summaries = summarize(runs, results, metric, preferred_metric)
    write_tables(folder, summaries, results, metric)
    plot = draw_sweep(folder, summaries, metric)
    console.print(table_of(summaries, metric))
    if len(results) < len(runs):
        console.print(
            f"  {len(results)} of {counted(len(runs), 'run')} done; the same command goes on"
        )
    files = {"points": folder / POINTS_FILE, "runs": folder / RUNS_FILE, "plot": plot}
    for title, path in files.items():
        if path is not None:
            console.print(f"  {title:<12}{path}", soft_wrap=True, markup=False)


def table_of(summaries: Sequence[Summary], metric: str) -> Table:
    """Return the points as a table, best first: mean and spread of the metric over the seeds."""
    names = short_names([one.point for one in summaries])
    table = Table(box=None, pad_edge=False, title_justify="left")
    for name in names.values() or ["point"]:
        table.add_column(escape(name), overflow="fold")
    for title in ("seeds", escape(printable_name(metric.replace("_", " "))), "spread", "range"):
        table.add_column(title, justify="right", overflow="fold")
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
