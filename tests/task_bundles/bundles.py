"""Tasks that tests publish."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from headwater.common.task_bundles.signed_bundle import TaskBundle
from headwater.server.task_bundles.publish import public_key, publish, signer_key

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from sizes import WIDTH


class Parity:
    def new_model(self):
        return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))

    def train_examples(self, *, data, part, num_parts):
        random = torch.Generator().manual_seed(part)
        inputs = torch.randint(-3, 4, (60, 4), generator=random).float()
        return TensorDataset(inputs, inputs.sum(1).long() % 2)

    def loss_sum(self, model, batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
        return loss, len(labels)
"""


def write_code(folder: Path, *, width: int = 8) -> str:
    """Write a task of two files, and return its place."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parity.py").write_text(TASK)
    (folder / "sizes.py").write_text(f"WIDTH = {width}\n")
    return f"{folder / 'parity.py'}:Parity"


def new_key(path: Path) -> tuple[Ed25519PrivateKey, str]:
    """Make a signer, and return its key with what owners trust."""
    key, _ = signer_key(path)
    return key, public_key(key)


def publish_code(
    folder: Path, key: Ed25519PrivateKey, *, version: int, width: int = 8, requires: str = "numpy"
) -> tuple[TaskBundle, Path]:
    """Publish that task, and return its bundle with the file."""
    spec = write_code(folder / "code", width=width)
    out = folder / f"parity-{version}-{width}.task"
    given = {"folder": folder / "code", "requires": [requires], "version": version, "out": out}
    return publish(spec, key=key, **given)  # type: ignore[arg-type]
