"""Pictures: a folder on each device with one subfolder per class, read one by one as needed.

``--data photos`` expects photos/0/a.png, photos/1/b.jpg and so on, the subfolders named as in
``CLASSES``. A device may lack a class; it may not have one that the others do not know. The network
has GroupNorm, since BatchNorm would mix the examples of a batch. Try it::

    headwater-simulate --task examples/image_folder.py:ImageFolder --clients 20 --optimizer adam \
        --learning-rate 0.003

Without --data the devices share scikit-learn's handwritten digits. With it each opens a folder of
its own. Run as a module, this file writes some of the digits into three such folders::

    python -m headwater.examples.image_folder photos
    headwater-simulate --task examples/image_folder.py:ImageFolder --data 'photos/*'
    headwater-client check --task examples/image_folder.py:ImageFolder --data photos/device1

For pictures of your own copy this file and change ``CLASSES`` and ``SIDE``.
"""

import logging
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

CLASSES = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
SIDE = 16  # pixels; every picture is scaled to SIDE x SIDE
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
TEST_FRACTION = 0.2
SPLIT_SEED = 7

log = logging.getLogger(__name__)

Example = tuple[Tensor, int]


class ImageFolder:
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

    def train_examples(
        self, *, data: Path | None, part: int, num_parts: int
    ) -> "PictureFiles | DigitPictures":
        if data is not None:
            return PictureFiles(data)
        shuffle, num_test = _shuffled_digits()
        return DigitPictures(shuffle[num_test + part :: num_parts])

    def test_examples(self) -> "DigitPictures":
        shuffle, num_test = _shuffled_digits()
        return DigitPictures(shuffle[:num_test])

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        pictures, labels = batch
        logits = model(pictures)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        return loss, len(labels), {"accuracy": (logits.argmax(1) == labels).sum()}


class PictureFiles(Dataset[Example]):
    """The pictures below a folder; a file is opened when it is asked for, and not before.

    A file that cannot be decoded raises then: that one example is left out and counted.
    """

    def __init__(self, folder: Path) -> None:
        """List the files.

        Raises:
            FileNotFoundError: the folder is not there.
            ValueError: it has a subfolder that is not in ``CLASSES``.
        """
        if not folder.is_dir():
            raise FileNotFoundError(
                f"expected a folder of class folders, there is none at {folder}"
            )
        self._files: list[tuple[Path, int]] = []
        num_others = 0
        for below in sorted(path for path in folder.iterdir() if path.is_dir()):
            if below.name.startswith("."):
                continue
            if below.name not in CLASSES:
                raise ValueError(f"{below}: the classes are {', '.join(CLASSES)}")
            paths = sorted(path for path in below.rglob("*") if path.is_file())
            pictures = [path for path in paths if path.suffix.lower() in SUFFIXES]
            num_others += len(paths) - len(pictures)
            self._files += [(path, CLASSES.index(below.name)) for path in pictures]
        self.example_names = [str(path.relative_to(folder)) for path, _ in self._files]
        """By these a device knows its examples again when the folder has changed."""
        if num_others:
            log.warning("%s: %d files are no pictures and were left out", folder, num_others)

    @property
    def targets(self) -> list[int]:
        """The class of each picture, for a partition by label: no file is opened for it."""
        return [label for _, label in self._files]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, position: int) -> Example:
        path, label = self._files[position]
        with Image.open(path) as picture:
            return _pixels(picture), label


class DigitPictures(Dataset[Example]):
    """Some of scikit-learn's digits, as pictures."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = rows

    @property
    def targets(self) -> np.ndarray:
        return _digits()[1][self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> Example:
        images, labels = _digits()
        row = self._rows[position]
        return _pixels(Image.fromarray(images[row])), int(labels[row])


def _block(channels_in: int, channels_out: int, *, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
    return [convolution, nn.GroupNorm(8, channels_out), nn.ReLU()]


def _pixels(picture: Image.Image) -> Tensor:
    """Return [3, SIDE, SIDE] in -1..1, turned upright by what the camera noted."""
    upright = ImageOps.exif_transpose(picture).convert("RGB").resize((SIDE, SIDE))
    return torch.from_numpy(np.array(upright, dtype=np.float32)).permute(2, 0, 1) / 127.5 - 1


@cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return np.rint(images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8), labels


def _shuffled_digits() -> tuple[list[int], int]:
    """Return the digits' positions, shuffled once for all, and how many of them are for tests."""
    num_digits = len(_digits()[1])
    shuffle = np.random.default_rng(SPLIT_SEED).permutation(num_digits)
    return shuffle.tolist(), int(num_digits * TEST_FRACTION)


def write_folders(folder: Path, num_folders: int = 3, num_pictures: int = 300) -> None:
    """Write digits that are not for tests as PNG files: a folder a device, in it one a class."""
    images, labels = _digits()
    shuffle, num_test = _shuffled_digits()
    for number, row in enumerate(shuffle[num_test : num_test + num_pictures]):
        below = folder / f"device{number % num_folders + 1}" / CLASSES[labels[row]]
        below.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[row]).save(below / f"{row}.png")


if __name__ == "__main__":
    write_folders(Path(sys.argv[1]))
