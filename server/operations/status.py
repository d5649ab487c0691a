"""``headwater-server status``: whether a server runs, how its run stands, and its fleet as a table.

Read from the run's folder, so it works with the server up or down, and without torch, as a
container asks twice a minute. The exit status is that of a
health check: 0 if the server is up and its heartbeat fresh, 1 otherwise.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from headwater.common.errors import SettingsError
from headwater.common.system.json_logs import plain, rfc3339
from headwater.server.operations import history, orders
from headwater.server.operations import run_lock as presence
from headwater.server.operations.vigil import duration_text, names_text
from headwater.server.transport.device_records import DeviceRecord

MOST_SHOWN = 100
ABSENT = "-"
# A round waits for each of its devices; from here on it is worth a line.
LONG_WAIT_SECONDS = 60.0
TIMES = ("first_seen", "last_seen", "refused_at", "ended_at", "at")


def read_status(folder: Path, *, now: float | None = None) -> dict[str, Any]:
    """Return all that is known of a run, as it goes out with ``--json``.

    Raises:
        SettingsError: there is no run in the folder.
        StateError: it cannot be read.
    """
    check_run(folder)
    now = time.time() if now is None else now
    seen, found = presence.read_server_state(folder, now=now), history.read(folder)
    state = {} if found is None else found.state
    order = orders.standing(folder)
    devices = [] if found is None else [_device(one, seen, now) for one in found.devices]
    return {
        "is_up": seen.is_up,
        "is_well": seen.is_well,
        "heartbeat_seconds": seen.heartbeat_seconds,
        "pid": seen.about.get("pid") if seen.is_up else None,
        "address": seen.about.get("address") if seen.is_up else None,
        "command": seen.command,
        "stands": state.get("stands") if seen.is_up else "down",
        "order": None if order is None or order.verb == "resume" else order.verb,
        "round": state.get("round"),
        "rounds": state.get("rounds"),
        "awaited": state.get("awaited", []) if seen.is_up else [],
        "num_awaited": state.get("num_awaited", 0) if seen.is_up else 0,
        "awaited_seconds": state.get("awaited_seconds") if seen.is_up else None,
        "history_failures": state.get("num_failures"),
        "last_round": None if found is None else _timed(found.last_round or {}) or None,
        "events": [] if found is None else [_timed(event) for event in found.events],
        "num_connected": sum(device["is_connected"] for device in devices),
        "devices": devices,
    }


def check_run(folder: Path) -> None:
    """Hold that a server has run here.

    Raises:
        SettingsError: there is no trace of one.
    """
    if not any((folder / name).exists() for name in (presence.FILE, history.FILE)):
        what = "holds no run of a server" if folder.is_dir() else "is no folder"
        raise SettingsError(f"{folder} {what}", remedy="name the server's own folder: --out DIR")


def _device(device: DeviceRecord, seen: presence.ServerState, now: float) -> dict[str, Any]:
    """Return a device as it is told; a server that was killed could not say who was gone."""
    told = asdict(device)
    if device.is_connected:
        told["last_seen"] = now if seen.is_up else now - (seen.heartbeat_seconds or 0.0)
    told["is_connected"] = device.is_connected and seen.is_up
    told["last_seen_seconds"] = None if told["last_seen"] is None else now - told["last_seen"]
    return _timed(told)


def _timed(told: dict[str, Any]) -> dict[str, Any]:
    return {
        key: rfc3339(value) if key in TIMES and value is not None else value
        for key, value in told.items()
    }


def as_json(status: dict[str, Any]) -> str:
    """Return the status as one JSON object."""
    return json.dumps(plain(status), allow_nan=False)


def as_table(status: dict[str, Any], folder: Path) -> RenderableType:
    """Return the status for a person: two lines on the run, then its devices."""
    parts: list[RenderableType] = [_headline(status, folder)]
    waited = status["awaited_seconds"] or 0.0
    if status["awaited"] and waited >= LONG_WAIT_SECONDS:
        whom = escape(names_text(status["awaited"], status["num_awaited"]))
        parts.append(f"it has waited {duration_text(waited)} for {whom}")
    last = status["last_round"]
    if last is not None:
        loss = "not finite" if last["loss"] is None else f"{last['loss']:.4f}"
        parts.append(
            f"last round {last['round']}: loss {loss}, {last['num_clients']} of "
            f"{last['num_invited']} clients, {last['num_examples']} examples, "
            f"{last['seconds']:.3g} s"
        )
    if status["history_failures"]:
        parts.append(f"[bold red]{status['history_failures']} writes of the history failed[/]")
    if status["devices"]:
        shown = sorted(status["devices"], key=lambda one: (not one["is_connected"], one["name"]))
        parts.append(_fleet(shown[:MOST_SHOWN]))
        if len(shown) > MOST_SHOWN:
            parts.append(f"and {len(shown) - MOST_SHOWN} more: --json has them all")
        parts += [_refusal(device) for device in shown[:MOST_SHOWN] if device["refusal_code"]]
    else:
        parts.append("no device was seen so far")
    return Group(*parts)


def _headline(status: dict[str, Any], folder: Path) -> str:
    if not status["is_up"]:
        ago = _ago(status["heartbeat_seconds"])
        line = (
            f"[bold red]down[/]: no server runs in {escape(str(folder))}, the last was here {ago}"
        )
        where = escape(str(folder))
        goes_on = f"{line}; go on with: {escape(status['command'])} --resume --out {where}"
        if status["order"] == "pause":
            goes_on += f"\nstill paused; undo it with: headwater-server resume --out {where}"
        return goes_on
    word = "[bold green]up[/]" if status["is_well"] else "[bold red]up, but does not answer[/]"
    rounds = f"{status['round'] or 0} of {status['rounds'] or '?'} rounds done"
    beat = "" if status["is_well"] else f", last heartbeat {_ago(status['heartbeat_seconds'])}"
    return (
        f"{word}: {status['stands'] or 'starting'}, {rounds}, {status['num_connected']} devices "
        f"connected to {status['address']} (process {status['pid']}){beat}"
    )


def _fleet(devices: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("device", overflow="fold", min_width=6)
    for column in ("seen", "K", "memory", "heat", "battery", "up", "down"):
        table.add_column(column, justify="right", no_wrap=True)
    for device in devices:
        table.add_row(*_cells(device))
    return table


def _cells(device: dict[str, Any]) -> list[str]:
    steps, size = device["accumulation_steps"], device["micro_batch_size"]
    peak, limit = device["peak_bytes"], device["memory_limit_bytes"]
    heat, battery = device["temperature_celsius"], device["battery"]
    mains = "" if device["is_on_battery"] is not True else " in use"
    return [
        device["name"],
        "connected" if device["is_connected"] else _ago(device["last_seen_seconds"]),
        ABSENT if steps is None else f"{steps} x {size}",
        _memory(peak, limit),
        ABSENT if heat is None else f"{heat:.0f} °C",
        ABSENT if battery is None else f"{battery:.0%}{mains}",
        decimal(device["bytes_up"]),
        decimal(device["bytes_down"]),
    ]


def _memory(peak: int | None, limit: int | None) -> str:
    """Return the peak, and its share of the limit; of a device that has not trained, the limit."""
    if peak is None:
        return ABSENT if limit is None else f"of {decimal(limit)}"
    return decimal(peak) if not limit else f"{decimal(peak)}, {peak / limit:.0%}"


def _refusal(device: dict[str, Any]) -> str:
    why = escape(f"{device['refusal_code']}: {device['refusal_text']}")
    return f"{escape(device['name'])} refused at {device['refused_at']}: {why}"


def _ago(seconds: float | None) -> str:
    """Say how long ago something was, to one figure that matters: 12 s, 3 min, 5 h, 2 d ago."""
    if seconds is None:
        return "never"
    return f"{duration_text(seconds)} ago"
