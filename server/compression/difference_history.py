"""The differences between the latest models that devices were sent: what a device missed, as one.

A difference in int8 adds exactly to the next, so a device that was away for some rounds is sent
their sum; in other methods it is sent one difference after another. The latest differences are
stored as they were sent, within a limit of bytes. A device that holds an older model, or none, is
sent the difference to zero in int8, else the model whole. What was computed for one device serves
all that hold the same model, until the model moves on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from torch import Tensor

from headwater.common.compression.model_difference import (
    adds_exactly,
    movement,
    movement_from_zero,
)
from headwater.common.compression.terms import DifferenceMethod
from headwater.common.flower.sent_model import ModelDifference

MAX_SUMMED, MAX_ROUNDS = 16, 64
"""A sum takes time for each difference in it, and after so many rounds it saves little."""


class DifferenceHistory:
    """The latest differences, and their sums; ``values_P`` is the latest model."""

    def __init__(self, values_P: Tensor, method: DifferenceMethod, *, max_bytes: int) -> None:
        self._values_P, self._method, self._max_bytes = values_P, method, max_bytes
        self._differences: deque[ModelDifference] = deque()
        self._sums: dict[str, ModelDifference] = {}
        """By the model that a device holds; the one that was used last comes last."""

    def clear(self) -> None:
        """Drop all: the model has changed otherwise."""
        self._differences.clear()
        self._sums.clear()

    def add(self, difference: ModelDifference) -> None:
        """Append the difference that led to the latest model; the oldest make room.

        Where no difference leads from zero the latest one stays, whatever its length.
        """
        self._sums.clear()
        self._differences.append(difference)
        least, most = (0, MAX_SUMMED) if adds_exactly(self._method) else (1, MAX_ROUNDS)
        while len(self._differences) > least and (
            len(self._differences) > most or self._num_bytes() > self._max_bytes
        ):
            self._differences.popleft()

    def to_sum(self, held_id: str) -> list[ModelDifference] | None:
        """Return the differences whose sum leads from a model; None if nothing is to be summed."""
        missed = self._missed(held_id)
        is_new = adds_exactly(self._method) and len(missed) > 1 and held_id not in self._sums
        return missed if is_new else None

    def summed(self, missed: Sequence[ModelDifference], image_id: str) -> ModelDifference | None:
        """Return the sum of some differences, or the one from zero; None: the model goes whole.

        Of some it needs no lock, as they do not change.
        """
        data: bytearray | None
        if not adds_exactly(self._method):
            data = bytearray().join(one.data for one in missed)
        elif missed:
            data = movement([one.data for one in missed], len(self._values_P))
        else:
            data = movement_from_zero(self._values_P)
        if data is None:
            return None
        base_id = missed[0].base_id if missed else ""
        return ModelDifference(base_id=base_id, image_id=image_id, method=self._method, data=data)

    def note_sum(self, summed: ModelDifference) -> None:
        """Keep a sum for other devices that hold the same model."""
        self._sums[summed.base_id] = summed
        self._make_room()

    def difference_from(self, held_id: str, image_id: str) -> ModelDifference | None:
        """Return the difference to the latest model; None if that has to be sent whole.

        An empty id, or one that is not in the history, is answered with the difference from zero,
        if there is one.
        """
        missed, num_values = self._missed(held_id), len(self._values_P)
        if not adds_exactly(self._method) and _length(missed) not in range(1, 4 * num_values):
            return None
        base_id = held_id if missed else ""
        found = missed[0] if len(missed) == 1 else self._sums.pop(base_id, None)
        if found is None:
            found = self.summed(missed, image_id)
        if found is None:
            return None
        if len(missed) != 1:
            self.note_sum(found)
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
        return _length((*self._differences, *self._sums.values()))


def _length(differences: Iterable[ModelDifference]) -> int:
    return sum(len(one.data) for one in differences)
