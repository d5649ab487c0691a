"""``headwater-server pause``, ``resume`` and ``drain``: give an order, and say what came of it."""

from __future__ import annotations

import time
from pathlib import Path

from headwater.common.errors import SettingsError
from headwater.common.system.console import console
from headwater.server.operations import history, orders
from headwater.server.operations import run_lock as presence
from headwater.server.operations.orders import Verb
from headwater.server.operations.status import check_run

# The server looks four times a second, and writes how it stands once.
ANSWER_SECONDS = 10.0
POLL_SECONDS = 0.1

HEARD = {
    "pause": ("pausing", "paused"),
    "resume": ("waiting", "in a round"),
    "drain": ("draining",),
}


def give_order(folder: Path, verb: Verb) -> None:
    """Leave an order and wait a moment for the server to take it.

    Raises:
        SettingsError: there is no run in the folder, or no server that could take the order.
        StateError: the folder cannot be read or written.
    """
    check_run(folder)
    seen = presence.read_server_state(folder)
    is_up, go_on = seen.is_up, f"{seen.command} --resume --out {folder}"
    if not is_up and not (verb == "resume" and _is_paused(folder)):
        raise SettingsError(
            f"no server runs in {folder}, so there is nothing to {verb}",
            remedy=f"to go on with its run: {go_on}",
        )
    orders.give(folder, verb)
    if not is_up:
        console.print(
            f"no longer paused; no server runs now, start it with: {go_on}", soft_wrap=True
        )
        return
    console.print(_answer(folder, verb, go_on), soft_wrap=True)


def _is_paused(folder: Path) -> bool:
    order = orders.standing(folder)
    return order is not None and order.verb == "pause"


def _answer(folder: Path, verb: Verb, go_on: str) -> str:
    """Wait until the server stands as it was told to, and say so in words."""
    end = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < end:
        found = history.read(folder)
        stands = None if found is None else found.state.get("stands")
        if stands in HEARD[verb]:
            return _in_words(str(stands), folder, go_on)
        if verb == "drain" and not presence.read_server_state(folder).is_up:
            return f"the server has ended; go on with: {go_on}"
        time.sleep(POLL_SECONDS)
    return (
        f"the order is left, and the server has not said within {ANSWER_SECONDS:g} s that it took "
        f"it: look at headwater-server status --out {folder}"
    )


def _in_words(stands: str, folder: Path, go_on: str) -> str:
    undo = f"headwater-server resume --out {folder}"
    return {
        "pausing": f"pausing: the round in progress ends first; to undo it: {undo}",
        "paused": f"paused: no round begins, the devices stay connected; to undo it: {undo}",
        "draining": "draining: the round in progress ends first, then the server; go on later "
        f"with: {go_on}",
        "waiting": "resumed: the next round begins as soon as enough devices are there",
        "in a round": "resumed: a round is in progress",
    }[stands]
