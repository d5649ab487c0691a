"""One device's part in secure sessions: each message of the server in its turn, answered once.

The shell around the pure functions of ``client.secagg.key_phases`` and ``client.secagg.mask_phases``. It
holds the state, has the record stored before an answer leaves, gives a message that comes again the
same answer again, and erases what is left when a session ends. One of these belongs to one update:
as long as that is not masked it may go through several sessions, of which each has new keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.client.secagg import key_phases as secure_shares
from headwater.client.secagg import mask_phases as secure_update
from headwater.client.secagg.states import (
    AwaitingMaskRequest,
    AwaitingRoster,
    AwaitingShares,
    AwaitingUnmask,
    SessionFinished,
    SessionState,
    erase,
)
from headwater.client.secagg.types import Participant, SessionRecord, UnmaskedUpdate
from headwater.common.errors import OutOfPhase
from headwater.common.secagg.fixed_point import RingVector
from headwater.common.secagg.protocol import (
    CheckRequest,
    KeysRequest,
    MaskRequest,
    Reply,
    Request,
    Roster,
    SurvivorsRequest,
    UnmaskRequest,
)


class SecureSession:
    """The device's side of one update's way into a masked sum."""

    def __init__(
        self,
        device: Participant,
        record: SessionRecord,
        *,
        remember: Callable[[SessionRecord], None],
        trained: UnmaskedUpdate,
        state: SessionState | None = None,
        bounds: NDArray[np.float32] | None = None,
        num_threads: int = 1,
    ) -> None:
        """Begin with an update, and with the record of what the device answered in this run.

        ``remember`` stores a record for good before it returns. ``state`` is where another process
        left the session (``client.flower.suspended``). ``bounds`` are the block bounds of a 16-bit ring; they
        come with ``MaskRequest`` and may be set until then.
        """
        self.vector: RingVector | None = None
        self.bounds = bounds
        self._device = device
        self._record = record
        self._remember = remember
        self._trained = trained
        self._num_threads = num_threads
        self._state = state
        self._answered: dict[type[Request], tuple[Request, Reply]] = {}

    @property
    def record(self) -> SessionRecord:
        """What was stored last."""
        return self._record

    @property
    def device(self) -> Participant:
        """Who this is, with which update."""
        return self._device

    @property
    def trained(self) -> UnmaskedUpdate:
        """The update: without its values once it is masked."""
        return self._trained

    @property
    def state(self) -> SessionState | None:
        """Where the session stands; None before its first message."""
        return self._state

    @property
    def is_spent(self) -> bool:
        """Whether the update was masked: it may go into no other session, nor may its examples."""
        return self._record.masked == self._device.update_id

    def answer(self, request: Request) -> Reply:
        """Check a message and answer it; behind ``MaskRequest`` the masked update is ``vector``.

        Raises:
            SessionRefused: see ``client.secagg.checks.CHECKS``; nothing was answered.
            CountOutOfRange, NonFiniteUpdate, ModelMismatch: of the update itself.
            StateError: the record could not be stored; nothing was answered.
        """
        asked, told = self._answered.get(type(request), (None, None))
        if told is not None and asked == request:
            return told
        before = self._state
        state, reply = self._step(request)
        self._store(state)
        if isinstance(request, KeysRequest):
            self._answered.clear()
            if before is not None:
                erase(before)
        self._answered[type(request)] = (request, reply)
        return reply

    def _store(self, state: SessionState) -> None:
        """Move on to a state, after its record was stored."""
        if state.record != self._record:
            self._remember(state.record)
            self._record = state.record
        self._state = state

    def _step(self, request: Request) -> tuple[SessionState, Reply]:
        match request, self._state:
            case KeysRequest(), _:
                return secure_shares.advertise(self._device, self._record, request)
            case Roster(), AwaitingRoster() as state:
                return secure_shares.deal(state, request)
            case CheckRequest(), AwaitingShares() as state:
                return secure_shares.check(state, request)
            case MaskRequest(), AwaitingMaskRequest() as state:
                return self._mask(state, request)
            case SurvivorsRequest(), (AwaitingUnmask() | SessionFinished()) as state:
                return secure_update.sign(state, request)
            case UnmaskRequest(), (AwaitingUnmask() | SessionFinished()) as state:
                return secure_update.reveal(state, request)
            case _:
                raise OutOfPhase(
                    f"{self._device.name}: {type(request).__name__} after "
                    f"{type(self._state).__name__ if self._state else 'nothing'}"
                )

    def _mask(self, state: AwaitingMaskRequest, wanted: MaskRequest) -> tuple[SessionState, Reply]:
        ready = secure_update.commit(state, wanted, self._trained, bounds=self.bounds)
        self._store(ready)  # if this fails nothing was masked, and the message may come again
        masked, head, self.vector = secure_update.mask(
            ready, self._trained, num_threads=self._num_threads
        )
        self._trained = replace(self._trained, values_P=torch.empty(0))  # the values are gone
        return masked, head

    def move_out(self) -> None:
        """Copy the update, masked or not, out of memory that somebody else is about to use."""
        if self.vector is not None:
            self.vector = self.vector.copy()
        else:
            self._trained = replace(self._trained, values_P=self._trained.values_P.clone())

    def close(self) -> None:
        """Erase what is left of the session; only ``record`` and ``vector`` remain."""
        if self._state is not None:
            erase(self._state)
        self._state = None
        self._answered.clear()
