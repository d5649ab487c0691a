"""A round's figures as the page draws them, from a live row or from a line of rounds.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headwater.common.system.printable import printable
from headwater.server.rounds.round_row import Row, field_of, figure_of

Point = dict[str, Any]

FIGURES = (
    *("round", "num_clients", "num_invited", "num_examples", "weight", "loss", "learning_rate"),
    *("seconds", "virtual_seconds", "slowest_client_seconds", "bytes_up", "bytes_down"),
    *("target", "noise_scale", "gradient_variance", "squared_gradient", "heterogeneity"),
    *("num_examples_left_out", "num_aborted", "num_epoch_examples", "epsilon", "delta"),
)
MAX_NAMES = 3  # of the clients that hardly have a share
MAX_METRICS = 12
MAX_NAME_CHARACTERS = 128  # as many as a device's name may have


def point_of(row: Row) -> Point:
    """Return a round's figures by name; what is unknown or not finite is None."""
    point = {name: finite(field_of(row, name)) for name in FIGURES}
    metrics = dict(list(field_of(row, "metrics").items())[:MAX_METRICS])
    steps = figure_of(row, "accumulation_steps")
    return point | {
        "metrics": {label(name): finite(value) for name, value in metrics.items()},
        "split": _finite_parts(field_of(row, "seconds_split")),
        "client_split": _finite_parts(field_of(row, "client_seconds")),
        "k_min": min(steps, default=None),
        "k_max": max(steps, default=None),
        "num_left_out": len(field_of(row, "left_out") or ()),
        "below_share": [label(name) for name in (field_of(row, "below_share") or ())[:MAX_NAMES]],
        "num_below_share": len(field_of(row, "below_share") or ()),
        "num_refused": len(field_of(row, "refused") or ()),
        "is_masked": bool(field_of(row, "masked_clients")),
    }


def finite(value: Any) -> Any:
    """Return the value; None in place of NaN and infinities, which JSON has no numbers for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _finite_parts(parts: Mapping[str, float] | None) -> dict[str, Any]:
    return {name: finite(value) for name, value in (parts or {}).items()}


def label(name: str) -> str:
    """Return a name of the task's or of a device's, fit to be shown."""
    return printable(name, max_characters=MAX_NAME_CHARACTERS)


def ring_of(row: Row) -> dict[str, Any] | None:
    """Return what the server saw of a masked round, in its ring; None of a plain round."""
    masked, opened = field_of(row, "ring_masked"), field_of(row, "ring_opened")
    if not masked or not opened:
        return None
    return {"round": field_of(row, "round"), "masked": [*masked], "opened": [*opened]}


def task_label(task: str | None) -> str:
    """Return a task's name without the folders before it."""
    return label((task or "headwater").rpartition("/")[2])
