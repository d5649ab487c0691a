"""Text: a small transformer that predicts the next byte of the files in a folder on each device.

There is no tokenizer to agree on: a byte is a token. The loss and its weight leave padding out.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

# begin: columns
CONTEXT = 64
# end: columns
# Texts are cut into stretches of so many bytes.

WIDTH, NUM_LAYERS, NUM_HEADS = 64, 2, 4
START, NUM_TOKENS = 256, 257  # the token before the first byte
PADDING = -100  # as a target: cross_entropy leaves it out
TEST_FOLDER = Path(__file__).with_name("test")


class Transformer(nn.Module):
    """The tokens so far in, a score for each next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
        self.scores = nn.Linear(WIDTH, 256)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        hidden = self.tokens(tokens_BT) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        scores: Tensor = self.scores(self.layers(hidden, mask=mask, is_causal=True))
        return scores


class Text:
    """The bytes so far in, the next byte out."""

    max_weight_per_example = CONTEXT

    def new_model(self) -> nn.Module:
        return Transformer()

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> list[bytes]:
        if data is None:
            raise ValueError("name each device's folder of texts: --data 'devices/*'")
        return _stretches(data)

    def test_examples(self) -> list[bytes]:
        return _stretches(TEST_FOLDER)

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
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        tokens_BT, targets_BT = batch
        scores = model(tokens_BT).flatten(0, 1)
        targets = targets_BT.flatten()
        loss = functional.cross_entropy(scores, targets, ignore_index=PADDING, reduction="sum")
        num_bytes = int((targets != PADDING).sum())
        return loss, num_bytes, {"accuracy": (scores.argmax(1) == targets).sum()}


def _stretches(folder: Path) -> list[bytes]:
    """Cut all files below a folder, or one file, into stretches of up to ``CONTEXT`` bytes.

    Raises:
        FileNotFoundError: nothing is there.
    """
    if not folder.exists():
        raise FileNotFoundError(f"expected a folder of texts, there is nothing at {folder}")
    files = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    texts = [path.read_bytes() for path in files if path.is_file()]
    return [
        text[start : start + CONTEXT] for text in texts for start in range(0, len(text), CONTEXT)
    ]
