"""The rounds of a run and of its devices, in bounded memory: the newest of them are kept.

A run's older rounds are thinned out: a million of them need a few times ``MAX_POINTS`` points, and
a browser draws them all. Of a device only the last rounds are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from headwater.server.report.round_points import Point, RoundParts

MAX_POINTS = 2_000
MAX_DEVICE_POINTS = 400  # rounds of one device
MAX_POINTS_OF_ALL = 60_000  # rounds of all devices together
MAX_ROUNDS_OF_DEVICES = 6_000


class RoundHistory:
    """The figures of a run's rounds: the last ``MAX_POINTS`` at least, and a sample of the others.

    The thinned part keeps every n-th round, where n is a power of two.
    """

    def __init__(self, points: Sequence[Point] = (), *, max_points: int = MAX_POINTS) -> None:
        self.num_added = 0
        """The rounds that were added so far: a position in the stream of rounds."""
        self.examples_done = 0
        self.seconds_done = 0.0
        self._max_points = max_points
        self._old: list[Point] = []
        self._new: list[Point] = []
        self._every = 1
        self._num_moved = 0
        for point in points:
            self.add(point)

    def add(self, point: Point) -> None:
        """Add a round's figures, and where the run is in examples and seconds."""
        self.examples_done += point["num_examples"] or 0
        virtual = point["virtual_seconds"]
        self.seconds_done += (point["seconds"] if virtual is None else virtual) or 0.0
        point = point | {"examples_done": self.examples_done, "time": self.seconds_done}
        self._new.append(point)
        self.num_added += 1
        if len(self._new) >= 2 * self._max_points:
            moved, self._new = self._new[: self._max_points], self._new[self._max_points :]
            self._old += [p for at, p in enumerate(moved, self._num_moved) if at % self._every == 0]
            self._num_moved += len(moved)
            while len(self._old) > self._max_points:
                self._every *= 2
                self._old = self._old[::2]

    def points(self) -> list[Point]:
        """Return the whole run, thinned."""
        return [*self._old, *self._new]

    def since(self, num_added: int) -> list[Point]:
        """Return the rounds after the first ``num_added``, as far as they are not thinned out."""
        number = min(self.num_added - num_added, len(self._new))
        return self._new[len(self._new) - number :]


class DeviceHistories:
    """The last rounds of all devices: fewer of them where devices are many."""

    def __init__(self, *, max_points: int = MAX_POINTS_OF_ALL) -> None:
        self._max_points = max_points
        self._rounds: deque[RoundParts] = deque(maxlen=MAX_ROUNDS_OF_DEVICES)
        self._number = 0

    def add(self, parts: RoundParts) -> None:
        """Add a round's figures; the oldest of all devices may be dropped."""
        if len(self._rounds) == MAX_ROUNDS_OF_DEVICES:
            self._number -= len(self._rounds[0])
        self._rounds.append(parts)
        self._number += len(parts)
        while self._number > self._max_points and len(self._rounds) > 1:
            self._number -= len(self._rounds.popleft())

    def of(self, name: str) -> list[Point]:
        """Return a device's figures, of ``MAX_DEVICE_POINTS`` rounds at most; none if unknown."""
        found = (parts.of(name) for parts in reversed(self._rounds))
        last = [*islice((point for point in found if point), MAX_DEVICE_POINTS)]
        return last[::-1]
