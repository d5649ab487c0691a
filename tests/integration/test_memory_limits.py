"""A device in too little memory is trained, or refused by name; the kernel never kills it."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.confine import Confinement, caged, can_make_cgroups
from benchmarks.measure import ROOT
from benchmarks.memory_limits import MB, TASKS, run
from benchmarks.serving import environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_cgroups(), reason="cgroups need root and controllers"),
]


@pytest.mark.parametrize("limit", [60 * MB, 100 * MB, 140 * MB])
def test_a_limit_below_torch_s_import_is_refused_by_name(limit: int) -> None:
    """torch's import takes 160 MB: it was killed."""
    with caged(Confinement(memory_bytes=limit)) as cage:
        check = subprocess.run(
            [sys.executable, "-m", "headwater.client", "check", "--task", TASKS["cnn"]],
            cwd=ROOT,
            env=environment(),
            preexec_fn=cage.enter,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (check.returncode, cage.num_kills()) == (1, 0)
    assert "OutOfMemory: importing torch takes" in check.stderr


HUNGRY = """
import torch
from torch import nn

class OneIsHungry:
    '''One of 512 examples takes 700 MB, the others one.'''

    def new_model(self):
        return nn.Linear(1, 1)

    def train_examples(self, *, data, part, num_parts):
        sizes = torch.ones(512, 1)
        sizes[301] = 700.0
        return torch.utils.data.TensorDataset(sizes)

    def loss_sum(self, model, batch):
        hungry = torch.ones(int(batch[0].max()) * 250_000).sum() * 0.0
        return model(batch[0]).sum() + hungry, len(batch[0])
"""


def test_an_example_that_nothing_foresees_is_refused_by_name_and_kills_no_device(
    tmp_path: Path,
) -> None:
    path = tmp_path / "one_is_hungry.py"
    path.write_text(HUNGRY)
    plan = {"plan.effective_batch_size": 512}
    found = run(f"{path}:OneIsHungry", 400 * MB, num_rounds=1, plan=plan)
    assert (found.end, found.error) == ("refused", "OutOfMemory"), found.text
