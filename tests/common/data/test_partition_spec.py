"""The texts of partitions, and the rules that they are parsed into."""

from __future__ import annotations

import pytest

from headwater.common.data.partition_spec import PartitionRule, parse_rule
from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import from_run_config, load

RULES = {
    "iid": PartitionRule(kind="iid"),
    "dirichlet": PartitionRule(kind="dirichlet", amount=0.5, column="label"),
    "dirichlet:0.3": PartitionRule(kind="dirichlet", amount=0.3, column="label"),
    "dirichlet:0.3:region": PartitionRule(kind="dirichlet", amount=0.3, column="region"),
    "labels": PartitionRule(kind="labels", amount=2, column="label"),
    "labels:3:region": PartitionRule(kind="labels", amount=3, column="region"),
    "column:author": PartitionRule(kind="column", column="author"),
    "quantity": PartitionRule(kind="quantity", amount=1.0),
    "quantity:2": PartitionRule(kind="quantity", amount=2.0),
    "quantity:lognormal": PartitionRule(kind="quantity", amount=1.0),
    "quantity:lognormal:0.5": PartitionRule(kind="quantity", amount=0.5),
    "quantity:dirichlet": PartitionRule(kind="quantity", law="dirichlet", amount=0.5),
    "quantity:dirichlet:2": PartitionRule(kind="quantity", law="dirichlet", amount=2.0),
}
INVALID = [
    "",
    "Iid",
    "iid:1",
    "task:1",
    "dirichlet:0",
    "dirichlet:-1",
    "dirichlet:nan",
    "dirichlet:inf",
    "dirichlet:much",
    "dirichlet:1e7",
    "dirichlet:1:label:2",
    "labels:0",
    "labels:1.5",
    "labels:-1",
    "labels:²",
    "column",
    "column:",
    "column:author:2",
    "quantity:9",
    "quantity:zipf:1",
    "quantity:lognormal:1:2",
]


@pytest.mark.parametrize("text", RULES)
def test_each_text_is_parsed_into_its_rule(text: str) -> None:
    assert parse_rule(text, examples_per_device=None, seed=0) == RULES[text]


@pytest.mark.parametrize("text", INVALID)
def test_any_other_text_is_a_settings_error(text: str) -> None:
    with pytest.raises(SettingsError, match=r"the command line: partition.*expected"):
        load(None, {"partition.kind": text})


def test_the_task_s_own_split_has_no_rule_and_no_examples_per_device() -> None:
    assert load(None, {}).partition.rule(seed=0) is None
    with pytest.raises(SettingsError, match="the task's own split"):
        load(None, {"partition.examples_per_device": 3})


def test_a_rule_has_the_run_s_seed_and_survives_the_run_configuration() -> None:
    chosen = {"partition.kind": "labels:3", "partition.examples_per_device": 8, "seed": 5}
    settings = from_run_config(load(None, chosen).to_run_config())
    rule = settings.partition.rule(seed=settings.seed)
    assert rule == PartitionRule(
        kind="labels", amount=3, column="label", examples_per_device=8, seed=5
    )


def test_the_default_is_the_task_s_own_split() -> None:
    assert Settings().partition.kind == "task"
