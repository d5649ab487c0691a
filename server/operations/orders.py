"""Orders to a running server (pause, resume, drain), left as a file in the run's folder.

The file is replaced atomically; the server reads it four times a second. No port is needed: every
user who may write to the run's folder may give orders. A round in progress always ends first, so
that no client's work is lost.

| order | effect after the round in progress | duration |
| --- | --- | --- |
| pause | no round begins; devices stay connected and are notified | until ``unpause`` |
| resume (of the command ``unpause``) | rounds begin again | |
| drain | the server dismisses the devices and ends with status 0 | continue with ``--resume`` |

A pause outlasts a restart of the server, because its reason may too; a drain ends with its server.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from headwater.common.errors import SettingsError, StateError
from headwater.common.parsed_text import json_of
from headwater.common.system.atomic_file import regular, write_atomically
from headwater.common.system.console import console
from headwater.common.wording import in_shell
from headwater.server.operations import run_history, run_lock
from headwater.server.operations.run_lock import read_server_state

FILE = "order.json"
# The server reads orders four times a second, and writes its state once.
ANSWER_SECONDS = 10.0
POLL_SECONDS = 0.1

STATES_AFTER = {
    "pause": ("pausing", "paused"),
    "resume": ("waiting", "in a round"),
    "drain": ("draining",),
}

Verb = Literal["pause", "resume", "drain"]
RunState = Literal["waiting", "in a round", "pausing", "paused", "draining", "ended"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """An operator's order and when it was given, in seconds since 1970."""

    verb: Verb
    at: float


def run_state(order: Order | None, *, is_in_round: bool) -> RunState:
    """Return the state of a run; a round in progress ends before an order takes effect.

    | order | in a round | between rounds |
    | --- | --- | --- |
    | none, resume | in a round | waiting |
    | pause | pausing | paused |
    | drain | draining | draining |
    """
    match None if order is None else order.verb:
        case "pause":
            return "pausing" if is_in_round else "paused"
        case "drain":
            return "draining"
    return "in a round" if is_in_round else "waiting"


def write_order(folder: Path, verb: Verb, *, now: float | None = None) -> Order:
    """Leave an order for the server.

    Raises:
        StateError: the folder cannot be written.
    """
    order = Order(verb=verb, at=time.time() if now is None else now)
    try:
        write_atomically(folder / FILE, json.dumps(asdict(order)).encode())
    except OSError as error:
        raise StateError(
            f"cannot write the order to {folder}: {error.strerror}",
            remedy="run the command as the user that the server runs as",
        ) from error
    return order


def read_order(folder: Path) -> Order | None:
    """Return the current order, or None if there is none.

    Raises:
        StateError: the file is not an order, or cannot be read.
    """
    path = folder / FILE
    try:
        fields = json_of(regular(path).read_text(encoding="utf-8"))
        verb, at = fields["verb"], float(fields["at"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path} is not an order: {error}", remedy="remove it") from error
    if verb not in get_args(Verb):
        raise StateError(f"{path} is not an order: {verb!r}", remedy="remove it")
    return Order(verb=verb, at=at)


def order_at_start(order: Order | None) -> Order | None:
    """Return the order that is still valid for a server that starts now: only a pause is."""
    return order if order is not None and order.verb == "pause" else None


def check_run(folder: Path) -> None:
    """Check that a server has run in the folder.

    Raises:
        SettingsError: it holds neither a lock nor a history, or the lock of a simulator.
    """
    if not any((folder / name).exists() for name in (run_lock.FILE, run_history.STATE)):
        problem = "holds no run of a server" if folder.is_dir() else "is not a folder"
        raise SettingsError(f"{folder} {problem}", remedy="name the server's own folder: --out DIR")
    if not read_server_state(folder).takes_orders:
        raise SettingsError(
            f"the run in {folder} is a simulation without a server, which takes no orders",
            remedy="stop it with Ctrl-C; headwater-simulate --resume goes on. With --engine grpc a "
            "simulation has a server",
        )


def give_order(folder: Path, verb: Verb) -> None:
    """Leave an order, wait until the server has taken it, and print the result.

    Raises:
        SettingsError: there is no run in the folder, or no server to take the order.
        StateError: the folder cannot be read or written.
    """
    check_run(folder)
    server = read_server_state(folder)
    is_up, restart = server.is_up, f"{server.command} --resume --out {in_shell(folder)}"
    if not is_up and not (verb == "resume" and _is_paused(folder)):
        what = "unpause" if verb == "resume" else verb
        raise SettingsError(
            f"no server runs in {folder}, so there is nothing to {what}",
            remedy=f"to continue its run: {restart}",
        )
    order = read_order(folder)
    if is_up and verb == "resume" and (order is None or order.verb == "resume"):
        console.print("the run is not paused: there is nothing to undo", soft_wrap=True)
        return
    write_order(folder, verb)
    if is_up:
        answer = _wait_for_answer(folder, verb, restart)
    else:
        answer = f"no longer paused; no server is running, start it with: {restart}"
    console.print(answer, soft_wrap=True)


def _is_paused(folder: Path) -> bool:
    order = read_order(folder)
    return order is not None and order.verb == "pause"


def _wait_for_answer(folder: Path, verb: Verb, restart: str) -> str:
    """Wait until the server's state shows the order; return a sentence about it."""
    end = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < end:
        state = run_history.read(folder).state.get("stands")
        if state in STATES_AFTER[verb]:
            return _describe(str(state), folder, restart)
        if verb == "drain" and not read_server_state(folder).is_up:
            return f"the server has ended; continue with: {restart}"
        time.sleep(POLL_SECONDS)
    return (
        f"the order is written, but the server has not confirmed it within {ANSWER_SECONDS:g} s: "
        f"check headwater-server status --out {in_shell(folder)}"
    )


def _describe(state: str, folder: Path, restart: str) -> str:
    undo = f"headwater-server unpause --out {in_shell(folder)}"
    return {
        "pausing": f"pausing: the round in progress ends first; to undo: {undo}",
        "paused": f"paused: no round begins, the devices stay connected; to undo: {undo}",
        "draining": "draining: the round in progress ends first, then the server; continue later "
        f"with: {restart}",
        "waiting": "resumed: the next round begins as soon as enough devices are connected",
        "in a round": "resumed: a round is in progress",
    }[state]
