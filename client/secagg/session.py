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
from headwater.common.errors import CorruptUpdate, HeadwaterError, OutOfPhase, UpdateNotHeld
from headwater.common.secagg.fixed_point import RingVector
from headwater.common.secagg.protocol import (
    CheckRequest,
    KeysRequest,
    MaskReply,
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
        update: UnmaskedUpdate,
        store: Callable[[SessionRecord], None] | None = None,
        state: SessionState | None = None,
        num_threads: int = 1,
        is_view: bool = False,
    ) -> None:
        """Start with an update and the record of this run's earlier sessions.

        ``store`` makes a record durable before it returns; it must be set before the first request.
        ``state`` continues a session from another process (``masked_rounds.suspended_updates``).
        ``is_view`` says that the grid reads the masked vector as a view of this process's memory.
        """
        self.device = device
        self.record = record
        """The record that was stored last."""
        self.update = update
        """The update; without its values once it is masked."""
        self.store = store
        self.state = state
        """The current state; None before the first request."""
        self.vector: RingVector | None = None
        """The masked update, until the server confirms that it has it."""
        self.sums_S: NDArray[np.uint64] = np.zeros(0, np.uint64)
        """The masked sums beside the model's, which are sent behind the masked update."""
        self.is_view = is_view
        self.is_over = False
        """Whether the client has answered the session's last request, or has refused one."""
        self._num_threads = num_threads
        self._is_closed = False
        self._replies: dict[type[Request], tuple[Request, Reply]] = {}

    @property
    def is_spent(self) -> bool:
        """Whether the update was masked: it and its examples may go into no other session."""
        return self.record.masked == self.device.update_id

    def answer(self, request: Request, bounds: memoryview | bytes | None = None) -> Reply:
        """Check and answer a request; with a ``MaskReply``, ``vector`` is the masked update.

        ``bounds`` are the block bounds of a 16-bit ring, little-endian float32; they come with
        ``MaskRequest``.

        Raises:
            SessionRefused: see ``client.secagg.checks.CHECKS``; nothing was answered.
            ModelMismatch: the session masks another kind of update.
            StateError: the record could not be stored; nothing was answered.
            CorruptUpdate: the bounds are not a whole number of float32.
            UpdateNotHeld: the masked vector was released, because the server has it.
        """
        try:
            reply = self._answer_once(request, bounds)
        except HeadwaterError:
            self.is_over = True
            raise
        self.is_over = isinstance(request, UnmaskRequest)
        if isinstance(request, SurvivorsRequest | UnmaskRequest):
            self.vector = None  # this client is a survivor: the server has its vector
        if isinstance(reply, MaskReply) and self.vector is None:
            raise UpdateNotHeld(f"{self.device.name}: the server already has the masked update")
        return reply

    def _answer_once(self, request: Request, bounds: memoryview | bytes | None) -> Reply:
        last_request, last_reply = self._replies.get(type(request), (None, None))
        if last_reply is not None and request == last_request:
            return last_reply
        before = self.state
        state, reply = self._step(request, bounds)
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
            assert self.store is not None
            self.store(state.record)
            self.record = state.record
        self.state = state

    def _step(
        self, request: Request, bounds: memoryview | bytes | None
    ) -> tuple[SessionState, Reply]:
        match request, self.state:
            case KeysRequest(), _:
                return key_phases.advertise_keys(self.device, self.record, request)
            case Roster(), AwaitingRoster() as state:
                return key_phases.share_keys(state, request)
            case CheckRequest(), AwaitingShares() as state:
                return key_phases.check_shares(state, request)
            case MaskRequest(), AwaitingMaskRequest() as state:
                return self._mask(state, request, self._float32(bounds))
            case SurvivorsRequest(), (AwaitingUnmask() | SessionFinished()) as state:
                return mask_phases.sign_survivors(state, request)
            case UnmaskRequest(), (AwaitingUnmask() | SessionFinished()) as state:
                return mask_phases.reveal_shares(state, request)
            case _:
                state_name = type(self.state).__name__ if self.state else "no session"
                raise OutOfPhase(
                    f"{self.device.name}: unexpected {type(request).__name__} in {state_name}"
                )

    def _mask(
        self, state: AwaitingMaskRequest, request: MaskRequest, bounds: NDArray[np.float32] | None
    ) -> tuple[SessionState, Reply]:
        ready = mask_phases.commit_update(state, request, self.update, bounds=bounds)
        self._move_to(ready)  # if storing fails, nothing is masked and the request may be repeated
        masked, reply, self.vector, self.sums_S = mask_phases.mask_update(
            ready, self.update, num_threads=self._num_threads
        )
        # The values are overwritten.
        self.update = replace(self.update, values_P=torch.empty(0), sums_S=torch.empty(0))
        return masked, reply

    def _float32(self, bounds: memoryview | bytes | None) -> NDArray[np.float32] | None:
        if bounds is None:
            return None
        if len(bounds) % 4:
            raise CorruptUpdate(
                f"{self.device.name}: {len(bounds)} bytes are no whole number of float32"
            )
        return np.frombuffer(bounds, "<f4").astype(np.float32)

    def move_out(self) -> None:
        """Copy the update, masked or not, out of memory that is about to be reused."""
        if self._is_closed:
            return
        if self.vector is not None:
            self.vector = self.vector.copy()
        else:
            self.update = replace(self.update, values_P=self.update.values_P.clone())

    def close(self) -> None:
        """Erase the remaining secrets; only ``record`` and ``vector`` are kept."""
        self._is_closed = True
        if self.state is not None:
            erase(self.state)
        self.state = None
        self._replies.clear()
