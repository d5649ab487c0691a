"""Updates are checked against their plans, in examples and steps; a batch counts whole or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch

from headwater.common.estimates.gradient_noise import NoiseSums, noise_sums
from headwater.common.messages import Step, Update, UpdateReport
from headwater.common.model.layout import ModelLayout, layout_of
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.aggregation.norm_watch import NormWatch
from headwater.server.aggregation.round_reports import (
    Floats,
    Ints,
    ReportBatch,
    ReportColumns,
    figures_of,
)
from headwater.server.fleet import UpdateBlock, UpdateRules
from headwater.server.rounds.open_round import OpenRound
from tests.plans import plan_of

STEP = Step(num_examples=1, weight=1, loss=0.0, gradient_norm=0.0, seconds=1.0, peak_bytes=0)


def report_of(
    name: str, num_examples: int, *, num_steps: int | None = None, num_windows: int = 1
) -> UpdateReport:
    """Return a report of so many examples, with a step for each if nothing else is said."""
    return UpdateReport(
        name=name,
        round=1,
        num_examples=num_examples,
        weight=num_examples,
        loss_sum=0.0,
        micro_batch_size=1,
        seconds=1.0,
        steps=(STEP,) * (num_examples if num_steps is None else num_steps),
        reason="quota",
        num_windows=num_windows,
    )


def refusal(
    *,
    quota: int,
    num_examples: int,
    num_steps: int,
    finish: float | None,
    num_windows: int = 1,
    max_windows: int = 1,
) -> str | None:
    """Return the code by which an update is refused, None if it is taken."""
    plan = plan_of(
        round=1,
        run_seed=0,
        model_version=0,
        quota=quota,
        micro_batch_size=1,
        finish_seconds=finish,
        max_windows=max_windows,
    )
    total = CohortSum(ModelLayout(trainable=()))
    total.open(num_clients=1, planned_weight=plan.max_examples)
    opened = OpenRound(plans={"pi": plan}, total=total, owned={"pi": 2**53})
    report = report_of("pi", num_examples, num_steps=num_steps, num_windows=num_windows)
    opened.take(Update(values_P=torch.zeros(0), report=report))
    error = opened.refused.get("pi")
    return None if error is None else error.code


@pytest.mark.parametrize(
    ("num_examples", "finish", "code"),
    [
        pytest.param(40, None, None, id="its quota"),
        pytest.param(41, None, "CountOutOfRange", id="one more than its quota"),
        pytest.param(48, 9.0, None, id="a fifth more, where the round is bound by time"),
        pytest.param(49, 9.0, "CountOutOfRange", id="one more than that"),
        pytest.param(1, 9.0, None, id="less than half: it may have been stopped"),
    ],
)
def test_an_update_holds_no_more_examples_than_its_plan_allows(
    num_examples: int, finish: float | None, code: str | None
) -> None:
    found = refusal(quota=40, num_examples=num_examples, num_steps=1, finish=finish)
    assert found == code


@pytest.mark.parametrize(
    ("num_examples", "num_windows", "code"),
    [
        pytest.param(200, 5, None, id="the examples of its windows"),
        pytest.param(201, 5, "CountOutOfRange", id="one more than those"),
        pytest.param(40, 6, "CountOutOfRange", id="more windows than its plan allows"),
        pytest.param(41, 1, "CountOutOfRange", id="one more than those of its one window"),
    ],
)
def test_an_update_of_several_windows_holds_no_more_than_its_plan_allows(
    num_examples: int, num_windows: int, code: str | None
) -> None:
    found = refusal(
        quota=40,
        num_examples=num_examples,
        num_steps=1,
        finish=None,
        num_windows=num_windows,
        max_windows=5,
    )
    assert found == code


@pytest.mark.parametrize(("finish", "most"), [(None, 40), (9.0, 48)])
def test_an_update_holds_a_step_an_example_and_one_more_at_the_most(
    finish: float | None, most: int
) -> None:
    for num_steps, code in ((most + 1, None), (most + 2, "CountOutOfRange")):
        found = refusal(quota=40, num_examples=40, num_steps=num_steps, finish=finish)
        assert found == code


class Reports(ReportBatch):
    """The reports of several clients."""

    def __init__(self, *reports: UpdateReport, are_summed: bool = True) -> None:
        self._reports = reports
        self.are_summed = are_summed

    def __len__(self) -> int:
        return len(self._reports)

    def __getitem__(self, at: int) -> UpdateReport:  # type: ignore[override]
        return self._reports[at]

    @property
    def columns(self) -> ReportColumns:
        return ReportColumns.of(*self._reports)

    def figures(self) -> dict[str, Any]:
        return figures_of(self._reports)

    @property
    def timing(self) -> tuple[Ints, Ints, Floats]:
        measured = [one.measured for one in self._reports]
        steps = [step for one in measured for step in one]
        sizes = np.array([size for size, _ in steps], dtype=np.int64)
        return np.array(list(map(len, measured))), sizes, np.array([took for _, took in steps])

    def noise(self, owned: Mapping[str, int]) -> Sequence[NoiseSums]:
        return [noise_sums(one, num_owned=owned[one.name]) for one in self._reports]


def taken(*batches: Sequence[tuple[str, int]]) -> OpenRound:
    """Return a round of quotas of 4 that took these batches of (name, number of examples)."""
    plan = plan_of(round=1, run_seed=0, model_version=0, quota=4, micro_batch_size=1)
    total = CohortSum(ModelLayout(trainable=()))
    total.open(num_clients=3, planned_weight=12)
    opened = OpenRound(plans=dict.fromkeys("abc", plan), total=total, owned={})
    for batch in batches:
        reports = Reports(*(report_of(*one) for one in batch))
        opened.take(UpdateBlock(vectors=[torch.zeros(0)], reports=reports))
    assert total.weight == sum(report.num_examples for report in opened.accepted.values())
    return opened


def test_a_batch_of_several_updates_is_accepted() -> None:
    opened = taken([("a", 4), ("b", 2)], [("c", 3)])
    assert set(opened.accepted) == {"a", "b", "c"}
    assert opened.refused == {}


@pytest.mark.parametrize(
    ("batch", "code", "why"),
    [
        ([("a", 4), ("b", 5)], "CountOutOfRange", "b: 5 examples, its plan allows 4"),
        ([("a", 4), ("stranger", 1)], "UnexpectedUpdate", "stranger: no update"),
        ([("a", 4), ("a", 4)], "UnexpectedUpdate", "twice"),
    ],
)
def test_a_batch_with_a_wrong_update_is_refused_as_a_whole(
    batch: list[tuple[str, int]], code: str, why: str
) -> None:
    opened = taken(batch)
    assert opened.accepted == {}
    assert {name: error.code for name, error in opened.refused.items()} == {
        name: code for name, _ in batch
    }
    assert why in str(next(iter(opened.refused.values())))
    assert opened.refusals[code] == 1


def test_a_second_update_of_a_client_is_refused_and_the_first_one_stays() -> None:
    opened = taken([("a", 4)], [("a", 2), ("b", 2)])
    assert set(opened.accepted) == {"a"}
    assert set(opened.refused) == {"a (again)", "b"}


def test_a_series_is_added_without_the_updates_that_are_not_finite() -> None:
    plan = plan_of(round=1, run_seed=0, model_version=0, quota=4, micro_batch_size=1)
    layout = layout_of(torch.nn.Linear(1, 1))
    total = CohortSum(layout)
    total.open(num_clients=3, planned_weight=12)
    opened = OpenRound(plans=dict.fromkeys("abc", plan), total=total, owned={})
    vectors = [torch.ones(2), torch.tensor([1.0, torch.nan]), 2 * torch.ones(2)]
    reports = Reports(*(report_of(name, 4) for name in "abc"), are_summed=False)
    opened.take(UpdateBlock(vectors=vectors, reports=reports))
    assert list(opened.accepted) == ["a", "c"]
    assert opened.refused["b"].code == "NonFiniteUpdate"
    assert opened.weight == total.weight == 8
    assert total.close().tolist() == [3 / 8, 3 / 8]


@pytest.mark.parametrize(
    ("beyond", "expected"),
    [("clip", [1.5, 2.0]), ("keep", [3.0, 4.0]), ("refuse", None)],
)
def test_an_update_beyond_the_norm_is_scaled_to_its_limit_kept_or_refused(
    beyond: Literal["clip", "keep", "refuse"], expected: list[float] | None
) -> None:
    """Of a weight of 2 and a limit of 1.25 for each unit of it, the norm is at most 2.5."""
    layout = layout_of(torch.nn.Linear(2, 1, bias=False))
    total = CohortSum(layout)
    total.open(num_clients=2, planned_weight=4)
    rules = UpdateRules(norm_watch=NormWatch(multiple=2.5, largest_median=0.5), beyond_norm=beyond)
    plan = plan_of(round=1, run_seed=0, model_version=0, quota=2, micro_batch_size=1)
    opened = OpenRound(plans={"pi": plan}, total=total, owned={"pi": 2}, rules=rules)
    report = report_of("pi", 2)
    opened.take(Update(values_P=torch.tensor([3.0, 4.0]), report=report))
    assert opened.outliers == ["pi"]
    if expected is None:
        assert opened.refused["pi"].code == "OutlierUpdate"
        return
    assert total.close().tolist() == pytest.approx([one / 2 for one in expected], rel=1e-6)
