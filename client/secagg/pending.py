"""The updates of a process that await a secure session, or are in one.

The vector stays where it was summed, in the accumulator's memory, and is masked there. It is copied
only when somebody else is about to use that memory: another device of the same process, or this
one's own probe. Each phase is a message of its own (``headwater.common.secagg.protocol.protocol.PHASES``), which the update's
``SecureSession`` answers. Whatever a session leaves in memory is erased when a new plan comes, or
when the run is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headwater.client.secagg.types import Participant, SessionRecord, UnmaskedUpdate
from headwater.common.errors import CorruptUpdate, HeadwaterError, UpdateNotHeld
from headwater.common.secagg.fixed_point import RingVector
from headwater.common.secagg.protocol import (
    MaskReply,
    Reply,
    Request,
    SurvivorsRequest,
    UnmaskRequest,
)

if TYPE_CHECKING:
    from headwater.client.secagg.session import SecureSession
    from headwater.client.secagg.states import SessionState


class PendingUpdate:
    """An update that awaits its session, or is in one."""

    def __init__(
        self,
        device: Participant,
        record: SessionRecord,
        trained: UnmaskedUpdate,
        *,
        num_threads: int,
        is_view: bool,
        state: SessionState | None = None,
    ) -> None:
        """Begin with the record of what the device answered in this run so far.

        ``is_view`` says that the grid takes vectors as views of this process's memory. ``state`` is
        where another process left the session.
        """
        # Here, as most devices are asked for nothing masked: it is 0.5 MB of an idle one.
        from headwater.client.secagg.session import SecureSession

        self.device = device
        self.is_view = is_view
        self.is_over = False
        """Whether the device did all that its session asks of it, or has left it."""
        self._remember: Callable[[SessionRecord], None] | None = None
        self._session = SecureSession(
            device,
            record,
            remember=self._store,
            trained=trained,
            state=state,
            num_threads=num_threads,
        )

    @property
    def session(self) -> SecureSession:
        """The update's way into a masked sum."""
        return self._session

    def answer(
        self,
        request: Request,
        *,
        bounds: memoryview | bytes | None,
        remember: Callable[[SessionRecord], None],
    ) -> tuple[Reply, RingVector | None]:
        """Answer a phase's message; with a ``MaskReply`` comes the masked vector.

        ``bounds`` are those of a 16-bit ring's blocks, little-endian float32. ``remember`` stores
        the record before anything is masked or returned.

        Raises:
            HeadwaterError: see ``SecureSession.answer``; nothing is answered then.
            CorruptUpdate: the bounds are not a whole number of float32.
            UpdateNotHeld: the masked vector was let go, as the server has it.
        """
        session = self._session
        if bounds is not None:
            session.bounds = _float32(bounds, self.device)
        self._remember = remember
        try:
            reply = session.answer(request)
        except HeadwaterError:
            self.is_over = True
            raise
        finally:
            self._remember = None
        self.is_over = isinstance(request, UnmaskRequest)
        if isinstance(request, SurvivorsRequest | UnmaskRequest):
            session.vector = None  # this device is a survivor: the server has the vector
        if not isinstance(reply, MaskReply):
            return reply, None
        if session.vector is None:
            raise UpdateNotHeld(f"{self.device.name}: its masked update was handed over before")
        return reply, session.vector

    def _store(self, record: SessionRecord) -> None:
        assert self._remember is not None
        self._remember(record)

    def move_out(self) -> None:
        """Leave the memory in which the update was summed to somebody else."""
        self._session.move_out()

    def close(self) -> None:
        """Erase what is left of the session."""
        self._session.close()


def _float32(data: memoryview | bytes, device: Participant) -> NDArray[np.float32]:
    if len(data) % 4:
        raise CorruptUpdate(f"{device.name}: {len(data)} bytes are no whole number of float32")
    return np.frombuffer(data, "<f4").astype(np.float32)


class PendingUpdates:
    """The updates that await their sessions in one process, at most one of each device."""

    def __init__(self) -> None:
        self._held: dict[str, PendingUpdate] = {}
        self._in_accumulator: PendingUpdate | None = None

    def begin(self, *, run_id: int, round_number: int, name: str) -> None:
        """Take note of a new plan: what its device held, and what was of other rounds, is over."""
        self._drop(
            one
            for one in self._held.values()
            if (one.device.run, one.device.round) != (run_id, round_number)
            or one.device.name == name
        )

    def hold(self, update: PendingUpdate) -> None:
        """Keep an update that lies in the accumulator's memory."""
        self._held[update.device.name] = self._in_accumulator = update

    def of(self, run_id: int, name: str) -> PendingUpdate:
        """Return the update that a device holds for a run.

        Raises:
            UpdateNotHeld: there is none in this process.
        """
        found = self._held.get(name)
        if found is None or found.device.run != run_id:
            raise UpdateNotHeld(
                f"{name}: this process holds no update for a session of the run: it was started "
                "since, or the round is over"
            )
        return found

    def is_awaiting(self, name: str) -> bool:
        """Whether a device holds an update whose session is not over."""
        return name in self._held and not self._held[name].is_over

    def make_room(self) -> None:
        """Copy out the update that lies in the accumulator's memory: that is about to be used."""
        if self._in_accumulator is not None:
            self._in_accumulator.move_out()
            self._in_accumulator = None

    def forget(self, name: str) -> None:
        """Erase what a device's session left, and let its update go."""
        self._drop(one for one in self._held.values() if one.device.name == name)

    def _drop(self, updates: Iterable[PendingUpdate]) -> None:
        for update in list(updates):
            update.close()
            del self._held[update.device.name]
            if self._in_accumulator is update:
                self._in_accumulator = None
