"""Writes a round's assignments as plans: the messages that tell the clients what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headwater.common.messages import Plan
from headwater.common.settings.schema import EvaluationSettings, Settings
from headwater.server.planning import plan_reasons
from headwater.server.planning.features import DraftPlan, PlanningMoments
from headwater.server.planning.planner import Assignment


def plans_of(
    assigned: Mapping[str, Assignment],
    settings: Settings,
    *,
    round_number: int,
    counted: Mapping[str, int],
    weights: Mapping[str, int],
    micro_batch_size: Callable[[int, int], int],
    frozen: str | None,
    features: Sequence[PlanningMoments] = (),
) -> dict[str, Plan]:
    """Return the plans by name; clients with the same assignment and figures share a plan.

    ``counted`` is the last round whose sum includes a client's update; ``weights`` are those of
    dataset weighting; ``micro_batch_size`` may change the size for a quota and a planned size;
    ``frozen`` is the digest of the model's frozen part.
    """
    chosen = settings.plan
    common = {
        "round": round_number,
        "run_seed": settings.seed,
        "model_version": round_number - 1,
        "max_tokens": chosen.max_tokens_per_micro_batch,
        "precision": chosen.precision,
        "held_out_fraction": held_out_fraction(settings.evaluation),
        "held_out": settings.evaluation.held_out,
        "frozen": frozen,
    }
    assignments = assigned.values()
    rounds, weights_of = map(counted.get, assigned), map(weights.get, assigned)
    kinds = list(zip(map(id, assignments), rounds, weights_of, strict=True))
    of_kinds = dict(zip(kinds, assignments, strict=True))
    drafts = [_draft(one, micro_batch_size) for one in of_kinds.values()]
    for feature in features:
        feature.write(drafts, num_invited=len(assigned))
    shared = {
        kind: Plan(**common, **_work(draft, settings), counted_round=kind[1], weigh_as=kind[2])
        for kind, draft in zip(of_kinds, drafts, strict=True)
    }
    return dict(zip(assigned, map(shared.__getitem__, kinds), strict=True))


def _draft(assignment: Assignment, micro_batch_size: Callable[[int, int], int]) -> DraftPlan:
    size = micro_batch_size(assignment.quota, assignment.micro_batch_size)
    size = min(size, assignment.quota)
    return DraftPlan(
        assignment=assignment,
        micro_batch_size=size,
        finish_seconds=assignment.finish_seconds(size),
    )


def _work(draft: DraftPlan, settings: Settings) -> dict[str, Any]:
    """Return the fields of a plan that follow from its assignment, and its terms."""
    assignment, size = draft.assignment, draft.micro_batch_size
    deadline, share = settings.cohort.deadline_seconds, assignment.estimate.deadline_share
    is_cut = draft.is_evened and size != assignment.micro_batch_size
    return {
        "quota": assignment.quota,
        "micro_batch_size": size,
        # The device trains in this share of the deadline; the rest is for the transfers.
        "deadline_seconds": None if deadline is None else deadline * share,
        "finish_seconds": draft.finish_seconds,
        "share": assignment.time_share,
        "reason": plan_reasons.of_plan(
            assignment,
            finish_seconds=draft.finish_seconds,
            quota_words=draft.quota_words,
            more_words=draft.more_words,
        )
        + (f", cut to {size} each to tell the noise" if is_cut else ""),
        "terms": draft.terms,
    }


def held_out_fraction(chosen: EvaluationSettings) -> float:
    """Return the fraction of its examples that each device holds out."""
    return chosen.held_out_fraction if chosen.on_devices else 0.0
