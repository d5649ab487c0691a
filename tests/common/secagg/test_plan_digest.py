"""The digest of what a round's plans have in common."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.common.secagg.plan_digest import plan_digest
from tests.plans import plan_of

FIELDS: dict[str, Any] = {
    "round": 1,
    "run_seed": 2,
    "model_version": 0,
    "quota": 8,
    "micro_batch_size": 4,
    "is_masked": True,
}


TERMS = {
    "norm_bound": 1.0,
    "noise_multiplier": 2.0,
    "min_survivors": 0.7,
    "corrupted": 0.1,
    "example_bound": 0.5,
}


@pytest.mark.parametrize("field", TERMS)
def test_plans_with_other_noise_have_other_digests(field: str) -> None:
    other = {**TERMS, field: TERMS[field] / 2}
    one = plan_digest(plan_of(**{**FIELDS, "privacy": TERMS}), "")
    assert one != plan_digest(plan_of(**{**FIELDS, "privacy": other}), "")


def test_plans_for_another_unit_of_privacy_have_other_digests() -> None:
    other = {key: value for key, value in TERMS.items() if key != "example_bound"}
    one = plan_digest(plan_of(**{**FIELDS, "privacy": TERMS}), "")
    assert one != plan_digest(plan_of(**{**FIELDS, "privacy": other}), "")


@pytest.mark.parametrize(
    "change",
    [
        {"round": 2},
        {"run_seed": 3},
        {"model_version": 1},
        {"local_steps": 2},
        {"local_learning_rate": 1e-30},
        {"local": {}},
        {"local": {"optimizer": "adam"}},
        {"local": {"arguments": {"momentum": 0.9}}},
        {"local": {"proximal": 0.1}},
        {"local": {"is_normalized": True}},
        {"precision": "bfloat16"},
        {"algorithm": "none"},
        {"held_out_fraction": 0.1},
        {"held_out": "last"},
        {"weigh_as": 8},
        {"privacy": TERMS},
    ],
    ids=str,
)
def test_plans_that_differ_in_a_common_field_have_other_digests(change: dict[str, Any]) -> None:
    assert plan_digest(plan_of(**FIELDS), "") != plan_digest(plan_of(**FIELDS | change), "")


def test_plans_of_unlike_devices_have_the_same_digest() -> None:
    other = {
        "quota": 9,
        "micro_batch_size": 2,
        "deadline_seconds": 5.0,
        "finish_seconds": 2.0,
        "counted_round": 3,
        "share": 0.5,
        "reason": "another",
    }
    assert plan_digest(plan_of(**FIELDS), "") == plan_digest(plan_of(**FIELDS | other), "")
    first, second = (plan_of(**FIELDS, weigh_as=weight) for weight in (3, 7))
    assert plan_digest(first, "") == plan_digest(second, "")
