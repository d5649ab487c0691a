"""Sends a run's changes to every open page: twice a second, and only what has changed.

A page that cannot keep up misses changes and then gets the whole state again: nothing queues up for
it. While no page is open, nothing is computed. Where a tick is much work, as with thousands of
devices, ticks are rarer: the page's thread takes a small share of one core.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from headwater.server.report.device_tiles import Tile
from headwater.server.report.diagnosis import diagnose
from headwater.server.report.round_points import Point

TICK_SECONDS = 0.5
MAX_SHARE = 0.02  # of a core; ticks are rarer where the thread would take more
MAX_TICK_SECONDS = 5.0
MAX_LISTENERS = 16
Change = tuple[str, str]
"""An event, "all" or "changes", and its JSON."""


class Shown(Protocol):
    """What a page shows: a running run, or a finished one."""

    about: dict[str, Any]

    def watched(self, is_watched: bool, /) -> None: ...
    def status(self) -> dict[str, Any]: ...
    def tiles(self) -> dict[str, Tile]: ...
    def device(self, name: str, /) -> list[Point]: ...
    def notes(self) -> list[str]: ...
    def points_since(self, num_added: int, /) -> tuple[list[Point], int]: ...
    def all_points(self) -> tuple[list[Point], int]: ...


class Hub:
    """The pages that are open, and what they were sent last."""

    def __init__(self, shown: Shown) -> None:
        self.num_listeners = 0
        self._shown = shown
        self._tick = 0
        self._changes = ""
        self._sent: dict[str, Tile] = {}
        self._num_points = 0
        self._changed = asyncio.Condition()
        self._has_ended = asyncio.Event()
        self._is_over = False

    async def run(self) -> None:
        """Compute the changes of each tick, until ``end``; the last ones come after it."""
        used, pause = time.thread_time(), TICK_SECONDS
        while not self._is_over:
            try:
                await asyncio.wait_for(self._has_ended.wait(), pause)
            except TimeoutError:
                if not self.num_listeners:
                    continue
            # What the last tick took, with its sending and its compression.
            used, before = time.thread_time(), used
            pause = min(max((used - before) / MAX_SHARE, TICK_SECONDS), MAX_TICK_SECONDS)
            async with self._changed:
                self._is_over = self._has_ended.is_set()
                self._take_changes()

    def end(self) -> None:
        """Send the last changes, and end every stream."""
        self._has_ended.set()

    async def listen(self) -> AsyncGenerator[Change]:
        """Yield "all" first and after missed ticks, otherwise "changes"."""
        self.num_listeners += 1
        if self.num_listeners == 1:
            self._shown.watched(True)
        try:
            async with self._changed:
                self._take_changes()
                tick, text = self._tick, self._all_sent()
            yield "all", text
            while await self._next(tick):
                is_next, tick = self._tick == tick + 1, self._tick
                yield ("changes", self._changes) if is_next else ("all", self._all_sent())
        finally:
            self.num_listeners -= 1
            if not self.num_listeners:
                self._shown.watched(False)

    async def _next(self, tick: int) -> bool:
        """Wait for a tick after this one; return False if there will be none."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._tick != tick or self._is_over)
            return self._tick != tick

    def everything(self) -> str:
        """Return the whole state as JSON."""
        return self._everything(self._shown.tiles())

    def _all_sent(self) -> str:
        """Return the whole state with the tiles of the last tick, from which changes count."""
        return self._everything(self._sent)

    def _everything(self, tiles: Mapping[str, Tile]) -> str:
        points, number = self._shown.all_points()
        return _json(
            {
                "about": self._shown.about,
                "status": self._shown.status(),
                "points": points,
                "num_points": number,
                "devices": [*tiles.values()],
                "diagnosis": [*self._shown.notes(), *diagnose(points)],
            }
        )

    def _take_changes(self) -> None:
        """Make a tick: compute what has changed since the last one, for all who listen."""
        self._changes = self._compute()
        self._tick += 1
        self._changed.notify_all()

    def _compute(self) -> str:
        points, number = self._shown.points_since(self._num_points)
        tiles = self._shown.tiles()
        changed = [
            {
                field: value
                for field, value in tile.items()
                if field == "name" or sent[field] != value
            }
            if (sent := self._sent.get(name))
            else tile
            for name, tile in tiles.items()
            if self._sent.get(name) != tile
        ]
        self._sent = {name: dict(tile) for name, tile in tiles.items()}
        self._num_points = number
        found = {
            "status": self._shown.status(),
            "points": points,
            "num_points": number,
            "devices": changed,
        }
        if points:
            found["diagnosis"] = [*self._shown.notes(), *diagnose(self._shown.all_points()[0])]
        return _json(found)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
