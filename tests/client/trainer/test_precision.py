"""A device computes in float32, or in bfloat16 where a plan or its own measurement says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from headwater.client.device.hardware import ThisMachine
from headwater.client.trainer.precision import (
    DevicePrecision,
    PrecisionComparison,
    has_bfloat16_instructions,
)
from headwater.client.trainer.probe import ExampleProbe
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity, TrainingContext
from headwater.common.messages import DescribeRequest, Plan
from headwater.common.secagg.terms import MaskingTerms
from headwater.common.settings.training import Precision
from tests.tasks import RAISES_BACKWARD, TwoLayers, examples
from tests.training_contexts import FakeMemory, training_context

PI = Identity(name="pi", data=None, part=0, num_parts=1)
PLAN = Plan(round=1, run_seed=0, model_version=0, quota=4, micro_batch_size=2, precision="auto")
MASKED = PLAN.asking(MaskingTerms())


def precision(context: TrainingContext) -> DevicePrecision:
    return DevicePrecision(lambda identity: context)


def found(ratio: float) -> PrecisionComparison:
    return PrecisionComparison(
        num_examples=1, seconds_ratio=ratio, float32_bytes=10**6, bfloat16_bytes=10**6
    )


@pytest.mark.parametrize(
    ("ratio", "fastest"), [(0.2, "bfloat16"), (0.9, "bfloat16"), (0.95, "float32"), (9, "float32")]
)
def test_autocast_is_the_faster_one_only_if_it_saves_a_tenth(ratio: float, fastest: str) -> None:
    assert found(ratio).fastest == fastest
    assert f"takes {ratio:.2f} of float32's time, and 1.0 MB" in str(found(ratio))


def test_float32_is_taken_without_a_comparison() -> None:
    device = precision(training_context(TwoLayers(), examples(8)))
    assert device.choose("float32", PI) == "float32"
    assert not device.is_compared


def test_auto_takes_the_faster_one_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    context = training_context(TwoLayers(), examples(8))
    device = precision(context)
    chosen = device.choose("auto", PI)
    assert device.comparison is not None
    assert chosen == device.comparison.fastest
    assert f"pi: computes in {chosen}: {device.comparison}" in caplog.text
    assert device.choose("bfloat16", PI) == "bfloat16"  # as asked for, whichever is faster
    assert not context.accumulator.values_P.any()


def test_precisions_are_compared_on_examples_that_can_be_trained_on() -> None:
    data = examples(8, kinds=[RAISES_BACKWARD] * 4 + [0] * 4)
    compared = precision(training_context(TwoLayers(), data)).compare(PI)
    assert compared is not None
    assert 1 <= compared.num_examples <= 4


def test_without_room_for_bfloat16_copies_auto_takes_float32() -> None:
    memory = FakeMemory(lambda num_begun: 1)
    context = training_context(TwoLayers(), examples(8), memory=memory)
    device = precision(context)
    assert device.choose("auto", PI) == "float32"
    assert device.comparison is None


@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "auto"])
def test_a_device_reports_what_it_computes_in(wanted: Precision) -> None:
    spec = f"{Path(__file__)}:Probed"
    home = Trainer(spec, batch_norm=None, check_task=False)
    request = DescribeRequest(
        run_seed=0,
        wants_speed=False,
        precision=wanted,
        layout_digest=home.image.layout.digest,
        num_parameters=home.image.layout.num_parameters,
    )
    report = home.describe(PI, ThisMachine(), request)
    assert report.precision == home.precision.chosen
    assert report.precision == wanted or wanted == "auto"


class Probed(TwoLayers):
    """With examples."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Any:
        return examples(8)


def test_a_plan_under_auto_gets_what_the_device_chose_but_a_masked_one_starts_no_comparison() -> (
    None
):
    device = precision(training_context(TwoLayers(), examples(8)))
    assert device.resolved(MASKED, PI).precision == "float32"
    assert not device.is_compared
    assert device.resolved(PLAN, PI).precision == device.chosen
    masked = device.resolved(MASKED, PI)
    assert masked.precision == device.chosen


class Deep(TwoLayers):
    """Two layers whose inner activation autocast keeps in bfloat16."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4096), nn.Tanh(), nn.Linear(4096, 1))

    def loss_sum(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).float().square().sum(), len(batch[0])


def test_the_probe_measures_in_the_precision_of_the_device() -> None:
    def kept(**chosen: Any) -> float:
        context = training_context(Deep(), examples(8), **chosen)
        return ExampleProbe(context).activation_bytes()

    assert kept(precision="bfloat16") < 0.75 * kept()


@pytest.mark.parametrize(
    ("text", "has_them"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("flags\t\t: fpu avx2 avx512f\n", False),
    ],
)
def test_a_cpu_says_whether_it_has_bfloat16_instructions(
    text: str, has_them: bool, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert has_bfloat16_instructions(cpuinfo) is has_them
    assert has_bfloat16_instructions(tmp_path / "none")
