"""The file privacy.json of a run's folder: the noise of every sum that was ever opened.

An entry is on disk before its sum is used. So the file also has the sums of rounds that a crash
undid, which the checkpoint does not have: they were opened, and perhaps seen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwater.common.errors import CheckpointCorrupt, StateError
from headwater.common.parsed_text import json_of
from headwater.common.settings.rounds import PrivacyUnit
from headwater.common.system.atomic_file import write_atomically
from headwater.common.wording import counted
from headwater.server.privacy.example_epochs import ExampleEpochs, from_json

PRIVACY_FILE = "privacy.json"
BANDED = "banded"


def read_events(folder: Path | None, *, num_rounds: int = 0) -> list[tuple[float, int]]:
    """Return the events in the file; none without a folder, or before the first sum.

    Every committed round has opened a sum: a file with fewer than ``num_rounds`` is not the run's.

    Raises:
        CheckpointCorrupt: the file cannot be read, has too few sums, or is missing though there
            were rounds.
    """
    path = None if folder is None else folder / PRIVACY_FILE
    if path is None or (not num_rounds and not path.exists()):
        return []
    try:
        rows = json_of(path.read_text(encoding="utf-8"))["sums"]
        events = [(float(row["noise_multiplier"]), int(row["count"])) for row in rows]
        if not all(0 < multiplier < math.inf and count > 0 for multiplier, count in events):
            raise ValueError("an entry is not positive, or infinite")
        if (found := sum(count for _, count in events)) < num_rounds:
            raise ValueError(f"{counted(found, 'sum')}, and the run has {num_rounds} rounds")
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise _corrupt(path, str(error)) from error
    return events


def read_epochs(folder: Path | None) -> ExampleEpochs | None:
    """Return how far the devices are in their epochs; None if a sum was opened without that.

    Raises:
        CheckpointCorrupt: the file cannot be read.
    """
    assert folder is not None  # ``read_events`` found some
    path = folder / PRIVACY_FILE
    try:
        plain = json_of(path.read_text(encoding="utf-8")).get("epochs")
        return None if plain is None else from_json(plain)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(path, str(error)) from error


def read_banded(folder: Path | None) -> Mapping[str, Any] | None:
    """Return the state of correlated noise; None without a file, or with independent noise.

    Raises:
        CheckpointCorrupt: the file cannot be read.
    """
    path = None if folder is None else folder / PRIVACY_FILE
    if path is None or not path.exists():
        return None
    try:
        found: Mapping[str, Any] | None = json_of(path.read_text(encoding="utf-8")).get(BANDED)
    except (OSError, ValueError, AttributeError) as error:
        raise _corrupt(path, str(error)) from error
    return found


def _corrupt(path: Path, why: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{path} does not hold what the run has spent of its privacy: {why}",
        remedy="restore it from a backup; without it nobody knows what was spent",
    )


def spent_in(folder: Path) -> dict[str, float | str] | None:
    """Return epsilon, delta and their unit in a folder's file; None if there is none."""
    try:
        content = json_of((folder / PRIVACY_FILE).read_text(encoding="utf-8"))
        figures = {key: float(content[key]) for key in ("epsilon", "delta")}
        return {**figures, "unit": str(content.get("unit", "device"))}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def status_fields(folder: Path) -> dict[str, Any]:
    """Return what a run has spent, for ``headwater-server status``."""
    return {"privacy": spent_in(folder)}


def status_lines(status: Mapping[str, Any]) -> list[str]:
    """Return a line about what a run has spent; none if it is not private."""
    if (spent := status["privacy"]) is None:
        return []
    return [
        f"privacy spent: epsilon {spent['epsilon']:.4g} at delta {spent['delta']:g} for each "
        f"{spent['unit']}"
    ]


def write_events(
    folder: Path | None,
    events: Sequence[tuple[float, int]],
    *,
    epsilon: float,
    delta: float,
    unit: PrivacyUnit,
    epochs: ExampleEpochs | None = None,
    banded: Mapping[str, Any] | None = None,
) -> None:
    """Replace the file; nothing without a folder.

    ``epochs`` is None where every sum counts. ``banded`` is the state of correlated noise.

    Raises:
        StateError: it cannot be written; the old one is untouched.
    """
    if folder is None:
        return
    rows = [{"noise_multiplier": multiplier, "count": count} for multiplier, count in events]
    content: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "unit": unit, "sums": rows}
    if epochs is not None:
        content["epochs"] = epochs.as_json()
    if banded is not None:
        content[BANDED] = banded
    try:
        write_atomically(folder / PRIVACY_FILE, json.dumps(content, indent=1).encode())
    except OSError as error:
        raise StateError(f"cannot write {folder / PRIVACY_FILE}: {error.strerror}") from error
