"""``headwater-simulate compare``: runs what is missing, prints tables and a sentence of advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from headwater.common.errors import StateError
from headwater.common.settings.sources import read_tree
from headwater.common.system.atomic_file import write_atomically
from headwater.common.system.console import console, print_table, print_text, print_titled
from headwater.common.system.printable import printable
from headwater.common.user_code.task_spec import find_task_class
from headwater.common.wording import counted
from headwater.simulation.compare.advice import advice_of
from headwater.simulation.compare.budget import parse_budget
from headwater.simulation.compare.candidates import Shared
from headwater.simulation.compare.comparison import Comparison, plan_comparison
from headwater.simulation.compare.plot import draw_comparison
from headwater.simulation.compare.record import write_record
from headwater.simulation.compare.standing import Standing, derived_target, ranked
from headwater.simulation.compare.table import equal_table, search_line, target_table
from headwater.simulation.sweep.execution import execute, locked
from headwater.simulation.sweep.grid import SweepRun
from headwater.simulation.sweep.results import LOSS

DEFAULT_OUT = Path("runs") / "compare"
SETTINGS = "best.toml"
BUDGET, SEEDS = "rounds=50", (0, 1, 2)
QUICK_BUDGET, QUICK_SEEDS = "rounds=24", (0,)
"""Of a quick comparison, where none is given."""


def run_comparison(
    config: Path | None,
    *,
    overrides: Mapping[str, Any],
    budget: str | None,
    seeds: Sequence[int] | None,
    metric: str | None,
    target: float | None,
    jobs: int,
    out: Path | None,
    is_quick: bool = False,
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
        seeds=seeds or (QUICK_SEEDS if is_quick else SEEDS),
        budget=parse_budget(budget or (QUICK_BUDGET if is_quick else BUDGET)),
        metric=metric,
        folder=out or DEFAULT_OUT,
        is_quick=is_quick,
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
        is_smaller = comparison.is_smaller_better(metric)
        target = derived_target(standings, is_smaller_better=is_smaller)
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
        **_settings_file(comparison, standings, target),
        "plot": draw_comparison(comparison.folder, standings, metric=metric, target=target),
    }
    print_titled([("search", search_line(standings))])
    for title, path in files.items():
        if path is not None:
            console.print(f"  {title:<12}{path}", soft_wrap=True, markup=False)
    if ends := [one.candidate.name for one in standings if one.runs and one.has_rate_at_end]:
        print_text(
            f"The best rate of {', '.join(ends)} is at the end of those tried: a further one "
            "may be better."
        )
    if metric == LOSS:
        print_text(
            "The task has no test examples: the training loss compares algorithms poorly, because "
            "local steps measure it while the model moves."
        )
    if not is_done:
        print_text("Not all runs are done: what is above may still change.")
    if comparison.is_quick:
        print_text(
            f"--quick: {counted(len(comparison.seeds), 'seed')}, and only exact steps and the best "
            "others after a short search. Without --quick the answer is firmer."
        )
    if advice is not None:
        print_text(f"headwater simulate --config {comparison.folder / SETTINGS}")
        print_text(advice)


def _settings_file(
    comparison: Comparison, standings: Sequence[Standing], target: float | None
) -> dict[str, Path]:
    """Write the settings of the algorithm that is advised; return the file, by its title.

    Raises:
        StateError: the folder cannot be written.
    """
    order = [] if target is None else ranked(standings, target, comparison.budget)
    if not order:
        return {}
    path = comparison.folder / SETTINGS
    try:
        write_atomically(path, comparison.advised(order[0]).to_toml().encode())
    except OSError as error:
        raise StateError(f"cannot write {path}: {error.strerror}") from error
    return {"settings": path}


def _print_plan(comparison: Comparison, first: SweepRun) -> None:
    names = ", ".join(one.name for one in comparison.candidates)
    devices = counted(first.settings.simulation.clients, "device")
    console.print(
        f"[bold]{escape(printable(first.settings.task))}[/] on {devices}: {names}; "
        f"{comparison.budget}, {counted(len(comparison.seeds), 'seed')}, in {comparison.folder}",
        soft_wrap=True,
    )
    rounds, words = comparison.num_expected_rounds, counted(comparison.num_expected, "run")
    if rounds is not None:
        words += f" of {counted(rounds, 'round')} in all"
    quick = "" if comparison.is_quick else "; --quick takes far fewer"
    console.print(f"{words}{quick}; how long follows when the first rounds are done")


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
    return execute(
        first,
        jobs=jobs,
        more=fresh,
        num_expected=comparison.num_expected - num_done,
        num_expected_rounds=None if num_done else comparison.num_expected_rounds,
    )
