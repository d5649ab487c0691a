"""One by one: foreseen devices send what their own code sends; one that cannot drops out alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from headwater.common.errors import MissingData
from headwater.common.messages import Plan
from headwater.common.model.parameters import build_model
from headwater.common.settings.sources import load
from headwater.server.fleet import UpdateBlock
from headwater.simulation.compute.one_by_one import OneByOne
from headwater.simulation.fleet.devices import ClientPlan, Devices
from headwater.simulation.fleet.fleet_spec import with_fleet
from tests.simulation.compute.series import Single, assert_same, singles
from tests.tasks import NAN_GRADIENT, NAN_LOSS, TwoLayers, examples

NUM_DEVICES = 11
NO_DATA = 2


class OneWithoutData(TwoLayers):
    """A task of whose devices one cannot open its examples."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        if part == NO_DATA:
            raise MissingData("the card was taken out")
        return super().train_examples(data=data, part=part, num_parts=num_parts)


class Alone(Devices):
    """Devices each of which runs its own code, from the plan to the report."""

    changes_windows = True


def devices_of(kind: type[Devices], task: type = TwoLayers) -> Devices:
    spec = f"{task.__module__.replace('.', '/')}.py:{task.__name__}"
    return kind(with_fleet(load(None, {"task": spec, "simulation.clients": NUM_DEVICES})))


def replies(devices: Devices, *, num_rounds: int = 1, **chosen: Any) -> list[Single]:
    """Let all devices train for some rounds, which count."""
    one_by_one, found = OneByOne(devices), list[Single]()
    image = build_model(devices.trainer.task, seed=0)
    for number in range(1, num_rounds + 1):
        plan = Plan(
            **{"round": number, "run_seed": 0, "model_version": 0, "quota": 4} | chosen,
            micro_batch_size=2,
            counted_round=number - 1 or None,
        )
        clients = [ClientPlan(str(part), part, {str(part): plan}) for part in range(NUM_DEVICES)]
        found += singles(one_by_one.train(clients, image, run_id=1, timeout_seconds=None))
    return found


def test_a_device_without_data_drops_out_and_the_others_send_the_same_updates() -> None:
    expected, found = replies(devices_of(Devices)), replies(devices_of(Devices, OneWithoutData))
    assert isinstance(found.pop(NO_DATA).error, MissingData)
    del expected[NO_DATA]
    assert_same(found, expected)


class RandomLayers:
    """Layers that draw numbers, rows of 20 bytes, a metric, and weights that may be 0."""

    max_weight_per_example = 3

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Dataset[Any]:
        random = torch.Generator().manual_seed(part)
        number = 3 + part % 4
        return TensorDataset(
            torch.randn(number, 5, generator=random),
            torch.randint(3, (number,), generator=random),
        )

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, float]]:
        inputs, labels = batch
        logits = model(inputs)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        right = int((logits.argmax(1) == labels).sum())
        return loss, int(labels.sum()), {"right": right}


class Lists(RandomLayers):
    """The same examples, not as rows of tensors."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Dataset[Any]:
        rows = super().train_examples(data=data, part=part, num_parts=num_parts)
        return [rows[at] for at in range(len(rows))]  # type: ignore[arg-type, return-value]


class _Drawn(list[tuple[Tensor, Tensor]]):
    def __getitem__(self, at: Any) -> Any:
        inputs, label = super().__getitem__(at)
        return inputs + torch.randn(5), label


class DrawnExamples(Lists):
    """Examples draw numbers as they are read, and no layer does."""

    def new_model(self) -> nn.Module:
        return nn.Linear(5, 3)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Dataset[Any]:
        rows: Any = super().train_examples(data=data, part=part, num_parts=num_parts)
        return _Drawn(rows)  # type: ignore[return-value]


class OtherMetrics(RandomLayers):
    """Some micro-batches have a metric that others do not have."""

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, float]]:
        loss, weight, metrics = super().loss_sum(model, batch)
        number = int((batch[1] == 2).sum())
        return loss, weight, metrics | ({"twos": float(number)} if number else {})


class CountedCalls(RandomLayers):
    """A buffer counts the passes, which is refused."""

    def new_model(self) -> nn.Module:
        model = super().new_model()
        model.register_buffer("calls", torch.zeros(1))
        return model

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, float]]:
        dict(model.named_buffers())["calls"].add_(1)
        return super().loss_sum(model, batch)


class OneBad(TwoLayers):
    """Some devices have an example with a NaN, one has no other."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        kinds = [NAN_LOSS] * 4 if part == 7 else [NAN_GRADIENT] if part % 3 == 1 else []
        return examples(4, seed=part, kinds=kinds)


@pytest.mark.parametrize(
    "task", [TwoLayers, RandomLayers, Lists, DrawnExamples, OtherMetrics, CountedCalls, OneBad]
)
@pytest.mark.parametrize("chosen", [{}, {"weigh_as": 7}, {"precision": "bfloat16"}])
def test_foreseen_devices_send_the_bits_and_reports_of_their_own_code(
    task: type, chosen: dict[str, Any]
) -> None:
    foreseen, alone = devices_of(Devices, task), devices_of(Alone, task)
    expected = replies(alone, num_rounds=2, **chosen)
    assert_same(replies(foreseen, num_rounds=2, **chosen), expected)
    for part in range(NUM_DEVICES):
        assert foreseen.positions[part] == alone.positions[part]


class SomeBad(TwoLayers):
    """The first two examples of every device have a NaN."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return examples(4, kinds=[NAN_LOSS, NAN_LOSS])


def test_one_line_says_why_examples_are_left_out_of_all_devices_and_rounds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    devices = devices_of(Devices, SomeBad)
    one_by_one, image = OneByOne(devices), devices.trainer.image
    for number in (1, 2):
        plan = Plan(round=number, run_seed=0, model_version=0, quota=4, micro_batch_size=2)
        clients = [ClientPlan(str(part), part, {str(part): plan}) for part in range(NUM_DEVICES)]
        for _ in one_by_one.train(clients, image, run_id=1, timeout_seconds=None):
            pass
    lines = [line for line in caplog.messages if "were left out" in line]
    assert len(lines) == 1
    assert lines[0].startswith("0, round 1: 2 of 4 examples")


def test_devices_whose_work_is_foreseen_send_one_series_of_updates() -> None:
    devices = devices_of(Devices, RandomLayers)
    plan = Plan(round=1, run_seed=0, model_version=0, quota=4, micro_batch_size=2)
    clients = [ClientPlan(str(part), part, {str(part): plan}) for part in range(NUM_DEVICES)]
    image = devices.trainer.image
    [series] = OneByOne(devices).train(clients, image, run_id=1, timeout_seconds=None)
    assert isinstance(series, UpdateBlock)
    assert [report.name for report in series.reports] == [client.name for client in clients]
