"""Keeps updates in memory until their secure sessions have ended.

The vector stays in the accumulator's memory and is masked there. It is copied only when that memory
is about to be used again: by another client in the same process, or by this client's probe. Each
phase is a message of its own (``common.secagg.protocol.PHASES``), which the update's
``SecureSession`` answers. The secrets of a session are erased when a new plan arrives, or when the
client leaves the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from headwater.client.secagg.types import Participant, SessionRecord, UnmaskedUpdate
from headwater.client.training.accumulator import Accumulator
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
    from headwater.client.secagg.states import SessionState


class PendingUpdate:
    """An update before or during its secure session."""

    def __init__(
        self,
        device: Participant,
        record: SessionRecord,
        update: UnmaskedUpdate,
        *,
        num_threads: int,
        is_view: bool,
        state: SessionState | None = None,
    ) -> None:
        """Start with the record of this run's earlier sessions.

        ``is_view`` says that the grid reads vectors as views of this process's memory. ``state``
        continues a session from another process.
        """
        # Imported here, as most clients never mask: it costs 0.5 MB of an idle client's memory.
        from headwater.client.secagg.session import SecureSession

        self.device = device
        self.is_view = is_view
        self.is_over = False
        """Whether the client has answered the session's last request, or has left the session."""
        self._is_closed = False
        self._store: Callable[[SessionRecord], None] | None = None
        self.session = SecureSession(
            device,
            record,
            store=self._store_record,
            update=update,
            state=state,
            num_threads=num_threads,
        )

    def answer(
        self,
        request: Request,
        *,
        bounds: memoryview | bytes | None,
        store: Callable[[SessionRecord], None],
    ) -> tuple[Reply, RingVector | None]:
        """Answer a phase's request; a ``MaskReply`` comes with the masked vector.

        ``bounds`` are the block bounds of a 16-bit ring, little-endian float32. ``store`` makes the
        record durable before anything is masked or returned.

        Raises:
            HeadwaterError: see ``SecureSession.answer``; nothing is answered then.
            CorruptUpdate: the bounds are not a whole number of float32.
            UpdateNotHeld: the masked vector was released, because the server has it.
        """
        session = self.session
        if bounds is not None:
            session.bounds = _float32(bounds, self.device)
        self._store = store
        try:
            reply = session.answer(request)
        except HeadwaterError:
            self.is_over = True
            raise
        finally:
            self._store = None
        self.is_over = isinstance(request, UnmaskRequest)
        if isinstance(request, SurvivorsRequest | UnmaskRequest):
            session.vector = None  # this client is a survivor: the server has its vector
        if not isinstance(reply, MaskReply):
            return reply, None
        if session.vector is None:
            raise UpdateNotHeld(f"{self.device.name}: the server already has the masked update")
        return reply, session.vector

    def _store_record(self, record: SessionRecord) -> None:
        assert self._store is not None
        self._store(record)

    def move_out(self) -> None:
        """Copy the update out of the accumulator's memory, which is about to be used again."""
        if not self._is_closed:
            self.session.move_out()

    def close(self) -> None:
        """Erase the session's remaining secrets."""
        self._is_closed = True
        self.session.close()


def _float32(data: memoryview | bytes, device: Participant) -> NDArray[np.float32]:
    if len(data) % 4:
        raise CorruptUpdate(f"{device.name}: {len(data)} bytes are no whole number of float32")
    return np.frombuffer(data, "<f4").astype(np.float32)


class PendingUpdates:
    """The pending updates in one process, at most one per client."""

    def __init__(self) -> None:
        self._by_name: dict[str, PendingUpdate] = {}

    def start_plan(self, *, run_id: int, round_number: int, name: str) -> None:
        """Discard the client's previous update, and every update of another round."""
        self._discard(
            update
            for update in self._by_name.values()
            if (update.device.run, update.device.round) != (run_id, round_number)
            or update.device.name == name
        )

    def add(self, update: PendingUpdate, accumulator: Accumulator) -> None:
        """Keep an update in the accumulator's memory; it is copied if that is needed again."""
        self._by_name[update.device.name] = update
        accumulator.lend(update.move_out)

    def get(self, run_id: int, name: str) -> PendingUpdate:
        """Return a client's pending update of a run.

        Raises:
            UpdateNotHeld: this process has none.
        """
        update = self._by_name.get(name)
        if update is None or update.device.run != run_id:
            raise UpdateNotHeld(
                f"{name}: this process holds no update for a session of the run: the process was "
                "restarted, or the round is over"
            )
        return update

    def is_waiting(self, name: str) -> bool:
        """Whether a client has an update whose session has not ended."""
        return name in self._by_name and not self._by_name[name].is_over

    def discard(self, name: str) -> None:
        """Erase a client's session and drop its update."""
        self._discard(update for update in self._by_name.values() if update.device.name == name)

    def _discard(self, updates: Iterable[PendingUpdate]) -> None:
        for update in list(updates):
            update.close()
            del self._by_name[update.device.name]


_pending: WeakKeyDictionary[Accumulator, PendingUpdates] = WeakKeyDictionary()


def pending_in(accumulator: Accumulator) -> PendingUpdates:
    """Return the pending updates of the clients that sum into this accumulator."""
    return _pending.setdefault(accumulator, PendingUpdates())
