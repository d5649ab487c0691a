"""The clients as asynchronous rounds see them: plans of several models may be out at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from headwater.common.errors import HeadwaterError
from headwater.common.messages import Plan, ReadyReport, Update
from headwater.common.model.parameters import ModelImage
from headwater.server.fleet import Dropout, Fleet


class DispatchingFleet(Fleet, Protocol):
    """A fleet that sends plans without awaiting their answers."""

    def dispatch(self, plans: Mapping[str, Plan], image: ModelImage, *, round_number: int) -> None:
        """Send plans, and the model as it is now; ``round_number`` is that of the next step."""
        ...

    def next_answer(self) -> Update | ReadyReport | Dropout | None:
        """Wait for the next answer to any dispatched plan.

        None if no plan is out, or if a client has joined since the last call of ``describe``.
        The vector of an update is valid until the next answer is requested.
        """
        ...

    @property
    def takes_two_plans(self) -> bool:
        """Whether a client may be sent a second plan before it has answered the first."""
        ...

    def hold_back(self, names: Collection[str]) -> None:
        """Let the answers of these clients wait from now on, and those of no other."""
        ...

    def drop(self, names: Collection[str]) -> None:
        """Await no answer of these clients any more, and report none."""
        ...

    def give_up(self, errors: Mapping[str, HeadwaterError]) -> None:
        """Await these clients' answers no longer; each error is then the client's answer.

        A simulated client is free only when it would have answered.
        """
        ...

    def virtual_now(self) -> float | None:
        """Return the simulator's clock in seconds; None if the clock is real."""
        ...
