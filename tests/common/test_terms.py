"""The terms of features in a plan: read by their names, refused by name, and agreed on in full."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.common.errors import CorruptUpdate, FeatureMissing
from headwater.common.flower.records import json_text, parse
from headwater.common.messages import Plan
from headwater.common.secagg.plan_digest import plan_digest
from headwater.common.terms import KINDS, Terms, kind_of, register

FIELDS: dict[str, Any] = {
    "round": 1,
    "run_seed": 0,
    "model_version": 0,
    "quota": 4,
    "micro_batch_size": 2,
}
# Two values of each field of each feature's terms.
VALUES: dict[str, dict[str, tuple[Any, Any]]] = {
    "compression": {
        "method": ("random-k", "top-k"),
        "fraction": (0.5, 0.25),
        "feedback": (True, False),
        "values": ("int4", "bfloat16"),
        "rank": (2, 1),
        "matrices": ([[0, 3, 4]], [[0, 4, 3]]),
        "side": ("left", "right"),
        "columns": ("d3d3", "iIiI"),
    },
    "evaluation": {
        "model": ("ab" * 32, "cd" * 32),
        "other": ("ef" * 32, None),
        "model_round": (3, 4),
        "measures": ("ab" * 32, "cd" * 32),
        "num_counts": (2, 3),
        "num_reals": (1, 2),
        "fraction": (0.1, 0.2),
        "held_out": ("last", "random"),
    },
    "control_variates": {"variate": ("AACAPwAAAAA=", "AAAAAAAAgD8="), "first_round": (0, 1)},
    "local_training": {
        "steps": (2, 3),
        "learning_rate": (0.1, 1e-30),
        "how": ({"proximal": 0.5}, None),
        "algorithm": ("FedProx(mu=0.1)", None),
    },
    "overlap": {"after": (3, 4)},
    "offline": {"windows": (5, 4), "refused_round": (3, None)},
    "own_parameters": {"learning_rate": (0.1, 0.2)},
    "privacy": {
        "norm_bound": (1.0, 2.0),
        "noise_multiplier": (1.0, 1.0000000000000002),
        "min_survivors": (0.7, 0.8),
        "corrupted": (0.1, 0.2),
        "min_colluding": (1, 2),
        "example_bound": (0.5, None),
        "bit_multiplier": (2.0, None),
    },
    "secagg": {"num_invited": (5, 6), "answer_seconds": (2.0, 3.0)},
    "statistics": {
        "scale_bits": (20, None),
        "columns": ("ab" * 32, "cd" * 32),
        "num_counts": (2, 3),
        "num_moments": (1, 2),
        "found": ({"counts": (3, 4), "moments": (0.5,)}, None),
    },
}
# What may differ between the members of one session, and why is said at ``shared_text``.
MAY_DIFFER = {("secagg", "num_invited"), ("secagg", "answer_seconds")}
EACH_FIELD = [(name, field) for name, fields in VALUES.items() for field in fields]


def plan(**terms: dict[str, Any]) -> Plan:
    return Plan.model_validate({**FIELDS, "terms": terms})


def first_values(name: str, *without: str) -> dict[str, Any]:
    return {field: values[0] for field, values in VALUES[name].items() if field not in without}


def test_each_feature_s_terms_are_listed_by_their_own_name_and_tried_here() -> None:
    assert {name: kind_of(name).NAME for name in KINDS} == {name: name for name in KINDS}
    assert KINDS.keys() == VALUES.keys()
    for name in KINDS:
        assert kind_of(name).model_fields.keys() == VALUES[name].keys()


@pytest.mark.parametrize("name", KINDS)
def test_terms_are_read_back_as_they_were_sent(name: str) -> None:
    without = ("bit_multiplier",) if name == "privacy" else ()
    sent = plan(**{name: first_values(name, *without)})
    found = parse(sent.model_dump_json(exclude_none=True), Plan)
    assert found.model_dump_json() == sent.model_dump_json()  # tensors have no truth value
    kind = kind_of(name)
    assert type(found.of(kind)) is kind
    assert plan().of(kind) is None


@pytest.mark.parametrize(("name", "field"), EACH_FIELD)
def test_the_members_of_a_session_agree_on_each_field_but_those_that_are_said(
    name: str, field: str
) -> None:
    without = {"example_bound": "bit_multiplier", "bit_multiplier": "example_bound"}.get(field, "")
    without = without or ("bit_multiplier" if name == "privacy" else "")
    one = first_values(name, without)
    other = {**one, field: VALUES[name][field][1]}
    differ = plan_digest(plan(**{name: one}), "") != plan_digest(plan(**{name: other}), "")
    assert differ == ((name, field) not in MAY_DIFFER)


def test_a_session_agrees_on_which_features_act() -> None:
    digests = {
        plan_digest(plan(**{name: first_values(name, "bit_multiplier")}), "") for name in VALUES
    }
    assert len(digests | {plan_digest(plan(), "")}) == len(VALUES) + 1


def test_a_feature_that_is_not_here_is_refused_by_its_name() -> None:
    text = json.dumps({**FIELDS, "terms": {"nobody_has": {"rate": 0.1}}})
    with pytest.raises(FeatureMissing, match="'nobody_has'"):
        parse(text, Plan)


@pytest.mark.parametrize(
    "terms",
    [
        {"privacy": {}},
        {"privacy": {"norm_bound": -1.0, "noise_multiplier": 1.0}},
        {"privacy": 3},
        {"compression": {"method": "int8", "secret": 1}},
        ["privacy"],
        {"": {}},
        {"a b": {}},
    ],
)
def test_terms_that_are_none_are_corrupt_or_missing_and_nothing_else(terms: Any) -> None:
    with pytest.raises((CorruptUpdate, FeatureMissing)):
        parse(json.dumps({**FIELDS, "terms": terms}), Plan)


def test_what_is_asked_again_replaces_what_was_asked_before() -> None:
    first, second = (kind_of("secagg").model_validate({"num_invited": number}) for number in (3, 4))
    before = plan(offline={"windows": 2}).asking(first)
    assert before.asking(second).terms.keys() == {"offline", "secagg"}
    assert before.asking(second).of(type(second)) == second
    assert isinstance(first, Terms)
    assert before.keeps_update
    assert before.max_windows == 2
    assert not plan().keeps_update


def test_another_version_of_a_user_s_feature_is_named() -> None:
    class Own(Terms):
        NAME = "own_of_this_test"
        rate: float = 0.1

    register(Own)
    sent = {**FIELDS, "terms": {"own_of_this_test": {"mu": 1.0}}}
    with pytest.raises(FeatureMissing, match=r"own_of_this_test is another one.*mu"):
        parse(json.dumps(sent), Plan)


def sent(*terms: Terms) -> dict[str, Any]:
    plan = Plan(**FIELDS).asking(*terms)
    assert parse(json_text(plan), Plan) == plan
    found: dict[str, Any] = json.loads(json_text(plan))
    return found


def test_what_is_so_by_default_is_not_sent_so_that_earlier_versions_refuse_new_fields_alone() -> (
    None
):
    kind = kind_of("compression")
    plain = kind.model_validate({"method": "int8"})
    assert sent(plain)["terms"] == {"compression": {"method": "int8"}}
    assert "held_out" not in sent()
    assert plain.shared_text() == '{"method": "int8"}'


def test_all_of_a_user_s_own_terms_is_sent_as_the_other_side_s_file_may_have_other_defaults() -> (
    None
):
    class Rate(Terms):
        NAME = "test_own_rate"
        value: float = 0.5

    register(Rate)
    assert sent(Rate())["terms"] == {"test_own_rate": {"value": 0.5}}
    assert Rate().shared_text() == '{"value": 0.5}'
