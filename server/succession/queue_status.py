"""The part of ``headwater-server status`` about the runs that wait, and the one that followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.markup import escape

from headwater.common.system.printable import printable
from headwater.common.wording import counted
from headwater.server.succession.run_queue import QueuedRun, has_queue, last_run, queued_runs


def status_fields(folder: Path) -> dict[str, Any]:
    """Return the queue, and the folder of the last run that has followed.

    Raises:
        StateError: the queue cannot be read.
    """
    return {
        "queue": [_queued(one) for one in queued_runs(folder)] if has_queue(folder) else [],
        "followed_by": None if (last := last_run(folder)) == folder else str(last),
    }


def status_lines(status: dict[str, Any]) -> list[str]:
    """Return a line for each run of the queue, and one for the run that followed."""
    lines = []
    for at, one in enumerate(status["queue"], start=1):
        number = "no last round" if one["rounds"] == "forever" else counted(one["rounds"], "round")
        when = ", begins after the current round" if one["is_next"] else ""
        lines.append(escape(printable(f"queue {at}: {one['task']}, {number}{when}")))
    if status["followed_by"] is not None:
        lines.append(f"the server went on with the run in {escape(status['followed_by'])}")
    return lines


def _queued(run: QueuedRun) -> dict[str, Any]:
    task, rounds = run.settings.task, run.settings.rounds
    return {
        "file": str(run.file),
        "task": task,
        "rounds": rounds,
        "is_next": run.is_next,
    }
