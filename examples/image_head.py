"""A new last layer for a picture model that is trained already: its backbone is frozen.

Needs the extra ``transformers`` (``pip install 'headwater[transformers]'``), and never asks the
hub. The first command trains a small vision transformer on one half of scikit-learn's digits and
writes it into the folder ``backbone``; the second trains a layer upon it on devices that share the
other half::

    python -m headwater.examples.image_head
    headwater-simulate --task examples/image_head.py:ImageHead --clients 20 \
        --optimizer adam --learning-rate 0.01

Parameters with ``requires_grad = False`` are frozen: no device computes their gradients, and
updates do not contain them. Any folder that ``save_pretrained`` wrote will do as a backbone if its
model has no BatchNorm (ViT, DINOv2, Swin, ConvNeXt): copy this file, change ``BACKBONE``, and let
``train_examples`` return pictures of its size.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by transformers when it is imported

from transformers import AutoModel, ViTConfig, ViTModel

BACKBONE = Path("backbone")
NUM_CLASSES = 10
SPLIT_SEED = 7


class ImageHead:
    """An 8x8 image in, one of ten digits out."""

    def new_model(self) -> nn.Module:
        if not (BACKBONE / "config.json").is_file():
            raise FileNotFoundError(
                f"expected a model in the folder {BACKBONE}: write one with "
                "python -m headwater.examples.image_head"
            )
        backbone = AutoModel.from_pretrained(BACKBONE, local_files_only=True, dtype=torch.float32)
        return Classifier(backbone.requires_grad_(False))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        if data is not None:
            raise ValueError(
                "the digits come with scikit-learn: leave --data out, or name a --task"
            )
        images, labels = digits("train")
        return TensorDataset(images[part::num_parts], labels[part::num_parts])

    def test_examples(self) -> TensorDataset:
        return TensorDataset(*digits("test"))

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        images, labels = batch
        logits = model(images)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        return loss, len(labels), {"accuracy": (logits.argmax(1) == labels).sum()}


class Classifier(nn.Module):
    """A backbone, the mean of its last hidden state, and a linear layer."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden_BTD = self.backbone(pixel_values=images).last_hidden_state
        logits: Tensor = self.head(hidden_BTD.mean(1))
        return logits


@cache
def digits(share: str) -> tuple[Tensor, Tensor]:
    """Return images [N, 1, 8, 8] in -1..1 and labels: half to "pretrain", "train", "test"."""
    values, labels = load_digits(return_X_y=True)
    images = torch.tensor(values / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    half, rest = len(order) // 2, len(order) * 4 // 5
    rows = {"pretrain": order[:half], "train": order[half:rest], "test": order[rest:]}[share]
    return images[rows], torch.tensor(labels)[rows]


def write_backbone(folder: Path, num_epochs: int = 12) -> None:
    """Train a vision transformer of 39,000 parameters on its half of the digits, and write it."""
    torch.set_num_threads(1)  # a step is so small that several threads only wait for each other
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=8,
        patch_size=2,
        num_channels=1,
    )
    model = Classifier(ViTModel(config, add_pooling_layer=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    images, labels = digits("pretrain")
    for _ in range(num_epochs):
        for rows in torch.split(torch.randperm(len(labels)), 64):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    model.backbone.save_pretrained(folder)


if __name__ == "__main__":
    write_backbone(BACKBONE)
