"""An aggregator: a server to its own devices, and one answer to the server above.

It gets the plans of its devices and the scales of the round's sum, adds its devices' updates as
64-bit integers at those scales, and divides nothing. Integer addition is associative, so the sum of
the branches' sums is the sum of all devices' updates, bit for bit, however the devices are divided
among branches; it differs only where a sum had to be shifted (``aggregation.cohort_sum``).
"""

from __future__ import annotations

from headwater.common.errors import LateUpdate, OversizeUpdate
from headwater.common.flower.sent_model import SentModel
from headwater.common.messages import Update
from headwater.common.model.parameters import ModelImage
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.aggregation.extra_sums import ExtraSums
from headwater.server.fleet import BranchOrder, BranchSum, Fleet
from headwater.server.rounds.open_round import OpenRound
from headwater.server.tree.branch_wire import check_report


class Aggregator:
    """One branch of a tree; it needs the memory of one server, whatever the number of devices."""

    def __init__(self, name: str, fleet: Fleet, image: ModelImage) -> None:
        """Serve the devices of a fleet that are in the orders; the image is the model's layout."""
        self._name = name
        self._fleet = fleet
        self._num_values = image.layout.num_parameters
        self._total = CohortSum(image.layout)

    def train(
        self,
        order: BranchOrder,
        image: SentModel,
        *,
        num_needed: int,
        timeout_seconds: float | None,
    ) -> BranchSum:
        """Let the devices train, and return their sum; its integers are valid until the next call.

        A device that does not answer, or whose update is refused, is in ``refused``, and the others
        are in the sum. The fleet may raise a LateUpdate when the server above waits no longer: it
        is the reason of the devices that have not answered by then.
        """
        self._total.open_part(order.scale_bits)
        opened = OpenRound(
            plans=order.plans,
            total=self._total,
            rules=order.rules,
            owned={},  # for the noise scale, which the server above estimates from the reports
            extra=ExtraSums.of(order.plans.values(), self._num_values),
        )
        answers = self._fleet.train(
            order.plans, image, num_needed=num_needed, timeout_seconds=timeout_seconds
        )
        try:
            for answer in answers:
                if isinstance(answer, Update) and (plan := order.plans.get(answer.name)):
                    try:
                        check_report(answer.report, plan)
                    except OversizeUpdate as error:
                        opened.refuse_answer(answer.name, error)
                        continue
                opened.take(answer)
        except LateUpdate as late:
            for name in order.plans.keys() - opened.accepted.keys() - opened.refused.keys():
                opened.refuse(name, late)
        return opened.branch_sum(self._name)
