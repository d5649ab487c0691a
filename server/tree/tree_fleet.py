"""The fleet of a server that has aggregators: it plans for their devices, and gets their sums.

The server above plans for every device, as if all were its own, and sees their reports; of the
updates it sees the branches' sums alone. Masks are not offered: they cancel within a branch, so its
aggregator would see the sum of its devices (docs/scale.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from headwater.common.errors import SettingsError
from headwater.common.flower.sent_model import SentModel
from headwater.common.messages import DescribeRequest, EvaluateReport, Plan, WireMessage
from headwater.common.model.parameters import ModelImage
from headwater.common.phases import Phase
from headwater.server.fleet import (
    BranchOrder,
    BranchSum,
    Counts,
    Dropout,
    Fleet,
    Reply,
    Traffic,
    everyone,
)
from headwater.server.planning.cohort import ConnectedClients
from headwater.server.tree.aggregator import Aggregator


class TreeFleet:
    """A fleet whose devices are divided among aggregators; all else is as without them."""

    def __init__(
        self,
        fleet: Fleet,
        aggregators: Sequence[Aggregator],
        *,
        branch_of: Callable[[str], int],
        order: Callable[[Mapping[str, Plan]], BranchOrder],
    ) -> None:
        """``branch_of`` is a device's aggregator, by its position; ``order`` makes its orders."""
        self._fleet = fleet
        self._aggregators = aggregators
        self._branch_of = branch_of
        self._order = order

    @property
    def has_virtual_clock(self) -> bool:
        return self._fleet.has_virtual_clock

    @property
    def can_repeat_rounds(self) -> bool:
        return self._fleet.can_repeat_rounds

    def share_frozen(self, image: ModelImage) -> None:
        self._fleet.share_frozen(image)

    def describe(
        self, request: DescribeRequest, *, min_clients: int, counts: Counts = everyone
    ) -> ConnectedClients:
        return self._fleet.describe(request, min_clients=min_clients, counts=counts)

    def ask_again(self, requests: Mapping[str, DescribeRequest]) -> None:
        self._fleet.ask_again(requests)

    def turn_seconds(self) -> float:
        return self._fleet.turn_seconds()

    def train(
        self,
        plans: Mapping[str, Plan],
        image: SentModel,
        *,
        num_needed: int = 0,
        timeout_seconds: float | None,
    ) -> Iterator[BranchSum]:
        """Send each aggregator its devices' plans, and yield its sum."""
        branches: dict[int, dict[str, Plan]] = defaultdict(dict)
        for name, plan in plans.items():
            branches[self._branch_of(name)][name] = plan
        for number, own in sorted(branches.items()):
            yield self._aggregators[number].train(
                self._order(own), image, num_needed=num_needed, timeout_seconds=timeout_seconds
            )

    def converse(
        self,
        phase: Phase,
        requests: Mapping[str, WireMessage],
        *,
        vector: bytes | None = None,
        reply_bytes: int = 0,
        num_needed: int = 0,
        timeout_seconds: float | None,
    ) -> Iterator[Reply | Dropout]:
        """Refuse: no secure session spans the branches.

        Raises:
            SettingsError: always.
        """
        raise SettingsError(
            "a secure session cannot span the branches of a tree",
            remedy="leave out --aggregators or --secure-aggregation",
        )

    def evaluate(
        self, plans: Mapping[str, Plan], image: SentModel, *, timeout_seconds: float | None
    ) -> Iterator[EvaluateReport | Dropout]:
        return self._fleet.evaluate(plans, image, timeout_seconds=timeout_seconds)

    def traffic(self) -> Traffic:
        """Return the bytes of the devices; those between the servers are not among them."""
        return self._fleet.traffic()

    def simulated_state(self) -> dict[str, Any]:
        return self._fleet.simulated_state()

    def restore_simulated(self, state: Mapping[str, Any]) -> None:
        self._fleet.restore_simulated(state)
