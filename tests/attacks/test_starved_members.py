"""A server that gives all members of a session but one hardly a moment, to open that one's update.

Planned weights do not show it: each member planned as much as the victim, and added one example.
"""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from headwater.client.app import app
from headwater.client.enrolment.signing_identity import make_identity
from headwater.client.flower.node import Node
from headwater.client.secagg.plan_policy import LEAST_TIME, check_plan, check_time
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.common.errors import CountOutOfRange, MaskingTooWeak
from headwater.common.estimates.linear_fit import Line
from headwater.common.messages import MAX_STEPS, Plan
from headwater.common.secagg.plan_digest import OF_EACH, plan_digest
from headwater.common.settings.schema import SecureSettings
from tests import training_contexts as contexts
from tests.client.secagg.cohort import describe
from tests.masked import RUN, NodeDevice, plan, settings_of, train
from tests.python_tasks import SIGNS
from tests.training_contexts import trained, training_context

# Another value of each field that all members have in common.
COMMON: dict[str, Any] = {
    "round": 2,
    "run_seed": 9,
    "model_version": 5,
    "max_tokens": 7,
    "precision": "bfloat16",
    "held_out_fraction": 0.5,
    "held_out": "last",
}


def test_every_field_of_a_plan_is_common_to_all_members_or_starves_none() -> None:
    assert set(Plan.model_fields) == {*COMMON, *OF_EACH, "terms"}
    for field, value in COMMON.items():
        assert plan_digest(plan(**{field: value}), "") != plan_digest(plan(), ""), field
    for field in OF_EACH.keys() - {"weigh_as"}:
        other: Any = {"frozen": "0" * 64, "reason": "another"}.get(field, 1)
        changes: dict[str, Any] = {field: other}
        assert plan_digest(plan(**changes), "") == plan_digest(plan(), ""), field


PACE = Line(base=0.5, each=0.25)
NEEDED = 2 * 0.5 + 8 * 0.25  # of 8 examples in two micro-batches


@pytest.mark.parametrize("field", ["answer_seconds", "deadline_seconds", "finish_seconds"])
def test_a_plan_gives_a_device_time_for_its_quota(field: str) -> None:
    given: dict[str, Any] = {"answer_seconds": 100.0}
    check_time(plan(**given | {field: LEAST_TIME * NEEDED}), PACE, name="pi")
    for seconds in (LEAST_TIME * NEEDED * 0.99, 1e-6):
        with pytest.raises(MaskingTooWeak, match="the plan gives"):
            check_time(plan(**given | {field: seconds}), PACE, name="pi")


def test_small_micro_batches_take_the_time_that_they_take() -> None:
    asked: dict[str, Any] = {"answer_seconds": LEAST_TIME * NEEDED}
    with pytest.raises(MaskingTooWeak, match="micro-batches of 1"):
        check_time(plan(**asked, micro_batch_size=1), PACE, name="pi")


@pytest.fixture
def device(tmp_path: Path) -> Node:
    """Return a real device that masks, after it has told the server its speed."""
    chosen = settings_of(task=SIGNS, secure={"aggregation": "semi-honest", "min_quota": 1})
    trainer = Trainer(SIGNS, batch_norm=None, check_task=False)
    identity = Identity(name="pi", data=None, part=0, num_parts=1)
    node = Node(app, trainer, identity, chosen, tmp_path)
    node.enter(RUN)
    layout = trainer.image.layout
    wanted = json.loads(describe())
    wanted |= {"layout_digest": layout.digest, "num_parameters": layout.num_parameters}
    wanted.pop("layout", None)
    told = node.answer(
        message_id="d", message_type="query.describe", head_json=json.dumps(wanted), payload=None
    )
    assert told.error is None
    assert json.loads(told.head_json)["seconds_per_example"] > 0
    return node


def answer(node: Node, **asked: Any) -> str:
    """Return the code of the error with which a device answers a plan; "" if it carries it out."""
    sent = node.answer(
        message_id="m",
        message_type="train",
        head_json=plan(**asked).model_dump_json(),
        payload=node.trainer.image.buffer(),
    )
    return "" if sent.error is None else sent.error.code


def test_a_starving_plan_is_refused_and_an_honest_one_carried_out(device: Node) -> None:
    starving: dict[str, Any] = {"quota": 40, "micro_batch_size": 1}
    assert answer(device, **starving, answer_seconds=1e-6) == "TooLittleTime"
    assert answer(device, **starving, answer_seconds=9.0, deadline_seconds=1e-6) == "TooLittleTime"
    assert answer(device, **starving, answer_seconds=9.0, finish_seconds=1e-6) == "TooLittleTime"
    assert answer(device, quota=8, micro_batch_size=4, answer_seconds=0.5) == ""


def test_the_speed_by_which_plans_are_checked_outlives_the_process(
    device: Node, tmp_path: Path
) -> None:
    assert json.loads((tmp_path / f"pi-{RUN}.json").read_text())["pace"]["each"] > 0


def test_a_device_with_active_masks_takes_no_plan_of_a_server_that_never_asked_its_speed() -> None:
    with pytest.raises(MaskingTooWeak, match="has not asked how fast this device is"):
        check_time(plan(answer_seconds=1e-6), None, name="pi", needs_pace=True)
    check_time(plan(answer_seconds=1e-6), None, name="pi")


class Together:
    """Each example's loss is finite, and the sum of two is not."""

    def new_model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return TensorDataset(torch.full((8, 1), 1.0))

    def loss_sum(self, model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        return (3e38 + 0 * model(batch[0])).sum(), len(batch[0])


@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_model_at_which_losses_overflow_together_starves_no_member_of_large_micro_batches(
    size: int,
) -> None:
    context = training_context(
        Together(), Together().train_examples(data=None, part=0, num_parts=1)
    )
    asked = contexts.plan(8, size, is_masked=True, answer_seconds=9.0)
    assert trained(context, asked).report.weight == 8


class Squares(Together):
    """Each example's metric is finite, and the sum of two is not."""

    def loss_sum(  # type: ignore[override]
        self, model: nn.Module, batch: list[Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        number = len(batch[0])
        return model(batch[0]).sum(), number, {"squares": torch.full((number,), 3e38).sum()}


@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_model_at_which_a_metric_overflows_costs_no_gradient(size: int) -> None:
    data = Squares().train_examples(data=None, part=0, num_parts=1)
    context = training_context(Squares(), data)
    asked = contexts.plan(8, size, is_masked=True, answer_seconds=9.0)
    update = trained(context, asked)
    assert update.report.weight == 8
    assert update.values_P.tolist() == [8.0]


def test_a_window_that_would_end_before_its_quota_is_refused() -> None:
    """It has at most so many micro-batches, and would end there without a word."""
    small: dict[str, Any] = {"quota": MAX_STEPS + 1, "micro_batch_size": 1, "answer_seconds": 1e6}
    with pytest.raises(CountOutOfRange, match="a window has at most 4,096"):
        check_plan(plan(**small), SecureSettings(), name="pi", told_examples=None)


def test_a_fault_right_behind_a_plan_ends_no_training_of_a_device_that_masks(device: Node) -> None:
    assert device.trainer.progress.plan is None
    device.abort()
    assert not device.trainer.stop_requested.is_set()


def test_a_plan_that_counts_on_more_of_a_device_s_time_than_it_told_is_refused(
    tmp_path: Path,
) -> None:
    """It would end when its owner's share is used up: a tenth of the quota."""
    hour = dt.datetime.now().astimezone().hour
    away = f"{(hour + 11) % 24:02}:00-{(hour + 13) % 24:02}:00"  # not within the next hours
    key, allow_list = tmp_path / "d0", tmp_path / "allow-list"
    allow_list.write_text(make_identity(key, "d0")[0].line)
    pi = NodeDevice(
        0,
        tmp_path,
        secure={"aggregation": "active", "identity": key, "allow_list": allow_list},
        client={"active_hours": away, "inactive_share": 0.1},
    )
    pi.send("query.describe", describe())
    assert pi.kept()["share"] == {"told": 0.1}
    with pytest.raises(MaskingTooWeak, match=r"counts on 1 of this device's time, and it told"):
        train(pi, plan(answer_seconds=0.1, share=1.0))
    train(pi, plan(answer_seconds=0.1, share=0.1))
