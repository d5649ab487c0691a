"""Keeps updates in memory until their secure sessions have ended.

The vector stays in the accumulator's memory and is masked there. It is copied only when that memory
is about to be used again: by another client in the same process, or by this client's probe. The
secrets of a session are erased when a new plan arrives, or when the client leaves the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from headwater.client.node_features import NodeFeature
from headwater.client.training.accumulator import Accumulator
from headwater.common.errors import UpdateNotHeld

if TYPE_CHECKING:  # most clients never mask, and the module costs 0.5 MB of an idle one's memory
    from headwater.client.secagg.session import SecureSession


class PendingUpdates:
    """The sessions of one process's updates, at most one per client."""

    def __init__(self) -> None:
        self._by_name: dict[str, SecureSession] = {}

    def start_plan(self, *, run_id: int, round_number: int, name: str) -> None:
        """Discard the client's previous update, and every update of another round."""
        self._discard(
            session
            for session in self._by_name.values()
            if (session.device.run, session.device.round) != (run_id, round_number)
            or session.device.name == name
        )

    def add(self, session: SecureSession, accumulator: Accumulator) -> None:
        """Keep an update in the accumulator's memory; it is copied if that is needed again."""
        self._by_name[session.device.name] = session
        accumulator.lend(session.move_out)

    def get(self, run_id: int, name: str) -> SecureSession:
        """Return the session of a client's update in a run.

        Raises:
            UpdateNotHeld: this process has no such update.
        """
        session = self._by_name.get(name)
        if session is None or session.device.run != run_id:
            raise UpdateNotHeld(
                f"{name}: this process holds no update for a session of the run: the process was "
                "restarted, or the round is over"
            )
        return session

    def is_waiting(self, name: str) -> bool:
        """Whether a client has an update whose session has not ended."""
        return name in self._by_name and not self._by_name[name].is_over

    def discard(self, name: str) -> None:
        """Erase a client's session and drop its update."""
        self._discard(session for session in self._by_name.values() if session.device.name == name)

    def _discard(self, sessions: Iterable[SecureSession]) -> None:
        for session in list(sessions):
            session.close()
            del self._by_name[session.device.name]


_pending: WeakKeyDictionary[Accumulator, PendingUpdates] = WeakKeyDictionary()


def pending_in(accumulator: Accumulator) -> PendingUpdates:
    """Return the pending updates of the clients that sum into this accumulator."""
    return _pending.setdefault(accumulator, PendingUpdates())


class WaitingUpdate(NodeFeature):
    """A node's update whose session has not ended."""

    @property
    def is_waiting(self) -> bool:
        """Whether there is one."""
        return self._pending.is_waiting(self.node.name)

    def left(self) -> None:
        """Erase the session's secrets."""
        self._pending.discard(self.node.name)

    @property
    def _pending(self) -> PendingUpdates:
        return pending_in(self.node.trainer.accumulator)
