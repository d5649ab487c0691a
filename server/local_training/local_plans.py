"""Plans under which devices move the model: local steps, or a client algorithm of the user's."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.common.local_training.local_terms import LocalTerms, local_terms
from headwater.common.local_training.terms import LocalPlan
from headwater.common.messages import DescribeRequest
from headwater.common.settings.schema import Settings
from headwater.common.wording import counted
from headwater.server.local_training.local_round import LocalRound, local_round
from headwater.server.planning.features import DraftPlan, PlanningFeature


class LocalPlans(PlanningFeature):
    """Divides each quota into local steps."""

    def demand(self) -> LocalRound | None:
        return local_round(self.settings, num_parameters=self.layout.num_parameters)

    def describe(self, request: DescribeRequest) -> DescribeRequest:
        label = self.settings.algorithm.label
        return request.model_copy(update={"algorithm": label})

    def write(self, drafts: Sequence[DraftPlan], *, num_invited: int) -> None:
        local, (how, label) = self.demand(), algorithm_of(self.settings)
        rate = self.settings.local.rate
        for draft in drafts:
            number = 1 if local is None else _divided(draft, local)
            draft.ask(LocalPlan(steps=number, learning_rate=rate, how=how, algorithm=label))


def _divided(draft: DraftPlan, local: LocalRound) -> int:
    """Divide a quota into steps, each of one micro-batch or more; return their number."""
    one = draft.assignment
    owned = one.estimate.num_examples
    number = local.num_steps(one.quota, num_examples=owned)
    draft.micro_batch_size = min(draft.micro_batch_size, -(-one.quota // number))
    # They move the model, so a device must not choose their number by stopping early.
    draft.finish_seconds = None
    draft.is_evened = False
    draft.more_words = f" in {counted(number, 'local step')}"
    if local.epochs and one.quota == local.epochs * owned:
        draft.quota_words = f"{counted(local.epochs, 'epoch')} of its {counted(owned, 'example')}"
    elif one.accumulation_steps is not None:
        draft.quota_words = f"K set to {one.accumulation_steps}"
    return number


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
