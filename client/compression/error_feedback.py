"""Error feedback: what an update's encoding left out is added to the device's next update.

After the encoding, the accumulator's own memory holds what was not sent, the residual. It is stored
there and then, in units of the update: a sum of gradients. The next update adds it before its own
encoding, so that after any number of rounds

    sum of all that was sent + residual = sum of all updates of the device,

to float32's rounding (Seide et al. 2014; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD",
algorithm 1). A residual brings no weight: its examples were counted in their own round, and the
server divides by the weight of the round in which the residual arrives.

Two residuals are kept: the last counted round's, and a pending one. A plan says which round the
server counted last. If that is the pending one, its residual is next; otherwise the update did not
arrive, the device trains on the same examples again, and starts from the residual before. So a
refused or lost update loses nothing and counts nothing twice. A plan that follows on one whose
update is still being sent (``--overlap``) starts from that one's residual: a third is kept then.

Under masks an update that was masked is never masked again, counted or not: two sums that differ by
their members would show it. So if it did not count, the coordinates that it sent are lost, as its
examples are, and all others stay in the residual. An update that entered no session's sum leaves
the residual before, whatever the server says that it counted: else it could have one device
add up many rounds that no session sums, and open them among others' single ones.

A residual of many rounds is heavier than one update. ``carried_weight`` says how much: the mean,
over the coordinates, of the weights planned since each was last sent; with factors of matrices, of
which any direction may still wait, all weights so far. It goes into the session's
signed roster, and each member checks its share of the sum with it
(``client.secagg.checks.check_share``): beside new members, a device of many rounds would send most
of what is opened.

A residual is dropped, with a line in the log, if its file is damaged, if the model has another
layout, if a later round counted without it (compression was off, or the state folder was put back
from a backup), or if the server went back to a checkpoint before both. Another method, fraction or
rank takes the residual over; another run begins without one. With parameters that stay on the
device only the shared vector has a residual.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headwater.client.compression.residual_slots import SLOTS, residual_slots_of
from headwater.client.flower.request import DeviceRequest
from headwater.common.compression.encoding import coding_of
from headwater.common.compression.terms import CompressionTerms
from headwater.common.errors import NonFiniteUpdate, StateError
from headwater.common.messages import Plan, Update
from headwater.common.model.vectors import CHUNK, all_finite, all_within
from headwater.common.parsed_text import json_of

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 4096
LARGEST_MASKED = 2.0**100  # no session takes more; factors of much more would overflow
LENGTH_BYTES = 8
Floats = NDArray[np.float32]


class ResidualSlots(Protocol):
    """Places for a device's residuals in a run; each is written as a whole or not at all."""

    where: str

    def read(self, slot: int) -> memoryview | None:
        """Return what a slot holds; None if nothing. Raises OSError."""
        ...

    def write(self, slot: int, head: bytes, values: memoryview) -> None:
        """Replace what a slot holds. Raises OSError; the old content is then intact."""
        ...

    def remove(self, slot: int) -> None:
        """Empty a slot."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedLabel:
    """What tells later whether a masked plan's update was masked in a session.

    ``num_planned_before`` are the examples that earlier plans at the model asked for, of updates
    that were masked (``client.secagg.masked_history``).
    """

    update_id: str
    model: str
    num_planned_before: int


WasMasked = Callable[[MaskedLabel], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Residual:
    slot: int
    order: int
    """Increases with each that is written."""
    round: int
    label: MaskedLabel | None
    carried_weight: int
    values_P: Floats


class ErrorFeedback:
    """A device's residuals in a run."""

    def __init__(self, slots: ResidualSlots, layout_digest: str) -> None:
        self._slots = slots
        self._layout_digest = layout_digest

    def encode(self, update: Update, plan: Plan) -> bytearray:
        """Add the residual to an update, encode it, and store what was left out as pending.

        The update's vector is overwritten: it is the new residual afterwards.

        Raises:
            NonFiniteUpdate: the sum with the residual overflows float32; nothing is stored.
            StateError: the residual could not be stored; the one before is intact.
        """
        coding, stored = coding_of(plan), self._stored()
        # What a masked sum left out is sent in masked sums alone.
        base = self._counted([one for one in stored if one.label is None], plan)
        if base is not None:
            add_in_chunks(update.values_P, base.values_P)
        if not all_finite(update.values_P):
            raise NonFiniteUpdate(f"{update.name}, round {plan.round}: the residual overflows")
        data = coding.encode(update.values_P, update.name)
        place = _next_place(base, stored)
        if plan.overlaps:
            place = self._third_place(base, stored, plan)
        left = _left_weight(base, update.report.weight, plan, len(update.values_P))
        del base, stored  # a mapped file could not be replaced on Windows
        self._store(*place, plan.round, left, update.values_P)
        return data

    def gather(
        self,
        values_P: Tensor,
        plan: Plan,
        *,
        weight: int,
        label: MaskedLabel,
        was_masked: WasMasked,
    ) -> tuple[Tensor, int]:
        """Add the residual to a masked plan's sum; return the coordinates to be masked, [k].

        The second value is the carried weight, which follows from plans alone; ``weight`` is what
        the plan allows this update.

        The vector is overwritten: it is the new residual, which is stored as pending. Coordinates
        beyond what any session takes are cut and not cleared (``with_usable_values``), and what is
        not sent of them is lost: it would fill the factors of hundreds of rounds.
        ``was_masked`` says whether the update with a label was masked in a session.

        Raises:
            StateError: see ``encode``. Whether it is raised does not depend on an example.
        """
        coding, stored = coding_of(plan), self._stored()
        projection = coding.projection(len(values_P))
        plain = [one for one in stored if one.label is None]
        base = self._masked(stored, was_masked) or self._counted(plain, plan)
        if base is not None:
            add_in_chunks(values_P, base.values_P)
        is_kept = all_within(values_P, LARGEST_MASKED)
        sent_K = projection.gather(values_P.clamp_(-LARGEST_MASKED, LARGEST_MASKED))
        if not is_kept:
            log.warning("an update beyond all bounds is cut, and what is not sent of it is lost")
            values_P.zero_()
            if base is not None:
                add_in_chunks(values_P, base.values_P)
            projection.gather(values_P)
        place = _next_place(base, stored)
        carried = 0 if base is None else base.carried_weight
        left = _left_weight(base, weight, plan, len(values_P))
        del base, stored
        self._store(*place, plan.round, left, values_P, label)
        return sent_K, carried

    def _masked(self, stored: list[_Residual], was_masked: WasMasked) -> _Residual | None:
        """Return the residual that the last masked update left, if it is one of the two."""
        for one in reversed(stored):
            if one.label is not None and was_masked(one.label):
                return one
        return None

    def _counted(self, stored: list[_Residual], plan: Plan) -> _Residual | None:
        """Return the residual of the last counted round, or of the one that the plan follows on."""
        if plan.after_round is not None:
            found = [one for one in stored if one.round == plan.after_round]
            return found[-1] if found else None
        counted = plan.counted_round
        if not stored or counted is None:
            return None
        if stored[-1].round < counted:
            self._drop(stored, "a later round counted, without compression or after a backup")
            return None
        until = [one for one in stored if one.round <= counted]
        if until:
            return until[-1]
        if len(stored) > 1:  # the rounds after it come again, under the same numbers
            self._drop(stored, "the server went back to an earlier checkpoint")
        return None

    def _third_place(
        self, base: _Residual | None, stored: list[_Residual], plan: Plan
    ) -> tuple[int, int]:
        """Return slot and order of the residual after one that is pending too.

        Kept are that one and the last counted round's, which is the base if neither counts.
        """
        counted = plan.counted_round
        until = [one for one in stored if counted is not None and one.round <= counted]
        kept = {one.slot for one in (base, *until[-1:]) if one is not None}
        for one in stored:
            if one.slot not in kept:
                self._slots.remove(one.slot)
        slot = next(slot for slot in SLOTS if slot not in kept)
        return slot, stored[-1].order + 1 if stored else 0

    def _drop(self, stored: list[_Residual], why: str) -> None:
        """Empty all slots, with a line in the log."""
        number, where = stored[-1].round, self._slots.where
        log.warning("%s: the residual of round %d is dropped, as %s", where, number, why)
        for slot in SLOTS:
            self._slots.remove(slot)
        stored.clear()

    def _stored(self) -> list[_Residual]:
        """Return the stored residuals, the newest last; unusable ones are removed."""
        found = []
        for slot in SLOTS:
            try:
                data = self._slots.read(slot)
            except OSError as error:
                raise StateError(f"{self._slots.where} cannot be read: {error.strerror}") from error
            if data is None:
                continue
            try:
                found.append(self._parsed(slot, data))
            except (ValueError, KeyError, TypeError) as error:
                del data
                log.warning("%s: the residual is dropped: %s", self._slots.where, error)
                self._slots.remove(slot)
        return sorted(found, key=lambda one: one.order)

    def _parsed(self, slot: int, data: memoryview) -> _Residual:
        length = int.from_bytes(data[:LENGTH_BYTES], "little")
        if length > MAX_HEAD_BYTES:
            raise ValueError("it is damaged")
        head = json_of(bytes(data[LENGTH_BYTES : LENGTH_BYTES + length]))
        values = data[LENGTH_BYTES + length :]
        if head["layout"] != self._layout_digest:
            raise ValueError("it belongs to a model of another layout")
        if "carried_weight" not in head:
            raise ValueError("an older version wrote it, without its weight")
        if hashlib.sha256(values).hexdigest() != head["sha256"]:
            raise ValueError("it is damaged: its digest does not match")
        values_P = np.frombuffer(values, "<f4")
        if len(values_P) and not np.isfinite([values_P.min(), values_P.max()]).all():
            raise ValueError("it is not finite")
        label: Mapping[str, Any] | None = head["label"]
        return _Residual(
            slot=slot,
            order=int(head["order"]),
            round=int(head["round"]),
            label=None if label is None else MaskedLabel(**label),
            carried_weight=int(head["carried_weight"]),
            values_P=values_P,
        )

    def _store(
        self,
        slot: int,
        order: int,
        round_number: int,
        carried_weight: int,
        values_P: Tensor,
        label: MaskedLabel | None = None,
    ) -> None:
        values = values_P.numpy().data.cast("B")
        head = {
            "layout": self._layout_digest,
            "order": order,
            "round": round_number,
            "label": None if label is None else asdict(label),
            "carried_weight": carried_weight,
            "sha256": hashlib.sha256(values).hexdigest(),
        }
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % LENGTH_BYTES)
        try:
            self._slots.write(slot, len(text).to_bytes(LENGTH_BYTES, "little") + text, values)
        except OSError as error:
            raise StateError(
                f"what compression left out cannot be kept in {self._slots.where}: "
                f"{error.strerror}",
                remedy="free space there, or run without --compress",
            ) from error


def _left_weight(base: _Residual | None, weight: int, plan: Plan, num_values: int) -> int:
    """Return the carried weight of what an update of a weight leaves, rounded up.

    A round that comes again has the same random coordinates: of what waits, it sends nothing more.
    Of a matrix a factor may send nothing that waits.
    """
    carried = 0 if base is None else base.carried_weight
    terms = plan.of(CompressionTerms)
    if terms is not None and terms.method == "low-rank":
        return carried + weight
    staying = carried if base is not None and base.round == plan.round else 0
    num_left = num_values - plan.num_sent(num_values)
    return staying - (-(carried - staying + weight) * num_left // max(num_values, 1))


def _next_place(base: _Residual | None, stored: list[_Residual]) -> tuple[int, int]:
    """Return slot and order of the next residual: never over the one before it.

    The server may not count its round.
    """
    if base is not None:
        slot = next(slot for slot in SLOTS if slot != base.slot)
    else:
        slot = stored[-1].slot if stored else SLOTS[0]
    return slot, stored[-1].order + 1 if stored else 0


def add_in_chunks(values_P: Tensor, more_P: Floats) -> None:
    """Add a vector that may be a mapped file to another, in place."""
    values = values_P.numpy()
    for low in range(0, len(values), CHUNK):
        values[low : low + CHUNK] += more_P[low : low + CHUNK]


def encoded_update(update: Update, plan: Plan, feedback: ErrorFeedback) -> tuple[Update, bytearray]:
    """Return an update's report without its vector, and its encoding as the plan's terms say.

    If the terms say so, what the encoding leaves out is lost.

    Raises:
        NonFiniteUpdate, StateError: see ``ErrorFeedback.encode``.
    """
    coding = coding_of(plan)
    if coding.terms.feedback:
        data = feedback.encode(update, plan)
    else:
        data = coding.encode(update.values_P, update.name)
    return replace(update, values_P=update.values_P[:0]), data


def error_feedback_of(request: DeviceRequest) -> ErrorFeedback:
    """Return what a device's compressed updates left out in this run."""
    return ErrorFeedback(residual_slots_of(request), request.trainer.image.layout.digest)
