"""Writes a round's assignments as plans: the messages that tell the clients what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headwater.common.local_training.terms import LocalPlan
from headwater.common.messages import Plan
from headwater.common.offline.terms import OfflineTerms
from headwater.common.optimizers.local_terms import LocalTerms
from headwater.common.own_parameters.terms import OwnStepTerms
from headwater.common.secagg.terms import MaskingTerms
from headwater.common.settings.schema import EvaluationSettings, Settings
from headwater.common.terms import Terms, named
from headwater.server.planning import plan_reasons
from headwater.server.planning.answer_times import answer_times
from headwater.server.planning.planner import Assignment
from headwater.server.planning.target_batch import LocalRound


def plans_of(
    assigned: Mapping[str, Assignment],
    settings: Settings,
    *,
    round_number: int,
    counted: Mapping[str, int],
    weights: Mapping[str, int],
    micro_batch_size: Callable[[int, int], int],
    frozen: str | None,
    has_own_parameters: bool = False,
    local: LocalRound | None = None,
) -> dict[str, Plan]:
    """Return the plans by name; clients with the same assignment and figures share a plan.

    ``counted`` is the last round whose sum includes a client's update; ``weights`` are those of
    dataset weighting; ``micro_batch_size`` may change the size for a quota and a planned size;
    ``frozen`` is the digest of the model's frozen part; ``has_own_parameters`` says whether some
    stay on the devices; ``local`` is the work of local training.
    """
    chosen, (terms, label) = settings.plan, algorithm_of(settings)
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
    is_masked = settings.secure.aggregation != "off"
    asked: list[Terms] = []
    if (compressed := settings.compression.terms) is not None:
        asked.append(compressed)
    if settings.asynchronous.is_on:
        asked.append(OfflineTerms(windows=settings.asynchronous.offline_windows))
    if has_own_parameters:
        asked.append(OwnStepTerms(learning_rate=settings.local.rate))
    assignments = assigned.values()
    rounds, weights_of = map(counted.get, assigned), map(weights.get, assigned)
    kinds = list(zip(map(id, assignments), rounds, weights_of, strict=True))
    of_kinds = dict(zip(kinds, assignments, strict=True))
    steps = [_local_steps(one, local) for one in of_kinds.values()]
    sizes = [
        min(micro_batch_size(one.quota, one.micro_batch_size), -(-one.quota // number))
        for one, number in zip(of_kinds.values(), steps, strict=True)
    ]
    factor = settings.secure.answer_factor if is_masked else None
    times = answer_times(list(of_kinds.values()), sizes, factor=factor)
    shared = {}
    for (kind, assignment), size, number, answer in zip(
        of_kinds.items(), sizes, steps, times, strict=True
    ):
        own = list(asked)
        if local is not None or label is not None:
            rate = settings.local.rate
            own.append(LocalPlan(steps=number, learning_rate=rate, how=terms, algorithm=label))
        if is_masked:
            own.append(MaskingTerms(num_invited=len(assigned), answer_seconds=answer))
        fields = _work(assignment, settings, size, number, local)
        shared[kind] = Plan(
            **common, **fields, counted_round=kind[1], weigh_as=kind[2], terms=named(*own)
        )
    return dict(zip(assigned, map(shared.__getitem__, kinds), strict=True))


def algorithm_of(settings: Settings) -> tuple[LocalTerms | None, str | None]:
    """Return the terms of the local steps and the client algorithm, as plans state them.

    An algorithm of the user's takes the steps itself: then the terms have the correction alone, by
    the number of steps, and without it there are none.
    """
    label = settings.algorithm.label
    terms = settings.local.terms(settings.plan) if settings.local.is_on else None
    if settings.algorithm.name is not None and terms is not None:
        terms = LocalTerms(is_normalized=True) if terms.is_normalized else None
    return terms, label


def _local_steps(assignment: Assignment, local: LocalRound | None) -> int:
    if local is None:
        return 1
    return local.num_steps(assignment.quota, num_examples=assignment.estimate.num_examples)


def _work(
    assignment: Assignment,
    settings: Settings,
    micro_batch_size: int,
    local_steps: int,
    local: LocalRound | None,
) -> dict[str, Any]:
    """Return the fields of a plan that follow from its assignment."""
    deadline = settings.cohort.deadline_seconds
    evened = ""
    if local is None and micro_batch_size != assignment.micro_batch_size:
        evened = f", cut to {micro_batch_size} each to tell the noise"
    # Local steps move the model, so a device must not choose their number by stopping early.
    finish = assignment.finish_seconds(micro_batch_size) if local is None else None
    share = assignment.estimate.deadline_share
    return {
        "quota": assignment.quota,
        "micro_batch_size": micro_batch_size,
        # The device trains in this share of the deadline; the rest is for the transfers.
        "deadline_seconds": None if deadline is None else deadline * share,
        "finish_seconds": finish,
        "share": assignment.time_share,
        "reason": plan_reasons.of_plan(
            assignment, finish_seconds=finish, local=local, local_steps=local_steps
        )
        + evened,
    }


def held_out_fraction(chosen: EvaluationSettings) -> float:
    """Return the fraction of its examples that each device holds out."""
    return chosen.held_out_fraction if chosen.on_devices else 0.0
