"""``headwater-simulate compare``: runs what is missing, prints tables and a sentence of advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from headwater.common.settings.sources import read_tree
from headwater.common.system.console import console, print_table, print_text, print_titled
from headwater.common.system.printable import printable
from headwater.common.task_spec import find_task_class
from headwater.common.wording import counted
from headwater.simulation.compare.advice import advice_of
from headwater.simulation.compare.budget import parse_budget
from headwater.simulation.compare.candidates import Shared
from headwater.simulation.compare.comparison import Comparison, plan_comparison
from headwater.simulation.compare.plot import draw_comparison
from headwater.simulation.compare.record import write_record
from headwater.simulation.compare.standing import derived_target
from headwater.simulation.compare.table import equal_table, search_line, target_table
from headwater.simulation.sweep.execution import execute, locked
from headwater.simulation.sweep.grid import SweepRun
from headwater.simulation.sweep.results import LOSS

DEFAULT_OUT = Path("runs") / "compare"


def run_comparison(
    config: Path | None,
    *,
    overrides: Mapping[str, Any],
    budget: str,
    seeds: Sequence[int],
    metric: str | None,
    target: float | None,
    jobs: int,
    out: Path | None,
) -> bool:
    """Execute the comparison's runs that are not done, and report on all.

    Returns True if every run has ended, complete or diverged. After Ctrl-C, or with failed runs,
    the same call continues the comparison.

    Raises:
        SettingsError: the file or a setting is wrong, or another process uses the folder.
        StateError: the folder cannot be written.
        UnknownTask: the task cannot be imported.
    """
    comparison = plan_comparison(
        Shared(tree={} if config is None else read_tree(config), overrides=dict(overrides)),
        seeds=seeds,
        budget=parse_budget(budget),
        metric=metric,
        folder=out or DEFAULT_OUT,
    )
    first = comparison.first_run
    find_task_class(str(first.settings.task))  # an error in it comes before anything else
    with locked(comparison.folder):
        _print_plan(comparison, first)
        try:
            failed = _execute(comparison, jobs)
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on")
            raise typer.Exit(130) from None
        finally:
            report(comparison, target=target)
    for run, reason in failed:
        why = escape(printable(f"{run.folder}: {reason}"))
        console.print(f"[bold red]failed[/] {why}", soft_wrap=True)
    return not failed


def report(comparison: Comparison, *, target: float | None) -> None:
    """Write the record and the plot of the runs that have ended, and print tables and advice."""
    if not comparison.results():
        return
    metric, standings = comparison.chosen_metric(), comparison.standings()
    if target is None:
        target = derived_target(standings, is_smaller_better=metric.endswith(LOSS))
    budget, is_done = comparison.budget, not comparison.due()
    advice = None
    if target is not None:
        advice = advice_of(standings, target=target, budget=budget, metric=metric)
        print_table(equal_table(standings, metric=metric))
        print_table(target_table(standings, metric=metric, target=target, budget=budget))
    files = {
        "record": write_record(
            comparison, standings, metric=metric, target=target, advice=advice, is_done=is_done
        ),
        "plot": draw_comparison(comparison.folder, standings, metric=metric, target=target),
    }
    print_titled([("search", search_line(standings))])
    for title, path in files.items():
        if path is not None:
            console.print(f"  {title:<12}{path}", soft_wrap=True, markup=False)
    if metric == LOSS:
        print_text(
            "The task has no test examples: the training loss compares algorithms poorly, because "
            "local steps measure it while the model moves."
        )
    if not is_done:
        print_text("Not all runs are done: what is above may still change.")
    if advice is not None:
        print_text(advice)


def _print_plan(comparison: Comparison, first: SweepRun) -> None:
    names = ", ".join(one.name for one in comparison.candidates)
    devices = counted(first.settings.simulation.clients, "device")
    console.print(
        f"[bold]{escape(printable(first.settings.task))}[/] on {devices}: {names}; "
        f"{comparison.budget}, {counted(len(comparison.seeds), 'seed')}, in {comparison.folder}",
        soft_wrap=True,
    )


def _execute(comparison: Comparison, jobs: int) -> list[tuple[SweepRun, str]]:
    """Execute the runs that are due, and those that become due; return each failed run and why."""
    started: set[Path] = set()

    def fresh() -> list[SweepRun]:
        runs = [run for run in comparison.due() if run.folder not in started]
        started.update(run.folder for run in runs)
        return runs

    num_done = len(comparison.results())
    first = fresh()
    if num_done:
        console.print(f"{counted(num_done, 'run')} done already")
    expected = comparison.num_expected - num_done
    return execute(first, jobs=jobs, more=fresh, num_expected=expected)
