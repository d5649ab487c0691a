"""docs/model.md is held to its word: its commands run, and so does its Python."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.processes import Processes, work_in

pytestmark = [pytest.mark.slow, pytest.mark.long]

DOC = Path(__file__).parents[2] / "docs" / "model.md"
# Behind it every import of Headwater fails, in a process that was forked with Headwater loaded too.
BAN = """import sys
sys.modules |= {name: None for name in sys.modules if name.partition(".")[0] == "headwater"}
"""
PLAIN = [
    "headwater-simulate",
    "--task",
    "my_task.py:MyTask",
    "--clients",
    "2",
    "--rounds",
    "1",
    "--out",
    "runs/plain",
]
DEVICE = 'task = "my_task.py:MyTask"\n\n[client]\nname = "pi"\n'
OWN_DATA = re.compile(r""" --data \S+|, data="\S+?\"""")  # the page's task brings its own
# Checks behind each block of Python, in the order of the page.
CHECKS = {
    "digits = model": "assert digits.shape == (4,) and not model.training",
    "replaced_layers": "assert isinstance(model[2], nn.GroupNorm)",
    "start.safetensors": "from safetensors.torch import load_file\n"
    "assert len(load_file('start.safetensors')) == len(model.state_dict())",
    "torch.export.save": "again = torch.export.load('model.pt2').module()\n"
    "rows = torch.rand(5, 64)\n"
    "assert torch.allclose(again(rows), model(rows), atol=1e-5)",
    "headwater.adapt(": "assert model is found.model and found.is_adapted in (True, False)",
    "def predict": "assert MyTask.predict",
    "print(record": "assert record['rounds'] == '5'",
}


def blocks() -> list[str]:
    text = OWN_DATA.sub("", DOC.read_text())
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """Return the page's indented commands, with continued lines joined."""
    text = OWN_DATA.sub("", re.sub(r"\\\n\s+", "", DOC.read_text()))
    return [line.split() for line in re.findall(r"^    (headwater-.*)$", text, re.MULTILINE)]


class Folder:
    """A folder with the page's network and task."""

    def __init__(self, path: Path, processes: Processes) -> None:
        self.path, self.processes = path, processes
        self.network, self.task, *self.blocks = blocks()
        self.write(self.network)
        (path / "my_task.py").write_text(self.task)
        (path / "headwater-device").mkdir()
        (path / "headwater-device" / "client.toml").write_text(DEVICE)

    def write(self, network: str) -> None:
        (self.path / "network.py").write_text(network)

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        side = command[0].partition("-")[2]
        module = {"simulate": "simulation"}.get(side, side)
        there = partial(os.chdir, self.path)
        return self.processes.complete(module, *command[1:], prepare=there)

    def execute(self, block: str, check: str) -> None:
        """Run a block; one that does not import Headwater must do without it."""
        ban = "" if "import headwater" in block else BAN
        (self.path / "block.py").write_text(f"{ban}import torch\n{block}\n{check}\n")
        self.processes.complete("block", prepare=partial(work_in, self.path))


@pytest.mark.timeout(600)
def test_the_commands_and_the_python_of_the_page_run(tmp_path: Path) -> None:
    with Processes(tmp_path / "logs") as processes:
        check_page(Folder(tmp_path, processes))


def check_page(folder: Folder) -> None:
    """Run all that the page shows."""
    without_batch_norm = folder.network.replace("        nn.BatchNorm2d(8),\n", "")
    plain_block = next(each for each in folder.blocks if "runs/plain" in each)
    folder.write(without_batch_norm)
    folder.run(PLAIN)
    folder.execute(plain_block, "assert not model.training")
    folder.write(folder.network)
    left = [each for each in folder.blocks if each is not plain_block]

    done = {}
    for command in commands():
        if "adapt" in command:  # the operator has given the owner of a device the run's model
            shutil.copy(folder.path / "runs" / "first" / "model.safetensors", folder.path)
        done[" ".join(command)] = folder.run(command)
    [as_json] = [each.stdout for line, each in done.items() if line.endswith("--json")]
    assert json.loads(as_json)["results"][0]["num_examples"] == 359
    [stopped] = [each.stderr for line, each in done.items() if "--stop-when" in line]
    assert "test_loss has not improved in 10 evaluations" in stopped
    for found, check in CHECKS.items():
        [block] = [each for each in left if found in each]
        left.remove(block)
        folder.execute(block, check)
    [onnx] = left  # needs packages that only its reader installs
    assert "torch.onnx.export" in onnx
