"""The clients as asynchronous rounds see them: plans of several models may be out at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from headwater.common.messages import Plan, ReadyReport, Update
from headwater.common.model.parameters import ModelImage
from headwater.server.fleet import Dropout, Fleet


class DispatchingFleet(Fleet, Protocol):
    """A fleet that sends plans without awaiting their answers."""

    def dispatch(self, plans: Mapping[str, Plan], image: ModelImage, *, round_number: int) -> None:
        """Send plans, and the model as it is now; ``round_number`` is that of the next step."""
        ...

    def next_answer(self) -> Update | ReadyReport | Dropout | None:
        """Wait for the next answer to any dispatched plan; None if no plan is out.

        The vector of an update is valid until the next answer is requested.
        """
        ...

    def virtual_now(self) -> float | None:
        """Return the simulator's clock in seconds; None if the clock is real."""
        ...
