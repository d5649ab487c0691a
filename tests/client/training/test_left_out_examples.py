"""Examples that cannot be trained on are left out and counted; a line says why when it is worse."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import Dataset

from headwater.client.device.hardware import ThisMachine
from headwater.client.features import train_round
from headwater.client.trainer.left_out_examples import LeftOutLog
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.training.sampler import SamplerPosition, SamplerState, window
from headwater.common.messages import Plan
from headwater.common.settings.sources import load
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine
from tests.tasks import NAN_GRADIENT, NAN_LOSS, RAISES_FORWARD, TwoLayers, examples
from tests.training_contexts import plan, sum_gradients, training_context, whole

GAPS = "tests/stranger_tasks/csv_with_gaps.py"


def trained(spec: str, *, num_rounds: int = 1) -> None:
    trainer = Trainer(spec, batch_norm=None, check_task=False)
    device = Identity(name="pi", data=None, part=0, num_parts=1)
    chosen = Plan(round=3, run_seed=0, model_version=0, quota=40, micro_batch_size=4)
    for _ in range(num_rounds):
        trainer.train(device, ThisMachine(), chosen, SamplerState())


def test_a_device_says_how_many_rows_it_left_out_and_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained(f"{GAPS}:Gaps")
    (line,) = [record.message for record in caplog.records]
    assert line == (
        "pi, round 3: 5 of 40 examples cannot be trained on and were left out: 4: its input has a "
        "NaN (position 0, 10, 20, 30); 1: its target has a NaN (position 5)"
    )


def test_the_first_round_alone_says_what_later_ones_repeat(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained(f"{GAPS}:Words", num_rounds=3)
    line, detail = [record.message for record in caplog.records]
    assert "1: it raised ValueError (position 7)" in line
    assert "\n" not in line
    assert "csv_with_gaps.py" in detail
    assert 'cells = [float(cell) if cell else float("nan")' in detail
    assert "client/training" not in detail


def test_a_round_that_is_worse_or_has_a_new_kind_of_fault_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    left_out = LeftOutLog()
    for kinds in ([NAN_LOSS], [NAN_LOSS], [NAN_GRADIENT], [NAN_LOSS] * 2, [NAN_LOSS]):
        data = examples(24, kinds=kinds)
        context = training_context(TwoLayers(), data)
        left_out.note(
            plan(24, 4), sum_gradients(plan(24, 4), whole(data, 24), context).total, context
        )
    starts = [message.partition(" cannot")[0].rpartition(": ")[2] for message in caplog.messages]
    assert starts == ["1 of 24 examples", "1 of 24 examples", "2 of 24 examples"]


def test_with_local_steps_there_is_still_one_line_a_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = examples(24, kinds=[NAN_LOSS, NAN_GRADIENT, RAISES_FORWARD] * 4)
    context = training_context(TwoLayers(), data)
    chosen = plan(24, 2, local_steps=6, local_learning_rate=1e-4)
    local_sum = sum_gradients(chosen, whole(data, 24), context)
    assert not caplog.records
    LeftOutLog().note(chosen, local_sum.total, context)
    line, *_ = [record.message for record in caplog.records]
    assert "12 of 24 examples cannot be trained on" in line
    assert (
        "4: its gradient is NaN or infinite, though its loss is finite (nansum, or a mask" in line
    )


@pytest.mark.parametrize("kind", [NAN_LOSS, NAN_GRADIENT, RAISES_FORWARD])
def test_an_example_that_is_twice_in_a_micro_batch_is_counted_twice(kind: int) -> None:
    data = examples(10, kinds=[kind])
    part = window(SamplerPosition(), quota=40, run_seed=0, name="pi", num_examples=10)
    report = train_round(plan(40, 20), part, training_context(TwoLayers(), data)).report
    assert (report.num_examples, report.num_refused) == (36, 4)
    num_used = report.num_examples + report.num_refused
    assert part.after(num_used) == SamplerPosition(epoch=4)


class NowAndThen(Dataset[tuple[torch.Tensor, ...]]):
    """Every seventh answer has a NaN, whatever is asked for."""

    def __init__(self) -> None:
        self.data, self.num_answers = examples(12), 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, position: int) -> tuple[torch.Tensor, ...]:
        inputs, target, kind = self.data[position]
        self.num_answers += 1
        return (inputs * torch.nan if self.num_answers == 7 else inputs), target, kind


def test_a_micro_batch_with_a_nan_now_and_then_is_fetched_again_and_none_is_left_out() -> None:
    data = NowAndThen()
    context = training_context(TwoLayers(), data)  # type: ignore[arg-type]
    total = sum_gradients(plan(12, 4), whole(data.data, 12), context).total
    assert total.num_examples == 12
    assert not total.refused


@pytest.mark.parametrize("masks", [{}, {"secure.aggregation": "semi-honest"}])
def test_each_row_and_the_log_s_first_round_have_the_number_left_out(
    masks: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[RoundRow] = []
    overrides = {
        "task": f"{GAPS}:Gaps",
        "rounds": 2,
        "threads": 1,
        "simulation.clients": 3,
        "plan.accumulation_steps": 10,
        "plan.micro_batch_size": 4,
        "optimizer.learning_rate": 1e-4,
        "check_task": False,
        **masks,
    }
    with caplog.at_level(logging.WARNING, "headwater.server"):
        run_engine(load(None, overrides), on_round=rows.append, resume=False)
    left_out = [row.num_examples_left_out for row in rows]
    assert left_out == [15, 15]
    lines = [one.message for one in caplog.records if one.name.startswith("headwater.server")]
    lines = [line for line in lines if "left out" in line]
    text = "of 120 examples cannot be used and were left out"
    worse = [n for n, number in enumerate(left_out) if number > max(left_out[:n], default=0)]
    expected = [f"round {n + 1}: {left_out[n]} {text}" for n in worse]
    assert [line[: len(e)] for line, e in zip(lines, expected, strict=True)] == expected
