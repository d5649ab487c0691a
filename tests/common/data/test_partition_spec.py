"""What one may write for a partition, and what it stands for."""

from __future__ import annotations

import pytest

from headwater.common.data.partition_spec import Rule, rule_of
from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings, from_run_config, load

MEANT = {
    "iid": Rule(kind="iid"),
    "dirichlet": Rule(kind="dirichlet", amount=0.5, column="label"),
    "dirichlet:0.3": Rule(kind="dirichlet", amount=0.3, column="label"),
    "dirichlet:0.3:region": Rule(kind="dirichlet", amount=0.3, column="region"),
    "labels": Rule(kind="labels", amount=2, column="label"),
    "labels:3:region": Rule(kind="labels", amount=3, column="region"),
    "column:author": Rule(kind="column", column="author"),
    "quantity": Rule(kind="quantity", amount=1.0),
    "quantity:2": Rule(kind="quantity", amount=2.0),
    "quantity:lognormal": Rule(kind="quantity", amount=1.0),
    "quantity:lognormal:0.5": Rule(kind="quantity", amount=0.5),
    "quantity:dirichlet": Rule(kind="quantity", law="dirichlet", amount=0.5),
    "quantity:dirichlet:2": Rule(kind="quantity", law="dirichlet", amount=2.0),
}
WRONG = [
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


@pytest.mark.parametrize("text", MEANT)
def test_a_text_stands_for_its_rule(text: str) -> None:
    assert rule_of(text, examples_per_device=None, seed=0) == MEANT[text]


@pytest.mark.parametrize("text", WRONG)
def test_any_other_text_is_an_error_of_the_settings(text: str) -> None:
    with pytest.raises(SettingsError, match=r"the command line: partition: .*(expected|too much)"):
        load(None, {"partition.kind": text})


def test_a_task_that_splits_its_own_data_has_no_rule_and_no_examples_per_device() -> None:
    assert load(None, {}).partition.rule(seed=0) is None
    with pytest.raises(SettingsError, match="the task's own split"):
        load(None, {"partition.examples_per_device": 3})


def test_a_rule_has_the_run_s_seed_and_travels_with_the_run_s_configuration() -> None:
    chosen = {"partition.kind": "labels:3", "partition.examples_per_device": 8, "seed": 5}
    settings = from_run_config(load(None, chosen).to_run_config())
    rule = settings.partition.rule(seed=settings.seed)
    assert rule == Rule(kind="labels", amount=3, column="label", examples_per_device=8, seed=5)


def test_the_default_is_as_before() -> None:
    assert Settings().partition.kind == "task"
