"""What features bring to a server outside its rounds, and the one list of it.

A feature is imported if the settings, or the run's folder, ask for it. ``server.rounds.features``
lists what features do within the rounds.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

QUEUE, POINTER = "queue", "successor.json"
"""The files of a run behind which others wait, and of one that another has followed."""

# Modules with ``status_fields`` and ``status_lines``, in the order in which the status has them.
STATUS = ("headwater.server.privacy.spent_budget", "headwater.server.succession.queue_status")


def status_fields(folder: Path) -> dict[str, Any]:
    """Return the fields that the features add to a run's status.

    Raises:
        StateError: a file in the folder cannot be read.
    """
    fields: dict[str, Any] = {}
    for name in STATUS:
        fields |= import_module(name).status_fields(folder)
    return fields


def status_lines(status: dict[str, Any]) -> list[str]:
    """Return these fields as lines for people, with rich's markup."""
    return [line for name in STATUS for line in import_module(name).status_lines(status)]


def run_queue(folder: Path) -> Any:
    """Return the module of the queue; None if no run waits behind the one in ``folder``, or has."""
    if not any((folder / name).exists() for name in (QUEUE, POINTER)):
        return None
    return import_module("headwater.server.succession.run_queue")
