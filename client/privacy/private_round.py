"""A private round on the device: clipped, and reported by the plan's own numbers alone."""

from __future__ import annotations

import logging

from headwater.client.privacy.clipped_examples import add_clipped_examples
from headwater.client.privacy.private_update import private_update
from headwater.client.training.round import Feature, Work
from headwater.common.errors import NonFiniteUpdate
from headwater.common.messages import Update
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.task import max_weight_per_example

log = logging.getLogger(__name__)


class PrivateRound(Feature):
    """Clips the update, or each example; it is never refused for its data."""

    def prepare(self, work: Work) -> None:
        if work.plan.uses_whole_window:
            work.add = add_clipped_examples

    def failed(self, work: Work, error: NonFiniteUpdate) -> bool:
        log.warning("%s: %s; a private round sends zeros instead", error.code, error)
        work.context.accumulator.zero()
        work.context.image.local_L.copy_(work.before_L)
        return True

    def finish(self, work: Work) -> Update:
        context, plan = work.context, work.plan
        terms = plan.of(PrivacyTerms)
        assert terms is not None
        return private_update(
            plan,
            terms,
            work.values_P,
            name=context.name,
            weight=max_weight_per_example(context.task) * plan.quota,
            seconds=context.clock.seconds() - work.start_seconds,
            vitals=context.vitals(),
        )
