"""The command ``headwater-server plan``: shows a round's plans from rounds.jsonl as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from headwater.common.errors import SettingsError
from headwater.common.system.console import console, print_table, print_text
from headwater.common.system.printable import printable, printable_name
from headwater.common.wording import counted, natural
from headwater.server.operations.round_log import ROUNDS, read_rows
from headwater.server.rounds.round_row import figure_of

FIGURES = (
    *("name", "num_examples", "accumulation_steps", "micro_batch_size"),
    *("seconds", "reason", "plan"),
)
MAX_NAME_WIDTH = 24  # in a terminal a longer name continues on the next line


def show_plan(folder: Path, *, round_number: int | None, explain: bool) -> None:
    """Print each client's work in one round and how long it took.

    With ``explain`` also the reason for each plan, and each client that was left out and why.

    Raises:
        SettingsError: the run or the round does not exist.
    """
    rows = read_rows(folder)
    if not rows:
        raise SettingsError(f"{folder / ROUNDS} has no rounds", remedy="name a run's folder: --out")
    by_number = {row["round"]: row for row in rows}
    row = rows[-1] if round_number is None else by_number.get(round_number)
    if row is None:
        raise SettingsError(
            f"{folder} has no round {round_number}",
            remedy=f"it has rounds {rows[0]['round']} to {rows[-1]['round']}",
        )
    print_table(plan_table(row, explain=explain))
    if row["num_bounded"]:
        console.print(
            f"{counted(row['num_bounded'], 'device')} reported more than the server accepts"
        )
    if row["left_out"]:
        hint = "" if explain else ": --explain shows why"
        console.print(f"{counted(len(row['left_out']), 'device')} left out as too slow{hint}")
    for name, reason in row["left_out"].items() if explain else ():
        print_text(f"{name} was left out: {reason}")
    for name, error in sorted(row["refused"].items(), key=lambda one: natural(one[0])):
        print_text(f"{name} did not finish: {error}")


def plan_table(row: dict[str, Any], *, explain: bool) -> Table:
    """Return a row of rounds.jsonl as a table."""
    slowest = row["slowest_client_seconds"]
    table = Table(
        title=f"round {row['round']}: {row['num_clients']} of "
        f"{counted(row['num_invited'], 'client')}, "
        f"{counted(row['num_examples'], 'example')}, slowest {slowest:.3g} s",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    max_width = MAX_NAME_WIDTH if console.is_terminal else None
    table.add_column("device", overflow="fold", max_width=max_width)
    for column in ("examples", "K x size", "seconds", "of slowest"):
        table.add_column(column, justify="right", overflow="fold", min_width=len("seconds"))
    table.add_column("reason for this plan" if explain else "ended by", overflow="fold")
    clients = zip(*(figure_of(row, name) for name in FIGURES), strict=True)
    for name, examples, steps, size, seconds, reason, plan in sorted(
        clients, key=lambda one: natural(one[0])
    ):
        ended = reason or "masked, as planned"
        if explain:
            ended = plan if ended == "quota" else f"{plan}; ended by: {ended}"
        table.add_row(
            Text(printable_name(name)),
            f"{examples:,}",
            f"{steps} x {size}",
            f"{seconds:.3g}",
            f"{seconds / slowest if slowest else 1.0:.0%}",
            Text(printable(ended)),
        )
    return table
