"""What a run did in a period, beside the period before: a week's summary for its operator.

``headwater-server report`` prints it. All of it is read from the run's files, also while the run
goes on; nothing is kept for it.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from headwater.common.errors import SettingsError, StateError
from headwater.common.system.json_logs import rfc3339, to_json_value
from headwater.common.system.printable import printable, printable_name
from headwater.common.wording import bytes_text, counted, duration_text, names_text, natural
from headwater.server.operations import run_history
from headwater.server.operations.round_log import ROUNDS, rows_in
from headwater.server.operations.run_lock import read_server_state
from headwater.server.report.round_points import finite, label
from headwater.server.rounds.round_row import figure_of
from headwater.server.transport.device_records import DeviceRecord

MAX_ROWS = 100
MAX_ALERTS = 20
ABSENT = "-"
COUNTS = ("num_aborted", "num_examples", "num_examples_left_out", "bytes_up", "bytes_down")
TITLES = {
    "num_rounds": "rounds",
    "num_aborted": "aborted attempts",
    "num_examples": "examples",
    "num_examples_left_out": "examples left out",
    "num_devices": "devices",
    "bytes_up": "up",
    "bytes_down": "down",
    "loss": "mean loss",
    "epsilon": "epsilon so far",
}
Refusals = defaultdict[str, Counter[str]]
"""How often each device was refused, by the code of the error."""


@dataclass(kw_only=True, slots=True)
class Period:
    """The rounds that were committed in a stretch of time."""

    num_rounds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    losses: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last round that has each."""
    epsilon: float | None = None
    """Spent since the run began."""
    rounds_of: Counter[str] = field(default_factory=Counter)
    refusals: Refusals = field(default_factory=lambda: defaultdict(Counter))

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a round, by its line in rounds.jsonl."""
        self.num_rounds += 1
        self.counts.update({name: _figure(row.get(name)) or 0 for name in COUNTS})
        if (loss := finite(_figure(row["loss"]))) is not None:
            self.losses.append(loss)
        known = ((label(name), finite(_figure(one))) for name, one in row["metrics"].items())
        self.metrics |= {name: value for name, value in known if value is not None}
        epsilon = _figure(row.get("epsilon"))
        self.epsilon = self.epsilon if epsilon is None else epsilon
        self.rounds_of.update(figure_of(row, "name"))
        for name, text in (row.get("refused") or {}).items():
            self.refusals[name.removesuffix(" (again)")][text.partition(":")[0]] += 1

    def figures(self) -> dict[str, Any]:
        """Return the figures by name; the loss is the mean over the rounds that tell theirs."""
        return {
            "num_rounds": self.num_rounds,
            **{name: self.counts[name] for name in COUNTS},
            "num_devices": len(self.rounds_of),
            "loss": sum(self.losses) / len(self.losses) if self.losses else None,
            "metrics": self.metrics,
            "epsilon": self.epsilon,
        }


def _figure(value: Any) -> float | None:
    """Return a number of a row, or None.

    Raises:
        TypeError: it is something else.
    """
    if value is not None and not isinstance(value, int | float):
        raise TypeError(f"{value!r:.80} is no number")
    return value


def summary(folder: Path, *, seconds: float, now: float | None = None) -> dict[str, Any]:
    """Return what the run in a folder did in the last ``seconds``, and in as many before.

    Raises:
        SettingsError: the folder holds no rounds.
        StateError: it cannot be read.
    """
    now = time.time() if now is None else now
    start = now - seconds
    latest, before, num_untimed, number, oldest = Period(), Period(), 0, 0, None
    try:
        for row in rows_in(folder):
            number += 1
            at = row.get("ended_at")
            oldest = oldest or (row["round"], at)
            if not isinstance(at, int | float):
                num_untimed += 1
            elif at > start:
                latest.add(row)
            elif at > start - seconds:
                before.add(row)
        alerts, events = _events(folder, start)
    except OSError as error:
        raise StateError(f"cannot read the run in {folder}: {error.strerror}") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise StateError(
            f"{folder / ROUNDS} has a line, about number {number}, that no run has written: "
            f"{type(error).__name__}: {error}",
            remedy="restore the file from a backup, or take the line out",
        ) from error
    if oldest is None:
        raise SettingsError(
            f"{folder / ROUNDS} holds no rounds", remedy="name a run's folder, its --out"
        )
    first_round, first_at = oldest
    return {
        "seconds": seconds,
        "until": rfc3339(now),
        "latest": latest.figures(),
        "before": before.figures(),
        "devices": _devices(folder, latest, before, start),
        "lost": sorted(before.rounds_of.keys() - latest.rounds_of.keys(), key=natural),
        "alerts": alerts,
        "events": events,
        "num_untimed": num_untimed,
        "is_cut": first_round > 1 and isinstance(first_at, float) and first_at > start - seconds,
    }


def _events(folder: Path, start: float) -> tuple[list[dict[str, str]], dict[str, int]]:
    """Return the alerts since ``start``, oldest first, and how many events of each other kind."""
    recent = [
        event
        for event in run_history.events(folder)
        if isinstance(event["at"], int | float) and event["at"] > start
    ]
    alerts = [one for one in recent if one["kind"] == "alert"]
    kinds = Counter(str(one["kind"]) for one in recent if one["kind"] != "alert")
    return [{"at": rfc3339(one["at"]), "text": str(one["detail"])} for one in alerts], {**kinds}


def _devices(folder: Path, latest: Period, before: Period, start: float) -> list[dict[str, Any]]:
    """Return each device's rounds, refusals and whether it is connected, by name."""
    records = {one.name: one for one in run_history.read(folder).devices}
    is_up = read_server_state(folder).is_up
    names = {*records, *latest.rounds_of, *before.rounds_of, *latest.refusals}
    return [
        _device(name, records.get(name) or DeviceRecord(name=name), latest, before, start, is_up)
        for name in sorted(names, key=natural)
    ]


def _device(
    name: str, record: DeviceRecord, latest: Period, before: Period, start: float, is_up: bool
) -> dict[str, Any]:
    refusals = {**latest.refusals.get(name, {})}
    if record.refusal_code is not None and (record.refused_at or 0.0) > start:
        refusals.setdefault(record.refusal_code, 1)  # perhaps of a connection, outside a round
    seen = record.last_seen
    return {
        "name": name,
        "num_rounds": latest.rounds_of[name],
        "num_rounds_before": before.rounds_of[name],
        "is_connected": record.is_connected and is_up,
        "last_seen": None if seen is None else rfc3339(seen),
        "refusals": refusals,
    }


def as_json(found: Mapping[str, Any]) -> str:
    """Return a summary as one JSON object."""
    return json.dumps(to_json_value(dict(found)), allow_nan=False)


def as_table(found: Mapping[str, Any], folder: Path) -> RenderableType:
    """Return a summary as text: the figures of both periods, the devices, what was noteworthy."""
    period = duration_text(found["seconds"])
    parts: list[RenderableType] = [
        escape(printable(f"{folder}: the last {period}, until {found['until']}")),
        _figures(found, period),
        _fleet(found["devices"][:MAX_ROWS], period),
    ]
    if len(found["devices"]) > MAX_ROWS:
        parts.append(f"and {len(found['devices']) - MAX_ROWS} more: --json shows all")
    if found["lost"]:
        lost = names_text([*map(printable_name, found["lost"])], len(found["lost"]))
        parts.append(escape(f"in no round any more: {lost}"))
    if found["events"]:
        kinds = ", ".join(f"{kind} {number}" for kind, number in found["events"].items())
        parts.append(escape(printable(f"events: {kinds}")))
    parts.append(counted(len(found["alerts"]), "alert"))
    parts += [
        escape(printable(f"  {one['at']} {one['text']}")) for one in found["alerts"][-MAX_ALERTS:]
    ]
    if found["num_untimed"]:
        parts.append(
            f"not counted, as an earlier version wrote no time: "
            f"{counted(found['num_untimed'], 'round')}"
        )
    if found["is_cut"]:
        parts.append(f"{ROUNDS} begins within these periods: older rounds are deleted")
    return Group(*parts)


def _figures(found: Mapping[str, Any], period: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for title in (f"last {period}", f"{period} before"):
        table.add_column(title, justify="right", overflow="fold")
    both = found["latest"], found["before"]
    for name, title in TITLES.items():
        values = [one[name] for one in both]
        if any(values) or name == "num_rounds":
            table.add_row(title, *(_shown(name, value) for value in values))
    for name in dict.fromkeys((*both[0]["metrics"], *both[1]["metrics"])):
        values = [one["metrics"].get(name) for one in both]
        table.add_row(Text(name), *(_shown(name, value) for value in values))
    return table


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return ABSENT
    if name.startswith("bytes_"):
        return bytes_text(value)
    return f"{value:,}" if name.startswith("num_") else f"{value:.4g}"


def _fleet(devices: list[dict[str, Any]], period: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("device", overflow="fold")
    for title in (f"rounds, last {period}", "before"):
        table.add_column(title, justify="right")
    for title in ("seen", "refused"):
        table.add_column(title, overflow="fold")
    for one in devices:
        seen = "connected" if one["is_connected"] else one["last_seen"] or ABSENT
        refusals = one["refusals"].items()
        refused = ", ".join(f"{printable_name(code)} {number}" for code, number in refusals)
        table.add_row(
            Text(printable_name(one["name"])),
            f"{one['num_rounds']:,}",
            f"{one['num_rounds_before']:,}",
            seen,
            Text(refused),
        )
    return table
