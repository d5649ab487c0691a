"""The part of ``headwater-server status`` about a run that several servers share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.markup import escape

from headwater.common.system.printable import printable

OWNER = "shared-state"
"""The file of a server's folder that names the shared state which the folder is a copy of."""


def status_fields(folder: Path) -> dict[str, Any]:
    """Return the shared state of the folder's run; None if no other server may serve it."""
    try:
        return {"shared_state": (folder / OWNER).read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError):
        return {"shared_state": None}


def status_lines(status: dict[str, Any]) -> list[str]:
    """Return what to know of a copy that this machine does not serve."""
    shared = status["shared_state"]
    if shared is None or status["is_up"] or status["is_finished"]:
        return []
    return [
        f"this folder is a copy of the run in {escape(printable(shared))}: another server may "
        "serve it, and a standby that follows it shows no more here; --resume is for the one that "
        "served last, --standby for any other"
    ]
