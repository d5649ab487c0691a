"""Answers the server's requests in the secure sessions of one update, each request once.

``SecureSession`` wraps the pure functions of ``client.secagg.key_phases`` and
``client.secagg.mask_phases``. It holds the state, has the record stored before a reply leaves,
repeats the same reply if a request is repeated, and erases the remaining secrets when a session
ends. Until the update is masked it may go through several sessions; each has new keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.client.secagg import key_phases, mask_phases
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
    """The secure sessions of one update, seen from its client."""

    def __init__(
        self,
        device: Participant,
        record: SessionRecord,
        *,
        store: Callable[[SessionRecord], None],
        update: UnmaskedUpdate,
        state: SessionState | None = None,
        bounds: NDArray[np.float32] | None = None,
        num_threads: int = 1,
    ) -> None:
        """Start with an update and the record of this run's earlier sessions.

        ``store`` makes a record durable before it returns. ``state`` continues a session from
        another process (``client.flower.suspended``). ``bounds`` are the block bounds of a 16-bit
        ring; they arrive with ``MaskRequest`` and may be set until then.
        """
        self.device = device
        self.record = record
        """The record that was stored last."""
        self.update = update
        """The update; without its values once it is masked."""
        self.state = state
        """The current state; None before the first request."""
        self.vector: RingVector | None = None
        """The masked update, after ``MaskRequest``."""
        self.bounds = bounds
        self._store = store
        self._num_threads = num_threads
        self._replies: dict[type[Request], tuple[Request, Reply]] = {}

    @property
    def is_spent(self) -> bool:
        """Whether the update was masked: it and its examples may go into no other session."""
        return self.record.masked == self.device.update_id

    def answer(self, request: Request) -> Reply:
        """Check a request and answer it; after ``MaskRequest`` the masked update is ``vector``.

        Raises:
            SessionRefused: see ``client.secagg.checks.CHECKS``; nothing was answered.
            CountOutOfRange, NonFiniteUpdate, ModelMismatch: the update itself cannot be masked.
            StateError: the record could not be stored; nothing was answered.
        """
        last_request, last_reply = self._replies.get(type(request), (None, None))
        if last_reply is not None and request == last_request:
            return last_reply
        before = self.state
        state, reply = self._step(request)
        self._move_to(state)
        if isinstance(request, KeysRequest):
            self._replies.clear()
            if before is not None:
                erase(before)
        self._replies[type(request)] = (request, reply)
        return reply

    def _move_to(self, state: SessionState) -> None:
        """Store the state's record, then make it the current state."""
        if state.record != self.record:
            self._store(state.record)
            self.record = state.record
        self.state = state

    def _step(self, request: Request) -> tuple[SessionState, Reply]:
        match request, self.state:
            case KeysRequest(), _:
                return key_phases.advertise_keys(self.device, self.record, request)
            case Roster(), AwaitingRoster() as state:
                return key_phases.share_keys(state, request)
            case CheckRequest(), AwaitingShares() as state:
                return key_phases.check_shares(state, request)
            case MaskRequest(), AwaitingMaskRequest() as state:
                return self._mask(state, request)
            case SurvivorsRequest(), (AwaitingUnmask() | SessionFinished()) as state:
                return mask_phases.sign_survivors(state, request)
            case UnmaskRequest(), (AwaitingUnmask() | SessionFinished()) as state:
                return mask_phases.reveal_shares(state, request)
            case _:
                state_name = type(self.state).__name__ if self.state else "no session"
                raise OutOfPhase(
                    f"{self.device.name}: unexpected {type(request).__name__} in {state_name}"
                )

    def _mask(self, state: AwaitingMaskRequest, request: MaskRequest) -> tuple[SessionState, Reply]:
        ready = mask_phases.commit_update(state, request, self.update, bounds=self.bounds)
        self._move_to(ready)  # if storing fails, nothing is masked and the request may be repeated
        masked, reply, self.vector = mask_phases.mask_update(
            ready, self.update, num_threads=self._num_threads
        )
        self.update = replace(self.update, values_P=torch.empty(0))  # the values are overwritten
        return masked, reply

    def move_out(self) -> None:
        """Copy the update, masked or not, out of memory that is about to be reused."""
        if self.vector is not None:
            self.vector = self.vector.copy()
        else:
            self.update = replace(self.update, values_P=self.update.values_P.clone())

    def close(self) -> None:
        """Erase the remaining secrets; only ``record`` and ``vector`` are kept."""
        if self.state is not None:
            erase(self.state)
        self.state = None
        self._replies.clear()
