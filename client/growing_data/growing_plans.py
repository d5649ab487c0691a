"""Plans on a device whose data change from one epoch to the next."""

from __future__ import annotations

import dataclasses

from headwater.client.flower.request import DeviceRequest
from headwater.client.flower.state_file import EXAMPLES, SAMPLER
from headwater.client.growing_data.known_examples import known_examples_of
from headwater.client.growing_data.refresh import watch_of
from headwater.client.plan_features import PlanFeature
from headwater.common.flower import records
from headwater.common.messages import Plan, Update


class GrowingData(PlanFeature):
    """A device's data that change from one epoch to the next."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def prepare(self, request: DeviceRequest, plan: Plan) -> None:
        """Follow what changed in the data at an epoch's end."""
        found = watch_of(request.trainer).refreshed(
            request.trainer, request.identity, plan, request.sampler, known_examples_of(request)
        )
        if found is None:
            return
        records.save_state(request.context, SAMPLER, found.sampler)
        records.save_state(request.context, EXAMPLES, found.known.to_json())
        if found.change is not None:
            self._counts = dataclasses.asdict(found.change) | {"num_owned": found.known.number}

    def finish(self, request: DeviceRequest, plan: Plan, update: Update) -> Update:
        """Count the examples that joined and left, and all; a private update tells of none."""
        if not self._counts or "privacy" in plan.terms:
            return update
        report = update.report.model_copy(update=self._counts)
        return dataclasses.replace(update, report=report)
