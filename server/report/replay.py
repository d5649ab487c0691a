"""A finished run as the page shows it: the rounds of its folder, and each device's last round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwater.common.errors import SettingsError, StateError
from headwater.common.parsed_text import toml_of
from headwater.common.settings.schema import SETTINGS_FILE
from headwater.server.features import report_lines
from headwater.server.operations.round_log import rows_in
from headwater.server.report import device_tiles as tiles_of
from headwater.server.report.device_tiles import MAX_TILES, Tile, new_tile
from headwater.server.report.history import DeviceHistories, RoundHistory
from headwater.server.report.round_points import (
    Point,
    RoundParts,
    label,
    parts_of,
    point_of,
    ring_of,
    task_label,
)


class FinishedRun:
    """The rounds of a run's folder, read once, line by line."""

    def __init__(self, folder: Path) -> None:
        """Read the folder.

        Raises:
            SettingsError: it holds no rounds.
            StateError: it cannot be read.
        """
        self.history = RoundHistory()
        self._tiles: dict[str, Tile] = {}
        self._devices = DeviceHistories()
        last: dict[str, Any] = {}
        try:
            for row in rows_in(folder):
                last = row
                self.history.add(point_of(row))
                self._note(parts_of(row))
        except OSError as error:
            raise StateError(f"cannot read the rounds in {folder}: {error.strerror}") from error
        if not last:
            raise SettingsError(
                f"{folder} holds no rounds", remedy="name the folder of a run, its --out"
            )
        tiles_of.note_left_out(self._tiles, last.get("left_out") or {})
        self._round, self._ring = last["round"], ring_of(last)
        self._folder = folder
        self.about = _about(folder, last)

    def watched(self, is_watched: bool) -> None:
        """Do nothing: no device is at work any more."""

    def status(self) -> dict[str, Any]:
        """Return that the run has ended, and after which round."""
        return {
            "round": self._round,
            "phase": "replay",
            "phase_seconds": 0.0,
            "answered": 0,
            "invited": 0,
            "note": "",
            "ring": self._ring,
            "num_devices": len(self._tiles),
            "has_ended": True,
        }

    def tiles(self) -> dict[str, Tile]:
        """Return each device's tile after its last round."""
        return self._tiles

    def notes(self) -> list[str]:
        """Return what the folder's files say beside the figures."""
        return report_lines(self._folder)

    def device(self, name: str) -> list[Point]:
        """Return a device's last rounds."""
        return self._devices.of(name)

    def points_since(self, num_added: int) -> tuple[list[Point], int]:
        """Return the rounds after the first ``num_added``."""
        return self.history.since(num_added), self.history.num_added

    def all_points(self) -> tuple[list[Point], int]:
        """Return the whole run, thinned."""
        return self.history.points(), self.history.num_added

    def _note(self, parts: RoundParts) -> None:
        for at, name in enumerate(parts.names):
            tile = self._tiles.get(name)
            if tile is None and len(self._tiles) < MAX_TILES:
                tile = self._tiles[name] = new_tile(name)
            if tile is not None:
                found = parts.point(at)
                tiles_of.note_part(tile, found)
                tile.update(state=tiles_of.DONE, why=found["plan"] or "")
        self._devices.add(parts if len(self._tiles) < MAX_TILES else parts.only(self._tiles))


def _about(folder: Path, last: dict[str, Any]) -> dict[str, Any]:
    """Return what the run's settings file says; what it does not say is unknown."""
    try:
        known = toml_of((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    mode = known.get("secure", {}).get("aggregation", "off")
    return {
        "task": task_label(str(known.get("task", folder.name))),
        "rounds": known.get("rounds", last["round"]),
        "optimizer": known.get("optimizer", {}).get("name", "adam"),
        "is_masked": mode != "off",
        "secure": mode,
        "is_private": last.get("epsilon") is not None,
        "unit": last.get("privacy_unit") or "device",
        "deadline": known.get("cohort", {}).get("deadline_seconds"),
        "folder": label(folder.name),
    }
