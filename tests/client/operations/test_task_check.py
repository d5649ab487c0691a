"""What the check of a task prints of the device's memory and speed."""

from __future__ import annotations

import pytest

from headwater.client.device.hardware import ThisMachine
from headwater.client.operations.task_check import measurements
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.common.settings.sources import load


@pytest.mark.parametrize(("task", "has_tokens"), [("Ragged", True), ("Mlp", False)])
def test_the_bytes_per_token_are_printed_where_examples_differ_in_length(
    task: str, has_tokens: bool
) -> None:
    trainer = Trainer(f"tests/laws/architectures.py:{task}", batch_norm=None, check_task=False)
    identity = Identity(name="pi", data=None, part=0, num_parts=1)
    texts = [text for _, text in measurements(load(None, {}), trainer, identity, ThisMachine())]
    per_token = [text for text in texts if "per token: an example has usually" in text]
    assert len(per_token) == has_tokens
