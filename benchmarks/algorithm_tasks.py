"""The tasks on which algorithms are compared: digits, through convolutions too, and short texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from torch import nn

from examples.digits import Digits
from examples.text_transformer import TextTransformer

NUM_MODULES, STRETCHES_EACH, NUM_BYTES, NUM_TEST = 20, 16, 32, 64


class Convolutions(Digits):
    """The digits through a small convolutional net of 1,898 parameters."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 10),
        )


class ShortTexts(TextTransformer):
    """The transformer of examples/text_transformer.py, on the beginnings of 20 long modules.

    A stretch's label is its module, so that ``labels:1:module`` gives each of 20 devices one.
    """

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> list[bytes]:
        return [stretch for stretch, _ in self._labelled]

    def test_examples(self) -> list[bytes]:
        return [stretch[:NUM_BYTES] for stretch in super().test_examples()[:NUM_TEST]]

    def columns(self, examples: Sequence[bytes]) -> dict[str, list[str]]:
        return {"module": [module for _, module in self._labelled]}

    @cached_property
    def _labelled(self) -> list[tuple[bytes, str]]:
        """Return the stretches, each with the name of its module."""
        train = super().train_examples(data=None, part=0, num_parts=1)
        by_module: dict[str, list[bytes]] = {}
        for stretch, module in zip(train, super().columns(train)["module"], strict=True):
            by_module.setdefault(module, []).append(stretch)
        longest = sorted(by_module, key=lambda module: (-len(by_module[module]), module))
        return [
            (stretch[:NUM_BYTES], module)
            for module in sorted(longest[:NUM_MODULES])
            for stretch in by_module[module][:STRETCHES_EACH]
        ]
