"""Plans under which devices move the model: local steps, or a client algorithm of the user's."""

from __future__ import annotations

import numpy as np

from headwater.common.local_training.local_terms import LocalTerms, local_terms
from headwater.common.local_training.terms import LocalPlan
from headwater.common.messages import DescribeRequest
from headwater.common.model.layout import ModelLayout
from headwater.common.settings.schema import Settings
from headwater.common.wording import counted
from headwater.server.local_training.local_rates import LocalRates
from headwater.server.local_training.local_round import LocalRound, local_round
from headwater.server.planning.features import DraftPlans, PlanningFeature


class LocalPlans(PlanningFeature):
    """Divides each quota into local steps, and sets their learning rate."""

    def __init__(self, settings: Settings, layout: ModelLayout) -> None:
        super().__init__(settings, layout)
        self._rates = LocalRates(settings.local, settings.local_schedule)

    def demand(self) -> LocalRound | None:
        return local_round(self.settings, num_parameters=self.layout.num_parameters)

    def describe(self, request: DescribeRequest) -> DescribeRequest:
        label = self.settings.algorithm.label
        return request.model_copy(update={"algorithm": label})

    def write(self, drafts: DraftPlans) -> None:
        local, (how, label) = self.demand(), algorithm_of(self.settings)
        rate = self._rates.of_round(drafts.round_number)
        numbers = [1] * len(drafts.assigned) if local is None else _divided(drafts, local)
        terms = {
            number: LocalPlan(steps=number, learning_rate=rate, how=how, algorithm=label)
            for number in set(numbers)
        }
        drafts.ask_each([terms[number] for number in numbers])


def _divided(drafts: DraftPlans, local: LocalRound) -> list[int]:
    """Divide each quota into steps, each of one micro-batch or more; return their numbers."""
    assigned = drafts.assigned
    quotas, owned = assigned.quota.tolist(), assigned.known.num_examples.tolist()
    pairs = list(zip(quotas, owned, strict=True))
    numbers = [local.num_steps(quota, num_examples=own) for quota, own in pairs]
    drafts.micro_batch_size = np.minimum(
        drafts.micro_batch_size, -(-assigned.quota // np.array(numbers, dtype=np.int64))
    )
    # They move the model, so a device must not choose their number by stopping early.
    drafts.finish_seconds = np.full(len(assigned), np.nan)
    drafts.is_evened = False
    steps, epochs = assigned.accumulation_steps, local.epochs
    drafts.more_words = {
        name: f" in {counted(number, 'local step')}"
        for name, number in zip(assigned, numbers, strict=True)
    }
    drafts.quota_words = {
        name: f"{counted(epochs, 'epoch')} of its {counted(own, 'example')}"
        if epochs and quota == epochs * own
        else f"K set to {steps}"
        for name, (quota, own) in zip(assigned, pairs, strict=True)
        if steps is not None or (epochs and quota == epochs * own)
    }
    return numbers


def algorithm_of(settings: Settings) -> tuple[LocalTerms | None, str | None]:
    """Return the terms of the local steps and the client algorithm, as plans state them.

    An algorithm of the user's takes the steps itself: then the terms have the correction alone, by
    the number of steps, and without it there are none.
    """
    label = settings.algorithm.label
    terms = local_terms(settings.local, settings.plan) if settings.local.is_on else None
    if settings.algorithm.name is not None and terms is not None:
        terms = LocalTerms(is_normalized=True) if terms.is_normalized else None
    return terms, label
