"""Plans for tests, in which the fields of all features' terms stand side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.common.local_training.terms import PLAIN, LocalPlan
from headwater.common.messages import Plan
from headwater.common.secagg.terms import MaskingTerms

# By the name of the terms: the field of a flat plan, and that of the terms.
FIELDS = {
    "local_training": {
        "local_steps": "steps",
        "local_learning_rate": "learning_rate",
        "local": "how",
        "algorithm": "algorithm",
    },
    "own_parameters": {"own_learning_rate": "learning_rate"},
    "offline": {"max_windows": "windows", "refused_round": "refused_round"},
    "overlap": {"after": "after"},
    "secagg": {"num_invited": "num_invited", "answer_seconds": "answer_seconds"},
}


def fields_of(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's fields, with what belongs to features as its terms.

    Masks are terms of a plan with ``is_masked``; ``privacy`` and ``compression`` are whole terms.
    """
    left = {key: value for key, value in flat.items() if value is not None}
    terms: dict[str, Any] = {}
    is_masked = left.pop("is_masked", False)
    for name in ("privacy", "compression"):
        if name in left:
            terms[name] = left.pop(name)
    for name, fields in FIELDS.items():
        found = {one: left.pop(flat) for flat, one in fields.items() if flat in left}
        if found and (name != "secagg" or is_masked):
            terms[name] = found
    if is_masked:
        terms.setdefault(MaskingTerms.NAME, {})
    return {**left, "terms": terms}


def plan_of(**flat: Any) -> Plan:
    """Return a plan of these fields; see ``fields_of``."""
    return Plan.model_validate(fields_of(flat))


def local_of(plan: Plan) -> LocalPlan:
    """Return what a plan says of local steps."""
    return plan.of(LocalPlan) or PLAIN


def changed(plan: Plan, **flat: Any) -> Plan:
    """Return a plan with other fields, also of its features' terms."""
    fields = plan.model_dump() | fields_of(flat)
    for name, terms in plan.terms.items():
        fields["terms"][name] = terms.model_dump() | fields["terms"].get(name, {})
    return Plan.model_validate(fields)


def without_masks(plan: Plan) -> Plan:
    """Return a plan whose update is sent in clear."""
    terms = {name: one for name, one in plan.terms.items() if name != MaskingTerms.NAME}
    return plan.model_copy(update={"terms": terms})
