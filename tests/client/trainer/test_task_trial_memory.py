"""The check of a large model takes the memory of training, and no second vector."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import python

TASK = """
import torch
from torch import nn

class Wide:
    '''Sixteen layers of 4 MiB: a vector of 64 MiB, and activations of some kilobytes.'''

    def new_model(self):
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))

    def train_examples(self, *, data, part, num_parts):
        return list(torch.rand(40, 1024))

    def loss_sum(self, model, batch):
        return model(batch).square().sum(), len(batch)
"""

MEASURE = """
import json, sys
import torch
from headwater.client.memory.peak_model import PeakMeter, resident_bytes
from headwater.client.trainer.trainer import Trainer

torch.set_num_threads(1)
trainer = Trainer(sys.argv[1], batch_norm=None, check_task=False)
examples = trainer.task.train_examples(data=None, part=0, num_parts=1)
trainer.image.model(examples[0]).sum().item()  # loads the libraries of a product
before, meter = resident_bytes(), PeakMeter()
trainer.check(examples, "pi")
vector = trainer.accumulator.values_P.nbytes
print(json.dumps((meter.peak_bytes() - before) / vector))
"""


@pytest.mark.slow
def test_the_check_peaks_at_less_than_one_vector_above_model_and_accumulator(
    tmp_path: Path,
) -> None:
    path = tmp_path / "wide.py"
    path.write_text(TASK)
    assert json.loads(python("-c", MEASURE, f"{path}:Wide").stdout) < 1.0


BUILD = """
import json
import torch
from torch import nn
from headwater.client.memory.peak_model import PeakMeter, resident_bytes
from headwater.common.model.parameters import ModelImage

model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(48)))
before, meter = resident_bytes(), PeakMeter()
image = ModelImage(model)
print(json.dumps((meter.peak_bytes() - before) / image.bytes_U8.nbytes))
"""


@pytest.mark.slow
def test_a_model_moves_into_its_image_without_being_there_twice() -> None:
    assert json.loads(python("-c", BUILD).stdout) < 0.5
