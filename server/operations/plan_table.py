"""``headwater-server plan``: a round's plans as a table, and who had none, from rounds.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from headwater.common.errors import SettingsError
from headwater.common.system.console import console
from headwater.server.operations.round_log import ROUNDS, read_rows


def show_plan(folder: Path, *, round_number: int | None, explain: bool) -> None:
    """Print one round's clients: what each was asked for, why, and how long it took.

    With ``explain`` also who was left out, and why.

    Raises:
        SettingsError: there is no such run, or no such round in it.
    """
    rows = read_rows(folder)
    if not rows:
        raise SettingsError(
            f"{folder / ROUNDS} holds no round", remedy="name a run's folder: --out"
        )
    by_number = {row["round"]: row for row in rows}
    row = rows[-1] if round_number is None else by_number.get(round_number)
    if row is None:
        raise SettingsError(
            f"{folder} has no round {round_number}",
            remedy=f"rounds {rows[0]['round']} to {rows[-1]['round']} are there",
        )
    console.print(plan_table(row, explain=explain))
    if row["num_bounded"]:
        console.print(f"{_devices(row['num_bounded'])} claimed more than is believed")
    if row["left_out"]:
        hint = "" if explain else ": --explain says by how much"
        console.print(f"{_devices(len(row['left_out']))} left out as too slow{hint}")
    for name, why in row["left_out"].items() if explain else ():
        console.print(f"{name} was left out: {why}", soft_wrap=True)
    for name, error in row["refused"].items():
        console.print(f"{name} did not finish: {error}", soft_wrap=True)


def plan_table(row: dict[str, Any], *, explain: bool) -> Table:
    """Return the table of one row of rounds.jsonl."""
    slowest = row["slowest_client_seconds"]
    table = Table(
        title=f"round {row['round']}: {row['num_clients']} of {row['num_invited']} clients, "
        f"{row['num_examples']} examples, slowest {slowest:.3g} s",
        box=SIMPLE_HEAD,
    )
    table.add_column("device")
    for column in ("examples", "K x size", "seconds", "of slowest"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("why this much" if explain else "ended by")
    for client in [*row["clients"], *map(_planned, row.get("masked_clients", []))]:
        share = client["seconds"] / slowest if slowest else 1.0
        table.add_row(
            client["name"],
            str(client["num_examples"]),
            f"{client['accumulation_steps']} x {client['micro_batch_size']}",
            f"{client['seconds']:.3g}",
            f"{share:.0%}",
            _why(client) if explain else client["reason"],
        )
    return table


def _why(client: dict[str, Any]) -> str:
    """Say what bound a device, and what ended its work if that was not the end of its quota."""
    ended = "" if client["reason"] == "quota" else f"; ended by: {client['reason']}"
    return f"{client['plan']}{ended}"


def _devices(number: int) -> str:
    return f"{number} device{'' if number == 1 else 's'}"


def _planned(client: dict[str, Any]) -> dict[str, Any]:
    """Return what a masked round's client was asked for in the words of a plain round's."""
    return {
        **client,
        "num_examples": client["planned_examples"],
        "micro_batch_size": client["planned_micro_batch_size"],
        "accumulation_steps": client["planned_steps"],
        "reason": "masked, as planned",
    }
