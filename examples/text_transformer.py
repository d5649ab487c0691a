"""Text: a small causal transformer that predicts the next byte of the files in a folder.

Texts are cut into stretches of at most ``CONTEXT`` bytes that end with a line where they can, so
they differ in length. ``collate`` pads them to the longest of a micro-batch; the loss, the weight
and the metrics leave the padding out, so the weight counts real bytes. There is no tokenizer to
agree on: a byte is a token. Try it::

    headwater-simulate --task examples/text_transformer.py:TextTransformer --clients 20 \
        --optimizer adam --learning-rate 0.003

``--data`` takes a folder of texts, or one file. Without it the devices share the sources of
Python's standard library, which every device has; ``--partition column:module`` gives each whole
modules.
"""

import logging
import math
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT = 64
WIDTH, NUM_LAYERS, NUM_HEADS = 64, 2, 4
START = 256  # the token before the first byte
PADDING = -100  # as a target: cross_entropy leaves it out
NUM_TEST_EXAMPLES = 256

log = logging.getLogger(__name__)


class TextTransformer:
    """The bytes so far in, the next byte out."""

    max_weight_per_example = CONTEXT

    def new_model(self) -> nn.Module:
        return Transformer()

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> list[bytes]:
        if data is not None:
            return stretches(_texts_in(data))
        # Neighbours stay together: each device has a few modules of its own.
        train = _sample()[0]
        return train[len(train) * part // num_parts : len(train) * (part + 1) // num_parts]

    def test_examples(self) -> list[bytes]:
        return _sample()[1]

    def columns(self, examples: Sequence[bytes]) -> dict[str, list[str]]:
        """Name the module that each of the bundled stretches is of."""
        return {"module": _sample()[2]}

    def collate(self, examples: Sequence[bytes]) -> tuple[Tensor, Tensor]:
        """Return input tokens [B, T] and target bytes [B, T], padded on the right."""
        shape = len(examples), max(len(example) for example in examples)
        tokens_BT, targets_BT = torch.zeros(shape, dtype=torch.int64), torch.full(shape, PADDING)
        for row, example in enumerate(examples):
            bytes_T = torch.frombuffer(bytearray(example), dtype=torch.uint8).long()
            tokens_BT[row, 0] = START
            tokens_BT[row, 1 : len(example)] = bytes_T[:-1]
            targets_BT[row, : len(example)] = bytes_T
        return tokens_BT, targets_BT

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, float]]:
        tokens_BT, targets_BT = batch
        logits_BTV = model(tokens_BT)
        loss = functional.cross_entropy(
            logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=PADDING, reduction="sum"
        )
        weight = int((targets_BT != PADDING).sum())
        # Divided by the weight, as every metric is, this is bits per byte.
        return loss, weight, {"bits": loss.item() / math.log(2)}


class Transformer(nn.Module):
    """A decoder with pre-norm blocks. Causal: padding on the right reaches no real position."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(START + 1, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, START))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places_T = torch.arange(tokens_BT.shape[1])
        hidden_BTD = self.tokens(tokens_BT) + self.positions(places_T)
        return cast(Tensor, self.head(self.blocks(hidden_BTD)))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm. No dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention_in = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        heads_BHT3C = self.attention_in(self.norm(hidden_BTD)).unflatten(2, (NUM_HEADS, -1))
        query, key, value = heads_BHT3C.transpose(1, 2).chunk(3, dim=3)
        mixed_BHTC = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden_BTD = hidden_BTD + self.attention_out(mixed_BHTC.transpose(1, 2).flatten(2))
        return cast(Tensor, hidden_BTD + self.perceptron(hidden_BTD))


def stretches(texts: Sequence[bytes]) -> list[bytes]:
    """Cut texts into stretches of 1 to ``CONTEXT`` bytes, behind a line's end where there is one.

    Joined again, the stretches are the texts: no byte is lost.
    """
    cut = []
    for text in texts:
        start = 0
        while start < len(text):
            end = text.rfind(b"\n", start, start + CONTEXT) + 1 or start + CONTEXT
            cut.append(text[start:end])
            start += len(cut[-1])
    return cut


def _texts_in(path: Path) -> list[bytes]:
    """Read a file, or all files below a folder in the order of their names.

    A file with a zero byte in its first 8 KiB is taken for binary, as git does, and left out.

    Raises:
        FileNotFoundError: nothing is there.
    """
    if not path.exists():
        raise FileNotFoundError(f"expected a folder of texts, there is nothing at {path}")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    contents = [file.read_bytes() for file in files]
    texts = [content for content in contents if b"\0" not in content[:8192]]
    if len(texts) < len(contents):
        log.warning("%s: %d binary files were left out", path, len(contents) - len(texts))
    return texts


@cache
def _sample() -> tuple[list[bytes], list[bytes], list[str]]:
    """Return stretches of the standard library's modules: all but every tenth, and the rest.

    And the names of the modules that the first ones are of.
    """
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [module.read_bytes() for module in modules]
    test = stretches(texts[::10])
    step = max(len(test) // NUM_TEST_EXAMPLES, 1)
    of_module = {
        module.stem: stretches([text])
        for place, (module, text) in enumerate(zip(modules, texts, strict=True))
        if place % 10
    }
    train = [stretch for cut in of_module.values() for stretch in cut]
    names = [name for name, cut in of_module.items() for _ in cut]
    return train, test[::step][:NUM_TEST_EXAMPLES], names
