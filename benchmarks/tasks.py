"""The tasks that the benchmarks train: small, of random data, in need of nothing but torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from headwater.common.model.chunked_cross_entropy import chunked_cross_entropy

NUM_EXAMPLES = 512
IMAGE_SIZE, NUM_CLASSES = 32, 10
CONTEXT, NUM_TOKENS = 64, 256
WIDTH, NUM_LAYERS, NUM_HEADS = 256, 6, 8
RAGGED_TOKENS = 256


class Classes:
    """Cross entropy, summed."""

    def loss_sum(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        inputs, labels = batch
        loss = functional.cross_entropy(model(inputs), labels, reduction="sum")
        return loss, len(labels)


class Perceptron(Classes):
    """The model of examples/digits.py (9,610 parameters), without scikit-learn behind it."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, NUM_CLASSES))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return _examples((64,))


class WidePerceptron(Classes):
    """A perceptron of 21 million parameters: 84 MB, and as much for its gradient."""

    def new_model(self) -> nn.Module:
        layers = [nn.Linear(64, 2048), nn.ReLU()]
        for _ in range(5):
            layers += [nn.Linear(2048, 2048), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(2048, NUM_CLASSES))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return _examples((64,))


class Convolutions(Classes):
    """Four convolutions on 32x32 pictures: 0.25 million parameters."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(128, 128, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, NUM_CLASSES),
        )

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Dataset[Any]:
        return _examples((3, IMAGE_SIZE, IMAGE_SIZE))


class Million(Convolutions):
    """The same convolutions before a wide layer: 1.0 million parameters."""

    def new_model(self) -> nn.Module:
        *convolutions, _, _, _ = super().new_model().children()
        return nn.Sequential(
            *convolutions,
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(2048, 366),
            nn.ReLU(),
            nn.Linear(366, NUM_CLASSES),
        )


class Pictures(Convolutions):
    """The same on as many random pictures as one likes: each is made when it is asked for."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Dataset[Any]:
        return _RandomPictures(100_000)


class _RandomPictures(Dataset[Any]):
    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(position)
        picture = torch.randn(3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
        return picture, position % NUM_CLASSES


class Tokens:
    """A transformer of 4.9 million parameters that predicts the next of 64 tokens."""

    max_weight_per_example = CONTEXT

    def new_model(self) -> nn.Module:
        return Transformer()

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        shape = (NUM_EXAMPLES, CONTEXT + 1)
        return TensorDataset(torch.randint(NUM_TOKENS, shape, generator=generator))

    def loss_sum(self, model: nn.Module, batch: tuple[Tensor]) -> tuple[Tensor, int]:
        (tokens_BT,) = batch
        logits_BTV = model(tokens_BT[:, :-1])
        targets = tokens_BT[:, 1:].flatten()
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), targets, reduction="sum")
        return loss, len(targets)


class Transformer(nn.Module):
    """Pre-norm encoder layers of torch under a causal mask, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        hidden_BTD = self.tokens(tokens_BT) + self.places(torch.arange(length))
        mask_TT = nn.Transformer.generate_square_subsequent_mask(length)
        return cast(Tensor, self.head(self.layers(hidden_BTD, mask=mask_TT, is_causal=True)))


class Language:
    """A decoder of the size that HEADWATER_BENCHMARK_DECODER gives, on random tokens.

    The size is "layers width vocabulary length", for example "24 1024 50257 512": 355 million
    parameters, as the output layer is the embedding.
    """

    max_weight_per_example = 1 << 20

    def __init__(self) -> None:
        size = os.environ.get("HEADWATER_BENCHMARK_DECODER", "2 64 512 32")
        self.num_layers, self.width, self.num_tokens, self.length = map(int, size.split())

    def new_model(self) -> nn.Module:
        return Decoder(self.num_layers, self.width, self.num_tokens, self.length)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        shape = (NUM_EXAMPLES, self.length + 1)
        return TensorDataset(torch.randint(self.num_tokens, shape, generator=generator))

    def loss_sum(self, model: Decoder, batch: tuple[Tensor]) -> tuple[Tensor, int]:
        (tokens_BT,) = batch
        hidden_BTD, targets_BT = model.hidden(tokens_BT[:, :-1]), tokens_BT[:, 1:]
        loss = chunked_cross_entropy(hidden_BTD, model.tokens.weight, targets_BT)
        return loss, targets_BT.numel()


class RaggedTexts:
    """A decoder of 5 million parameters on texts of 16 to 256 tokens, padded in a micro-batch."""

    max_weight_per_example = RAGGED_TOKENS

    def new_model(self) -> nn.Module:
        return Decoder(6, 256, 2048, RAGGED_TOKENS)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        shares = torch.rand(NUM_EXAMPLES, generator=generator) ** 3  # few are long
        lengths = (16 + shares * (RAGGED_TOKENS - 16)).int().tolist()
        return [torch.randint(1, 2048, (length + 1,), generator=generator) for length in lengths]

    def collate(self, examples: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(examples, batch_first=True)

    def loss_sum(self, model: Decoder, tokens_BT: Tensor) -> tuple[Tensor, int]:
        logits_BTV = model(tokens_BT[:, :-1])
        targets = tokens_BT[:, 1:].flatten()
        loss = functional.cross_entropy(
            logits_BTV.flatten(0, 1), targets, reduction="sum", ignore_index=0
        )
        return loss, int((targets != 0).sum())


class Decoder(nn.Module):
    """A GPT: pre-norm blocks, causal attention, and the embedding as the output layer."""

    def __init__(self, num_layers: int, width: int, num_tokens: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(DecoderBlock(width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTD = self.tokens(tokens_BT) + self.places(torch.arange(tokens_BT.shape[1]))
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD)
        return cast(Tensor, self.norm(hidden_BTD))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return functional.linear(self.hidden(tokens_BT), self.tokens.weight)


class DecoderBlock(nn.Module):
    """Causal attention with heads of 64, then a perceptron of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = width // 64
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        size, length, width = hidden_BTD.shape
        parts = self.query_key_value(self.norm_1(hidden_BTD)).view(size, length, 3, -1, 64)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden_BTD = hidden_BTD + self.out(mixed.transpose(1, 2).reshape(size, length, width))
        out_BTD: Tensor = self.down(functional.gelu(self.up(self.norm_2(hidden_BTD))))
        return hidden_BTD + out_BTD


class Vector:
    """A linear model of as many parameters as the environment's HEADWATER_BENCHMARK_P says.

    An example is one number, so training costs one pass over the vector and nothing else does.
    """

    def new_model(self) -> nn.Module:
        return Scale(int(os.environ.get("HEADWATER_BENCHMARK_P", "1000000")))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return TensorDataset(torch.ones(NUM_EXAMPLES))

    def loss_sum(self, model: nn.Module, batch: tuple[Tensor]) -> tuple[Tensor, int]:
        (numbers_B,) = batch
        return model(numbers_B).sum(), len(numbers_B)


class Scale(nn.Module):
    """The sum of all parameters times the input."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        # In rows, as real models have: the optimizer then works on one row at a time.
        rows = [num_parameters // 10] * 9
        rows.append(num_parameters - sum(rows))
        self.rows = nn.ParameterList(torch.full((n,), 1e-3) for n in rows)

    def forward(self, numbers_B: Tensor) -> Tensor:
        return torch.stack([row.sum() for row in self.rows]).sum() * numbers_B


def _examples(shape: tuple[int, ...]) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_EXAMPLES, *shape, generator=generator)
    return TensorDataset(inputs, torch.randint(NUM_CLASSES, (NUM_EXAMPLES,), generator=generator))
