"""The differences between the latest models that devices were sent: what a device missed, as one.

A difference in int8 adds exactly to the next, so a device that was away for some rounds is sent
their sum. The latest differences are stored as they were sent, within a limit of bytes; a device
that holds an older model, or none, is sent the difference to zero. What was computed for one
device serves all that hold the same model, until the model moves on.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from headwater.common.compression.model_difference import movement, movement_from_zero
from headwater.common.flower.sent_model import ModelDifference

MAX_ROUNDS = 64
"""A sum takes time for each difference in it, and after so many rounds it saves little."""


class DifferenceHistory:
    """The latest differences in int8, and their sums; ``values_P`` is the latest model."""

    def __init__(self, values_P: Tensor, *, max_bytes: int) -> None:
        self._values_P, self._max_bytes = values_P, max_bytes
        self._differences: deque[ModelDifference] = deque()
        self._sums: dict[str, ModelDifference] = {}
        """By the model that a device holds; the one that was used last comes last."""

    def clear(self) -> None:
        """Drop all: the model has changed otherwise."""
        self._differences.clear()
        self._sums.clear()

    def add(self, difference: ModelDifference) -> None:
        """Append the difference that led to the latest model; the oldest make room."""
        self._sums.clear()
        self._differences.append(difference)
        while len(self._differences) > MAX_ROUNDS or self._num_bytes() > self._max_bytes:
            self._differences.popleft()

    def difference_from(self, held_id: str, image_id: str) -> ModelDifference | None:
        """Return the difference to the latest model; None if that has to be sent whole.

        An empty id, or one that is not in the history, is answered with the difference from zero.
        """
        missed, num_values = self._missed(held_id), len(self._values_P)
        base_id = held_id if missed else ""
        found = missed[0] if len(missed) == 1 else self._sums.pop(base_id, None)
        if found is None:
            data = [one.data for one in missed]
            summed = movement(data, num_values) if data else movement_from_zero(self._values_P)
            if summed is None:
                return None
            found = ModelDifference(base_id=base_id, image_id=image_id, method="int8", data=summed)
        if len(missed) != 1:
            self._sums[base_id] = found
            self._make_room()
        return found if len(found.data) < 4 * num_values else None

    def _missed(self, held_id: str) -> list[ModelDifference]:
        """Return the differences since a model was the latest; none if it is unknown."""
        missed = list(self._differences)
        while missed and missed[0].base_id != held_id:
            missed.pop(0)
        return missed

    def _make_room(self) -> None:
        """Drop the sums that were not used for longest, but for the latest used."""
        while len(self._sums) > 1 and self._num_bytes() > self._max_bytes:
            self._sums.pop(next(iter(self._sums)))

    def _num_bytes(self) -> int:
        return sum(len(one.data) for one in (*self._differences, *self._sums.values()))
