"""The fleet on a Flower Grid in asynchronous rounds: it sends plans, and awaits no answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from flwr.serverapp import Grid

from headwater.common.errors import HeadwaterError
from headwater.common.messages import Plan, ReadyReport, Update
from headwater.common.model.parameters import ModelImage
from headwater.server.asynchronous.dispatched_plans import DispatchedPlans
from headwater.server.fleet import Dropout
from headwater.server.flower.grid_fleet import GridFleet
from headwater.server.flower.intermediaries import Intermediaries


class DispatchingGridFleet(GridFleet):
    """``DispatchingFleet`` for every grid."""

    def __init__(self, grid: Grid, *, intermediaries: Intermediaries | None = None) -> None:
        super().__init__(grid, intermediaries=intermediaries)
        self._dispatched = DispatchedPlans(self._own or self._polled, self._registration)

    def dispatch(self, plans: Mapping[str, Plan], image: ModelImage, *, round_number: int) -> None:
        self._dispatched.dispatch(plans, image, round_number=round_number)

    def next_answer(self) -> Update | ReadyReport | Dropout | None:
        return self._dispatched.next_answer(described=self._reports, request=self._request)

    @property
    def takes_two_plans(self) -> bool:
        return self._own is not None and not self._own.has_virtual_clock

    def hold_back(self, names: Collection[str]) -> None:
        self._dispatched.hold_back(names)

    def drop(self, names: Collection[str]) -> None:
        self._dispatched.drop(names)

    def give_up(self, errors: Mapping[str, HeadwaterError]) -> None:
        self._dispatched.give_up(errors)

    def virtual_now(self) -> float | None:
        return None if self._own is None else self._own.virtual_now()
