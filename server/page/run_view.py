"""A running run as the page shows it: an observer that takes notes, and tiles made of them.

The rounds' thread only leaves references here. The page's thread turns them into tiles, and only
while somebody looks, so that a slow browser, or none, costs a round nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from headwater.common.errors import HeadwaterError, RoundAborted
from headwater.common.messages import DeviceReport
from headwater.common.settings.changes import Changes
from headwater.common.settings.schema import Settings
from headwater.server.features import report_lines
from headwater.server.operations.round_log import rows_in
from headwater.server.report import device_tiles as tiles_of
from headwater.server.report.device_tiles import MAX_TILES, Tile, new_tile
from headwater.server.report.history import DeviceHistories, RoundHistory
from headwater.server.report.round_points import (
    Point,
    label,
    newest,
    parts_of,
    point_of,
    ring_of,
    task_label,
)
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.open_round import OpenRound
from headwater.server.rounds.round_row import RoundRow
from headwater.server.transport.device_records import DeviceRecords

MAX_KEPT_PARTS = 20_000  # clients' figures of rounds that the page has not looked at yet
WAITING, PAUSED, PLANNING, COMPUTING, STEPPING = (
    *("waiting for devices", "paused", "planning", "devices compute", "stepping and testing"),
)


class RunView(Observer):
    """Takes notes of a run on the rounds' thread, and shows them on the page's."""

    def __init__(
        self,
        settings: Settings,
        *,
        records: DeviceRecords | None = None,
        stages: Callable[[], Mapping[str, str]] | None = None,
        watch: Callable[[bool], None] | None = None,
    ) -> None:
        """Take the settings; a server has ``records`` of its devices, a simulation has none.

        ``stages`` returns where devices are with their plans: planned, computing or uploading; None
        where the engine cannot tell. ``watch`` is called when the first page opens, and when the
        last one is closed.
        """
        self.about = _about(settings)
        self._folder = settings.out
        self.history = RoundHistory()
        self._records = records
        self._stages = stages
        self._watch = watch
        self._lock = threading.Lock()
        self._rows: deque[RoundRow] = deque()
        self._num_kept = 0
        self._reports: Mapping[str, DeviceReport] = {}
        self._opened: OpenRound | None = None
        self._round = 0
        self._phase, self._since = WAITING, time.monotonic()
        self._note = ""
        self._ring: dict[str, Any] | None = None
        self._has_ended = False
        self.may_stay = True
        """Whether the page may stay up after the end; not if another run follows."""
        # Of the page's thread.
        self._tiles: dict[str, Tile] = {}
        self._shown: OpenRound | None = None
        self._noted: set[str] = set()
        self._devices = DeviceHistories()

    # Called on the rounds' thread.

    def started(self, settings: Settings, *, round_number: int, model: nn.Module) -> None:
        self._round = round_number

    def resumed(self, round_number: int, changed: Changes) -> None:
        """Begin with the rounds of earlier servers, from the folder's rounds.jsonl."""
        if self._folder is None or not round_number:
            return
        try:
            points = [point_of(row) for row in rows_in(self._folder)]
        except (HeadwaterError, OSError):
            return  # the round log says what is wrong with its file
        with self._lock:
            for point in points:
                if point["round"] <= round_number:
                    self.history.add(point)

    def paused(self, is_paused: bool) -> None:
        self._enter(PAUSED if is_paused else WAITING)

    def begun(self, round_number: int, reports: Mapping[str, DeviceReport]) -> None:
        self._round, self._reports = round_number - 1, reports
        self._enter(PLANNING)

    def asked(self, opened: OpenRound) -> None:
        self._opened = opened
        self._enter(COMPUTING)

    def closed(self, opened: OpenRound) -> None:
        self._enter(STEPPING)

    def aborted(self, error: RoundAborted) -> None:
        self._note = f"{error.code}: {error}"
        self._enter(WAITING)

    def on_round(self, row: RoundRow) -> None:
        point = point_of(row)
        with self._lock:
            self._round, self._note, self._ring = row.round, "", ring_of(row)
            self.history.add(point)
            self._rows.append(row)
            self._num_kept += row.num_clients
            while self._num_kept > MAX_KEPT_PARTS and len(self._rows) > 1:
                self._num_kept -= self._rows.popleft().num_clients
        self._enter(WAITING)

    def ended(self) -> None:
        self._has_ended = True

    def _enter(self, phase: str) -> None:
        self._phase, self._since = phase, time.monotonic()

    # Called on the page's thread.

    def watched(self, is_watched: bool) -> None:
        """Let the devices know whether somebody looks at their progress."""
        if self._watch is not None:
            self._watch(is_watched)

    def status(self) -> dict[str, Any]:
        """Return where the run is, as plain data."""
        opened = self._opened if self._phase == COMPUTING else None
        answered = invited = 0
        if opened is not None:
            answered = len(opened.accepted) + len(opened.ready) + len(opened.refused)
            invited = len(opened.plans)
        return {
            "round": self._round,
            "phase": "ended" if self._has_ended else self._phase,
            "phase_seconds": round(time.monotonic() - self._since, 1),
            "answered": answered,
            "invited": invited,
            "note": self._note[:300],
            "ring": self._ring,
            "num_devices": len(self._tiles),
            "has_ended": self._has_ended,
        }

    def points_since(self, num_added: int) -> tuple[list[Point], int]:
        """Return the rounds after the first ``num_added``, and how many there are."""
        with self._lock:
            return self.history.since(num_added), self.history.num_added

    def all_points(self) -> tuple[list[Point], int]:
        """Return the whole run's rounds, thinned, and how many there were."""
        with self._lock:
            return self.history.points(), self.history.num_added

    def tiles(self) -> dict[str, Tile]:
        """Return all devices' tiles by name, brought up to date."""
        for name in list(self._reports)[:MAX_TILES]:
            self._tile(name)
        self._show_rows()
        self._show_round()
        self._show_stages()
        self._show_records()
        return self._tiles

    def notes(self) -> list[str]:
        """Return what the files of the run's folder say beside the figures."""
        return [] if self._folder is None else report_lines(self._folder)

    def device(self, name: str) -> list[Point]:
        """Return a device's figures in the rounds that the page has seen."""
        return self._devices.of(name)

    def _tile(self, name: str) -> Tile | None:
        tile = self._tiles.get(name)
        if tile is None and len(self._tiles) < MAX_TILES:
            tile = self._tiles[name] = new_tile(name)
        return tile

    def _show_rows(self) -> None:
        with self._lock:
            rows, self._rows, self._num_kept = [*self._rows], deque(), 0
        rounds = [parts_of(row) for row in rows]
        for name, found in newest(rounds):
            if (tile := self._tile(name)) is not None:
                tiles_of.note_part(tile, found)
        for parts in rounds:
            self._devices.add(parts if len(self._tiles) < MAX_TILES else parts.only(self._tiles))
        if rows:
            tiles_of.note_left_out(self._tiles, rows[-1].left_out)

    def _show_round(self) -> None:
        opened = self._opened
        if opened is None:
            return
        if opened is not self._shown:
            self._shown, self._noted = opened, set()
            for name, known in self._tiles.items():
                if name not in opened.plans and known["state"] != tiles_of.LEFT_OUT:
                    known["state"] = tiles_of.IDLE
            for name in opened.plans:
                if (tile := self._tile(name)) is not None:
                    tiles_of.note_plan(tile, opened.plans[name])
                    tile["state"] = tiles_of.COMPUTING if self._stages is None else tiles_of.PLANNED
        noted = self._noted
        accepted = opened.accepted.copy()
        for name in accepted.keys() - noted:
            if (found := self._tiles.get(name)) is not None:
                noted.add(name)
                tiles_of.note_report(found, accepted[name])
        is_open = self._phase in (COMPUTING, STEPPING)
        for name, ready in opened.ready.copy().items():
            if (found := self._tiles.get(name)) is not None:
                found["done"] = found["k"]
                found["state"] = tiles_of.READY if is_open else tiles_of.DONE
                tiles_of.note_vitals(found, ready.vitals)
        for name, error in opened.refused.copy().items():
            if name not in noted and (found := self._tiles.get(name)) is not None:
                noted.add(name)
                tiles_of.note_error(found, error)

    def _show_stages(self) -> None:
        opened = self._shown
        if self._stages is None or opened is None or self._phase not in (COMPUTING, STEPPING):
            return
        for name, stage in self._stages().items():
            found = self._tiles.get(name)
            if found and name in opened.plans and found["state"] in tiles_of.UNFINISHED:
                found["state"] = stage

    def _show_records(self) -> None:
        if self._records is None:
            return
        for name, number in self._records.steps_done().items():
            if (found := self._tiles.get(name)) is not None and found["k"]:
                found["done"] = min(number, found["k"])
        for record in self._records.devices():
            tile = self._tile(record.name)
            if tile is None:
                continue
            if not record.is_connected:
                if self._has_ended:
                    continue  # it left as the run was over
                tile["state"] = tiles_of.GONE
                tile["why"] = f"{record.refusal_code or ''} {record.refusal_text or ''}".strip()
            elif tile["state"] == tiles_of.GONE:
                tile.update(state=tiles_of.IDLE, why="")
            tile["limit"] = tile["limit"] or record.memory_limit_bytes
            tile["heat"] = tile["heat"] or record.temperature_celsius
            tile["labels"] = record.labels
            tile["memory"] = tile["memory"] or record.peak_bytes


def _about(settings: Settings) -> dict[str, Any]:
    """Return what stays the same for the whole run."""
    privacy = settings.privacy
    return {
        "task": task_label(settings.task),
        "rounds": settings.rounds,
        "optimizer": settings.optimizer.name,
        "is_masked": settings.secure.aggregation != "off",
        "secure": settings.secure.aggregation,
        "is_private": privacy.is_on,
        "unit": privacy.unit,
        "deadline": settings.cohort.deadline_seconds,
        "folder": None if settings.out is None else label(settings.out.name),
    }
