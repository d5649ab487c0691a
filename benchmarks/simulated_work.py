"""The work of ``benchmarks.simulation``: three tasks, from one that is all dispatch to one of sums.

Each is the same for everybody who does it: the model, each client's examples, and how many go into
a micro-batch. No metric is computed beside the loss, as the peers would compute none.

* ``digits``: an MLP 64-128-10 on scikit-learn's digits. A micro-batch takes no time; calling the
  operators does.
* ``images``: a convolutional net of 33,000 parameters on images of 32x32x3, drawn by seed; the
  label is the colour channel and the half of the image that was made brighter.
* ``text``: a decoder of 4.9 million parameters on bytes of text, words drawn by seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset


def loss_of(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Return the cross entropy of logits [..., C]."""
    if logits.ndim > 2:
        logits, labels = logits.flatten(0, -2), labels.flatten()
    return functional.cross_entropy(logits, labels, reduction=reduction)


class Digits:
    """Each client owns 15 digits, drawn by its number."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        images, labels = self._all
        random = np.random.default_rng([3, part])
        rows = torch.from_numpy(random.choice(len(labels), WORK["digits"].each, replace=False))
        return TensorDataset(images[rows], labels[rows])

    def loss_sum(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        inputs, labels = batch
        return loss_of(model(inputs), labels, "sum"), labels.numel()

    @cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


class Images(Digits):
    """Each client owns 15 images of noise, one half of one channel of each made brighter."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 10),
        )

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(part)
        number = WORK["images"].each
        images = torch.randn(number, 3, 32, 32, generator=random)
        labels = torch.randint(6, (number,), generator=random)
        for image, label in zip(images, labels.tolist(), strict=True):
            channel, half = divmod(label, 2)
            image[channel, 16 * half : 16 * (half + 1)] += 0.5
        return TensorDataset(images, labels)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextModel:
    """What the decoder is made from."""

    num_layers: int = 6
    width: int = 256
    num_heads: int = 4
    length: int = 32
    vocabulary: int = 256


class Block(nn.Module):
    """Attention to what came before, and an MLP, each behind a norm."""

    def __init__(self, chosen: TextModel) -> None:
        super().__init__()
        self.num_heads = chosen.num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(chosen.width) for _ in range(2))
        self.attend = nn.Linear(chosen.width, 3 * chosen.width)
        self.mix = nn.Linear(chosen.width, chosen.width)
        self.wide = nn.Linear(chosen.width, 4 * chosen.width)
        self.narrow = nn.Linear(4 * chosen.width, chosen.width)

    def forward(self, values: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.attend(self.norms[0](values)).chunk(3, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.mix(seen.transpose(1, 2).flatten(2))
        wide: Tensor = self.wide(self.norms[1](values))
        narrow: Tensor = self.narrow(functional.gelu(wide))
        return values + narrow


class Decoder(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, chosen: TextModel) -> None:
        super().__init__()
        self.bytes = nn.Embedding(chosen.vocabulary, chosen.width)
        self.places = nn.Parameter(torch.randn(chosen.length, chosen.width) / 50)
        self.blocks = nn.Sequential(*(Block(chosen) for _ in range(chosen.num_layers)))
        self.norm = nn.LayerNorm(chosen.width)
        self.logits = nn.Linear(chosen.width, chosen.vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(self.blocks(self.bytes(text) + self.places)))
        return logits


class Text(Digits):
    """Each client owns 4 lines of words drawn by its number; each byte is foretold."""

    max_weight_per_example = TextModel().length

    def new_model(self) -> nn.Module:
        return Decoder(TextModel())

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = np.random.default_rng([5, part])
        words = ["stream", "river", "delta", "spring", "rain", "tide", "brook", "lake"]
        number, length = WORK["text"].each, TextModel().length + 1
        text = " ".join(random.choice(words, size=number * length)).encode()[: number * length]
        lines = torch.tensor(list(text)).view(number, length)
        return TensorDataset(lines[:, :-1].contiguous(), lines[:, 1:].contiguous())


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A task, what a client has of it, and how much goes through the model at once without us."""

    task: Callable[[], Any]
    each: int
    micro_batch: int
    learning_rate: float
    vectors_at_once: int  # clients
    examples_at_once: int

    @property
    def spec(self) -> str:
        """The task as a setting."""
        return f"{__file__}:{self.task.__name__}"


WORK = {
    "digits": Work(
        task=Digits,
        each=15,
        micro_batch=5,
        learning_rate=0.1,
        vectors_at_once=100,
        examples_at_once=1 << 20,
    ),
    "images": Work(
        task=Images,
        each=15,
        micro_batch=5,
        learning_rate=0.05,
        vectors_at_once=8,
        examples_at_once=64,
    ),
    "text": Work(
        task=Text, each=4, micro_batch=2, learning_rate=0.05, vectors_at_once=2, examples_at_once=32
    ),
}


@cache
def resident(work: Work) -> tuple[Any, nn.Module]:
    """Return the task and a model of it, once a process, as Flower's workers keep them.

    It stands in a module that they import: what is sent to them by value begins anew each time.
    """
    task = work.task()
    return task, task.new_model()
