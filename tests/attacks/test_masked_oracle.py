"""A server that reads a device's labels, bit by bit, from how it answers masked plans.

The model's biases make the loss of one class overflow. If the answer to a plan of one example shows
whether its sum was finite, a plan for each class reads the label.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headwater.client.app import app
from headwater.client.flower.node import Node
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.common.errors import MaskingTooWeak
from tests.masked import RUN, AppDevice, plan, settings_of, train

NUM_CLASSES, NUM_EXAMPLES = 3, 11
TASK = f"""
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Labels:
    def new_model(self):
        return nn.Linear(2, {NUM_CLASSES})

    def train_examples(self, *, data, part, num_parts):
        random = torch.Generator().manual_seed(5)
        labels = torch.randint(0, {NUM_CLASSES}, ({NUM_EXAMPLES},), generator=random)
        return TensorDataset(torch.zeros({NUM_EXAMPLES}, 2), labels)

    def loss_sum(self, model, batch):
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)
"""


@pytest.fixture
def device(tmp_path: Path) -> Node:
    """Return a device whose owner requires masks, and lets a plan ask for one example."""
    (tmp_path / "labels.py").write_text(TASK)
    spec = f"{tmp_path}/labels.py:Labels"
    trainer = Trainer(spec, batch_norm=None, check_task=False)
    secure = {"aggregation": "semi-honest", "min_quota": 1}
    chosen = settings_of(task=spec, secure=secure)
    identity = Identity(name="pi", data=None, part=0, num_parts=1)
    node = Node(app, trainer, identity, chosen, tmp_path)
    node.enter(RUN)
    return node


def overflowing(node: Node, label: int) -> None:
    """Load a model whose loss is infinite for this label and 0 for the others."""
    weights = node.trainer.image.values_P.zero_().numpy()
    weights[2 * NUM_CLASSES :] = np.float32(3e38)
    weights[2 * NUM_CLASSES + label] = np.float32(-3e38)


def answer_to(node: Node, round_number: int) -> str:
    """Return what the server sees of the answer to a plan of one example, but for the vitals."""
    asked = plan(round_number, quota=1, micro_batch_size=1, answer_seconds=0.004)
    sent = node.answer(
        message_id="m",
        message_type="train",
        head_json=asked.model_dump_json(),
        payload=node.trainer.image.buffer(),
    )
    head = json.loads(sent.head_json or "{}")
    seen = {name: value for name, value in head.items() if name not in ("round", "vitals")}
    code = None if sent.error is None else sent.error.code
    return json.dumps([code, len(sent.head_json), len(sent.vector), seen])


def test_an_overflowing_loss_and_a_finite_one_get_the_same_answer(device: Node) -> None:
    answers = set()
    for number in range(NUM_CLASSES * NUM_EXAMPLES):
        overflowing(device, number % NUM_CLASSES)
        answers.add(answer_to(device, number + 1))
    assert len(answers) == 1, answers
    assert json.loads(answers.pop())[0] is None


def test_no_example_is_trained_on_with_two_models(device: Node, tmp_path: Path) -> None:
    """A plan with another model gets the next examples, though the server counts no round."""
    places = []
    for number in range(1, 5):
        overflowing(device, number % NUM_CLASSES)
        answer_to(device, number)
        kept = json.loads((tmp_path / f"pi-{RUN}.json").read_text())
        places.append(kept["walk"]["place"]["offset"])
    assert places == [0, 1, 2, 3]


def test_a_device_trains_a_set_number_of_times_on_the_same_examples(
    device: Node, tmp_path: Path
) -> None:
    places = []
    overflowing(device, 0)
    for number in range(1, 19):
        answer_to(device, number)
        kept = json.loads((tmp_path / f"pi-{RUN}.json").read_text())
        places.append(kept["walk"]["place"]["offset"])
    assert places == [0] * 16 + [1] * 2


@pytest.mark.parametrize("quota", [1, 7])
def test_a_plan_of_fewer_examples_than_the_device_s_least_is_refused(quota: int) -> None:
    device = AppDevice(0, secure={"aggregation": "semi-honest"})
    with pytest.raises(MaskingTooWeak, match="at least 8"):
        train(device, plan(quota=quota, micro_batch_size=1))
