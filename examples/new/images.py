"""Pictures: a folder on each device with a subfolder for each class, read one by one as needed.

A device may lack a class; it may not have one that the others do not know. The network has
GroupNorm, since BatchNorm would mix the examples of a batch.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

# begin: columns
CLASSES = ("circle", "square", "triangle")
SIDE = 24
# end: columns
# Each picture is scaled to SIDE x SIDE pixels.

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
TEST_FOLDER = Path(__file__).with_name("test")


class Pictures(Dataset[tuple[Tensor, int]]):
    """The pictures below a folder; one that cannot be decoded is left out and counted."""

    def __init__(self, folder: Path) -> None:
        """List the files.

        Raises:
            FileNotFoundError: the folder is not there.
            ValueError: it has a subfolder that is no class.
        """
        if not folder.is_dir():
            raise FileNotFoundError(f"expected a folder of class folders, none is at {folder}")
        self._files: list[tuple[Path, int]] = []
        for below in sorted(path for path in folder.iterdir() if path.is_dir()):
            if below.name not in CLASSES:
                raise ValueError(f"{below}: the classes are {', '.join(CLASSES)}")
            found = sorted(path for path in below.rglob("*") if path.suffix.lower() in SUFFIXES)
            self._files += [(path, CLASSES.index(below.name)) for path in found]
        self.example_names = [str(path.relative_to(folder)) for path, _ in self._files]
        """By these a device knows its examples again when the folder has changed."""

    @property
    def targets(self) -> list[int]:
        """The class of each picture, for a partition by label: no file is opened for it."""
        return [label for _, label in self._files]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        path, label = self._files[at]
        with Image.open(path) as picture:
            upright = ImageOps.exif_transpose(picture).convert("RGB").resize((SIDE, SIDE))
        pixels = torch.from_numpy(np.array(upright, dtype=np.float32))
        return pixels.permute(2, 0, 1) / 127.5 - 1, label


class Images:
    """A picture in, one of ``CLASSES`` out."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(
            *_block(3, 16, stride=1),
            *_block(16, 32, stride=2),
            *_block(32, 64, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, len(CLASSES)),
        )

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Pictures:
        if data is None:
            raise ValueError("name each device's folder of pictures: --data 'devices/*'")
        return Pictures(data)

    def test_examples(self) -> Pictures:
        return Pictures(TEST_FOLDER)

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        pictures, labels = batch
        logits = model(pictures)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        return loss, len(labels), {"accuracy": (logits.argmax(1) == labels).sum()}

    def predict(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, object]:
        """Return what `headwater client predict` writes of each picture."""
        probability, number = model(batch[0]).softmax(1).max(1)
        return {"prediction": [CLASSES[at] for at in number], "probability": probability}


def _block(channels_in: int, channels_out: int, *, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.GroupNorm(8, channels_out), nn.ReLU()]
