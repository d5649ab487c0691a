"""An answer is held against what its plan can lead to, in examples and in steps."""

from __future__ import annotations

import pytest
import torch

from headwater.common.messages import Plan, Step, Update, UpdateReport
from headwater.common.model.parameters import ModelLayout
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.rounds.open_round import OpenRound

STEP = Step(num_examples=1, weight=1, loss=0.0, gradient_norm=0.0, seconds=1.0, peak_bytes=0)


def refusal(*, quota: int, num_examples: int, num_steps: int, finish: float | None) -> str | None:
    """Return the code by which an update is refused, None if it is taken."""
    plan = Plan(
        round=1,
        run_seed=0,
        model_version=0,
        quota=quota,
        micro_batch_size=1,
        finish_seconds=finish,
    )
    total = CohortSum(ModelLayout(trainable=(), constant=(), num_bytes=0))
    total.open(num_clients=1, planned_weight=plan.most_examples)
    opened = OpenRound(
        plans={"pi": plan}, total=total, max_weight_per_example=1, owned={"pi": 2**53}
    )
    report = UpdateReport(
        name="pi",
        round=1,
        num_examples=num_examples,
        weight=num_examples,
        loss_sum=0.0,
        micro_batch_size=1,
        seconds=1.0,
        steps=(STEP,) * num_steps,
        reason="quota",
    )
    opened.take(Update(values_P=torch.zeros(0), report=report))
    error = opened.refused.get("pi")
    return None if error is None else error.code


@pytest.mark.parametrize(
    ("num_examples", "finish", "code"),
    [
        pytest.param(40, None, None, id="its quota"),
        pytest.param(41, None, "CountOutOfRange", id="one more than its quota"),
        pytest.param(50, 9.0, None, id="a quarter more, where the round is bound by time"),
        pytest.param(51, 9.0, "CountOutOfRange", id="one more than that"),
        pytest.param(1, 9.0, None, id="less than half: it may have been stopped"),
    ],
)
def test_an_update_holds_no_more_examples_than_its_plan_allows(
    num_examples: int, finish: float | None, code: str | None
) -> None:
    found = refusal(quota=40, num_examples=num_examples, num_steps=1, finish=finish)
    assert found == code


@pytest.mark.parametrize(("finish", "most"), [(None, 40), (9.0, 50)])
def test_an_update_holds_a_step_an_example_and_one_more_at_the_most(
    finish: float | None, most: int
) -> None:
    for num_steps, code in ((most + 1, None), (most + 2, "CountOutOfRange")):
        found = refusal(quota=40, num_examples=40, num_steps=num_steps, finish=finish)
        assert found == code
