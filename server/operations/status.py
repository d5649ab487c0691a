"""The command ``headwater-server status``: shows whether a server runs, its run and its devices.

It reads the run's folder, so it works whether or not the server runs. It does not import torch,
because container health checks run it twice a minute. Its exit status is a health check: 0 if the
server runs and its heartbeat is recent, or if the run is finished; 1 otherwise.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from headwater import __version__
from headwater.common.errors import SettingsError
from headwater.common.settings.fields import has_labels
from headwater.common.system.console import console
from headwater.common.system.json_logs import rfc3339, to_json_value
from headwater.common.system.printable import printable, printable_name
from headwater.common.transport.limits import same_version
from headwater.common.wording import (
    counted,
    duration_text,
    figure_text,
    in_shell,
    names_text,
    natural,
)
from headwater.server.features import status_fields, status_lines
from headwater.server.operations import run_history
from headwater.server.operations.orders import check_run, read_order
from headwater.server.operations.run_history import HistorySnapshot
from headwater.server.operations.run_lock import ServerState, read_server_state
from headwater.server.transport.device_records import DeviceRecord

MAX_ROWS = 100
COLUMNS = ("seen", "K", "memory", "heat", "battery", "up", "down")
MAX_NAME_WIDTH = 24  # in a terminal a longer name continues on the next line
ABSENT = "-"
# A round that has waited this long for a device is reported.
LONG_WAIT_SECONDS = 60.0
TIMES = ("first_seen", "last_seen", "refused_at", "ended_at", "at")


def read_status(folder: Path, *, now: float | None = None) -> dict[str, Any]:
    """Return a run's status, as ``--json`` prints it.

    Raises:
        SettingsError: there is no run in the folder.
        StateError: it cannot be read.
    """
    check_run(folder)
    now = time.time() if now is None else now
    server, snapshot = read_server_state(folder, now=now), run_history.read(folder)
    state, order = snapshot.state, read_order(folder)
    devices = [_device(one, server, now) for one in snapshot.devices]
    is_finished = not server.is_up and _is_finished(snapshot)
    return {
        "is_up": server.is_up,
        "is_finished": is_finished,
        "is_well": server.is_well,
        "heartbeat_seconds": server.heartbeat_seconds,
        "pid": server.info.get("pid") if server.is_up else None,
        "address": server.info.get("address") if server.is_up else None,
        "command": server.command,
        "stands": state.get("stands") if server.is_up else "finished" if is_finished else "down",
        "order": None if order is None or order.verb == "resume" else order.verb,
        "round": state.get("round"),
        "rounds": state.get("rounds"),
        "awaited": state.get("awaited", []) if server.is_up else [],
        "num_awaited": state.get("num_awaited", 0) if server.is_up else 0,
        "awaited_seconds": state.get("awaited_seconds") if server.is_up else None,
        "history_failures": state.get("num_failures"),
        "last_round": _format_times(state.get("last_round") or {}) or None,
        "events": [_format_times(event) for event in snapshot.events],
        **status_fields(folder),
        "num_connected": sum(device["is_connected"] for device in devices),
        "devices": devices,
    }


def _is_finished(snapshot: HistorySnapshot) -> bool:
    """Return whether the last server ended because the run was done, perhaps while it drained."""
    last = next((one for one in snapshot.events if one["kind"] in ("started", "ended")), None)
    if last is None or last["kind"] == "started":
        return False
    num_done, rounds = snapshot.state.get("round") or 0, snapshot.state.get("rounds")
    return last["detail"] == "done" or (isinstance(rounds, int) and 0 < rounds <= num_done)


def exit_status(status: dict[str, Any]) -> int:
    """Return 0 if the server is well or the run is finished, otherwise 1."""
    return 0 if status["is_well"] or status["is_finished"] else 1


def _device(device: DeviceRecord, server: ServerState, now: float) -> dict[str, Any]:
    """Return a device's fields; after a server was killed, no device counts as connected."""
    fields = asdict(device)
    if device.is_connected:
        fields["last_seen"] = now if server.is_up else now - (server.heartbeat_seconds or 0.0)
    fields["is_connected"] = device.is_connected and server.is_up
    last_seen = fields["last_seen"]
    fields["last_seen_seconds"] = None if last_seen is None else now - last_seen
    return _format_times(fields)


def _format_times(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: rfc3339(value) if key in TIMES and value is not None else value
        for key, value in fields.items()
    }


def as_json(status: dict[str, Any]) -> str:
    """Return the status as one JSON object."""
    return json.dumps(to_json_value(status), allow_nan=False)


def of_labels(status: dict[str, Any], wanted: str) -> dict[str, Any]:
    """Return the status with the devices of these labels alone.

    Raises:
        SettingsError: they are no labels, or no device has them.
    """
    try:
        found = [one for one in status["devices"] if has_labels(one["labels"], wanted)]
    except ValueError as error:
        raise SettingsError(f"--devices {wanted}: {error}") from error
    if not found:
        known = {label for one in status["devices"] for label in (one["labels"] or "").split(",")}
        raise SettingsError(
            f"no device has the labels {wanted}",
            remedy=f"the devices have: {', '.join(sorted(known - {''})) or 'no labels'}",
        )
    return status | {"devices": found}


def as_table(status: dict[str, Any], folder: Path) -> RenderableType:
    """Return the status as text: two lines about the run, then a table of its devices."""
    parts: list[RenderableType] = [_headline(status, folder)]
    waited = status["awaited_seconds"] or 0.0
    if status["awaited"] and waited >= LONG_WAIT_SECONDS:
        names = escape(printable(names_text(status["awaited"], status["num_awaited"])))
        parts.append(f"it has waited {duration_text(waited)} for {names}")
    last = status["last_round"]
    if last is not None:
        unknown = "not finite" if status["privacy"] is None else "hidden"
        loss = unknown if last["loss"] is None else figure_text(last["loss"])
        clients = f"{last['num_clients']} of {counted(last['num_invited'], 'client')}"
        examples = counted(last["num_examples"], "example")
        parts.append(
            f"last round {last['round']}: loss {loss}, {clients}, {examples}, "
            f"{last['seconds']:.3g} s"
        )
        if last.get("num_outliers"):
            parts.append(f"{counted(last['num_outliers'], 'device')} far beyond the others")
    parts += status_lines(status)
    if status["history_failures"]:
        failures = counted(status["history_failures"], "write")
        parts.append(f"[bold red]{failures} of the history failed[/]")
    if status["devices"]:
        shown = sorted(
            status["devices"], key=lambda one: (not one["is_connected"], natural(one["name"]))
        )
        parts.append(_fleet(shown[:MAX_ROWS]))
        if len(shown) > MAX_ROWS:
            parts.append(f"and {len(shown) - MAX_ROWS} more: --json shows all")
        parts += [_refusal(device) for device in shown[:MAX_ROWS] if device["refusal_code"]]
        tasks = {one["task"] for one in shown if one["is_connected"] and one["task"]}
        if len(tasks) > 1:
            from headwater.common.user_code.task_spec import short_code  # not for a health check

            names = ", ".join(sorted(map(short_code, tasks)))
            parts.append(f"its devices train different code: {escape(printable(names))}")
        parts += _other_versions(shown)
    else:
        parts.append("no device has connected so far")
    return Group(*parts)


def _other_versions(devices: list[dict[str, Any]]) -> list[str]:
    """Return which devices run another version of headwater than this command, and what to do."""
    others: dict[str, list[str]] = {}
    for device in devices:
        if device["version"] not in (None, __version__):
            others.setdefault(device["version"], []).append(device["name"])
    return [
        escape(
            printable(
                f"headwater {found} on {names_text(names, len(names))}, {__version__} "
                f"here: {_remedy(found)}"
            )
        )
        for found, names in others.items()
    ]


def _remedy(found: str) -> str:
    """Return what makes a device's version that of the server: never an older one on the device."""
    try:
        is_newer = Version(found) > Version(__version__)
    except InvalidVersion:
        is_newer = False
    if is_newer:
        return "upgrade the server too: drain it, install the newer version, and --resume"
    return same_version(__version__)


def _headline(status: dict[str, Any], folder: Path) -> str:
    if status["is_finished"]:
        return (
            f"[bold green]finished[/]: {_rounds_done(status)}, ended "
            f"{_ago(status['heartbeat_seconds'])}; the model is in {escape(str(folder))}"
        )
    if not status["is_up"]:
        ago, path = _ago(status["heartbeat_seconds"]), escape(str(folder))
        typed = escape(in_shell(folder))
        line = (
            f"[bold red]down[/]: no server runs in {path}, last heartbeat {ago}; continue with: "
            f"{escape(printable(status['command']))} "
            f"{'--standby' if status['shared_state'] else '--resume'} --out {typed}"
        )
        if status["order"] == "pause":
            line += f"\nstill paused; to undo: headwater-server unpause --out {typed}"
        return line
    word = "[bold green]up[/]" if status["is_well"] else "[bold red]up, but not responding[/]"
    beat = "" if status["is_well"] else f", last heartbeat {_ago(status['heartbeat_seconds'])}"
    return (
        f"{word}: {status['stands'] or 'starting'}, {_rounds_done(status)}, "
        f"{counted(status['num_connected'], 'device')} connected to {status['address']} "
        f"(process {status['pid']}){beat}"
    )


def _rounds_done(status: dict[str, Any]) -> str:
    rounds = status["rounds"]
    if rounds == "forever":
        return f"{counted(status['round'] or 0, 'round')} done, without a last one"
    return f"{status['round'] or 0} of {counted(rounds, 'round') if rounds else '? rounds'} done"


def _fleet(devices: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    max_width = MAX_NAME_WIDTH if console.is_terminal else None
    table.add_column("device", overflow="fold", min_width=6, max_width=max_width)
    for column in COLUMNS:
        table.add_column(column, justify="right", overflow="fold")
    has_labels = any(device["labels"] for device in devices)
    if has_labels:
        table.add_column("labels", overflow="fold")
    for device in devices:
        labels = [printable(device["labels"] or ABSENT)] if has_labels else []
        table.add_row(*map(Text, [*_cells(device), *labels]))
    return table


def _cells(device: dict[str, Any]) -> list[str]:
    steps, size = device["accumulation_steps"], device["micro_batch_size"]
    peak, limit = device["peak_bytes"], device["memory_limit_bytes"]
    heat, battery = device["temperature_celsius"], device["battery"]
    mains = "" if device["is_on_battery"] is not True else " in use"
    return [
        printable_name(device["name"]),
        "connected" if device["is_connected"] else _ago(device["last_seen_seconds"]),
        ABSENT if steps is None else f"{steps} x {size}",
        _memory(peak, limit),
        ABSENT if heat is None else f"{heat:.0f} °C",
        ABSENT if battery is None else f"{battery:.0%}{mains}",
        decimal(device["bytes_up"]),
        decimal(device["bytes_down"]),
    ]


def _memory(peak: int | None, limit: int | None) -> str:
    """Return the peak and its share of the limit; the limit alone before the first round."""
    if peak is None:
        return ABSENT if limit is None else f"of {decimal(limit)}"
    return decimal(peak) if not limit else f"{decimal(peak)}, {peak / limit:.0%}"


def _refusal(device: dict[str, Any]) -> str:
    reason = f"{device['refusal_code']}: {device['refusal_text']}"
    return escape(printable(f"{device['name']} refused at {device['refused_at']}: {reason}"))


def _ago(seconds: float | None) -> str:
    return "never" if seconds is None else f"{duration_text(seconds)} ago"
