"""The commands ``headwater-server pause``, ``resume``, ``drain`` and ``submit``."""

from __future__ import annotations

import time
from pathlib import Path

from headwater.common.errors import SettingsError
from headwater.common.system.console import console
from headwater.server.operations import sqlite_history
from headwater.server.operations.orders import Verb, read_order, write_order
from headwater.server.operations.run_lock import read_server_state
from headwater.server.operations.status import check_run

# The server reads orders four times a second, and writes its state once.
ANSWER_SECONDS = 10.0
POLL_SECONDS = 0.1

STATES_AFTER = {
    "pause": ("pausing", "paused"),
    "resume": ("waiting", "in a round"),
    "drain": ("draining",),
}


def give_order(folder: Path, verb: Verb) -> None:
    """Leave an order, wait until the server has taken it, and print the result.

    Raises:
        SettingsError: there is no run in the folder, or no server to take the order.
        StateError: the folder cannot be read or written.
    """
    check_run(folder)
    server = read_server_state(folder)
    is_up, restart = server.is_up, f"{server.command} --resume --out {folder}"
    if not is_up and not (verb == "resume" and _is_paused(folder)):
        raise SettingsError(
            f"no server runs in {folder}, so there is nothing to {verb}",
            remedy=f"to continue its run: {restart}",
        )
    write_order(folder, verb)
    if is_up:
        answer = _wait_for_answer(folder, verb, restart)
    else:
        answer = f"no longer paused; no server is running, start it with: {restart}"
    console.print(answer, soft_wrap=True)


def submit_run(config: Path, folder: Path, *, is_next: bool) -> None:
    """Put a run into the queue of the run in a folder, and print when it begins.

    Raises:
        SettingsError: there is no run in the folder.
        HeadwaterError: see ``read_submission`` and ``submit``.
    """
    from headwater.common.settings.schema import SETTINGS_FILE
    from headwater.common.settings.sources import load
    from headwater.server.succession.run_queue import last_run, queued_runs, submit
    from headwater.server.succession.submission import read_submission

    last = last_run(folder)
    check_run(last)
    file = last / SETTINGS_FILE
    if file.exists() and load(file, {}).standby.shared_state is not None:
        raise SettingsError(
            f"the run in {last} has a standby server, and such a run has no queue",
            remedy="end it with drain, and start the next run with its own --shared-state",
        )
    if not read_server_state(last).follows_queue:
        raise SettingsError(
            f"the server of the run in {last} takes no runs from a queue: it is one of the Python "
            "API or of the simulator",
            remedy="serve the run with headwater-server, or start the next run when this one ends",
        )
    is_same = read_server_state(last).info.get("working_folder") == str(Path.cwd())
    settings = read_submission(config, has_other_folder=not is_same)
    folder = submit(folder, settings, is_next=is_next)
    server, number = read_server_state(folder), len(queued_runs(folder))
    if not server.is_up:
        when = f"no server runs; the queue goes on with: {server.command} --resume --out {folder}"
    elif is_next:
        when = "it begins after the current round"
    else:
        when = "it begins when the runs before it have ended; --next begins one after this round"
    console.print(f"{number} in the queue of {folder}; {when}", soft_wrap=True)


def _is_paused(folder: Path) -> bool:
    order = read_order(folder)
    return order is not None and order.verb == "pause"


def _wait_for_answer(folder: Path, verb: Verb, restart: str) -> str:
    """Wait until the server's state shows the order; return a sentence about it."""
    end = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < end:
        snapshot = sqlite_history.read(folder)
        state = None if snapshot is None else snapshot.state.get("stands")
        if state in STATES_AFTER[verb]:
            return _describe(str(state), folder, restart)
        if verb == "drain" and not read_server_state(folder).is_up:
            return f"the server has ended; continue with: {restart}"
        time.sleep(POLL_SECONDS)
    return (
        f"the order is written, but the server has not confirmed it within {ANSWER_SECONDS:g} s: "
        f"check headwater-server status --out {folder}"
    )


def _describe(state: str, folder: Path, restart: str) -> str:
    undo = f"headwater-server resume --out {folder}"
    return {
        "pausing": f"pausing: the round in progress ends first; to undo: {undo}",
        "paused": f"paused: no round begins, the devices stay connected; to undo: {undo}",
        "draining": "draining: the round in progress ends first, then the server; continue later "
        f"with: {restart}",
        "waiting": "resumed: the next round begins as soon as enough devices are connected",
        "in a round": "resumed: a round is in progress",
    }[state]
