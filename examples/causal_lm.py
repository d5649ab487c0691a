"""Language models of Hugging Face: causal models of transformers, whole or through LoRA adapters.

Needs the extra ``transformers`` (``pip install 'headwater[transformers]'``), and never asks the
hub: model and tokenizer are read from a folder, or made anew. As it stands, ``CausalLm`` is a small
Llama whose tokens are bytes, trained on Python's own help texts, which every device has. Try it::

    headwater-simulate --task examples/causal_lm.py:CausalLm --clients 20 \
        --optimizer adamw --learning-rate 0.003

``CausalLmLora`` is the same model frozen, with LoRA adapters that are trained (Hu et al. 2021). For
a model of your own, which the server and every device have in a folder as ``save_pretrained``
writes it, write a file beside your texts::

    from headwater.examples.causal_lm import CausalLm

    class MyModel(CausalLm):
        folder = "~/models/mine"
        lora_rank = 8  # leave it out to train the whole model
        context = 512  # tokens of an example

``--data`` takes a folder of texts, or one file. A text is cut into examples of at most ``context``
tokens; ``collate`` pads them to the longest of a micro-batch. With ``is_packed`` a device's texts
are joined first, and only its last example is shorter. The loss is a sum over tokens, the weight is
their number, and padding is in neither. The logits of a large vocabulary never exist at once
(``headwater.chunked_cross_entropy``).

A run's model as a folder for plain transformers, and its adapters as one for peft::

    headwater-simulate --task examples/causal_lm.py:CausalLmLora --clients 4 --out runs/lora
    python -c "from headwater.examples.causal_lm import *; CausalLmLora().export('runs/lora', 'lm')"
"""

import logging
import math
import os
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, cast

import torch
from torch import Tensor, nn

import headwater

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by transformers when it is imported

from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import ModulesToSaveWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

PADDING = -100  # as a target: the loss leaves it out
END = "<|end|>"  # between texts
TEST_EVERY = 10  # of the bundled texts
NUM_TEST_EXAMPLES = 64

log = logging.getLogger(__name__)


class CausalLm:
    """The tokens so far in, the next token out."""

    folder: str | None = None
    """A model and its tokenizer as ``save_pretrained`` writes them; None makes a small model."""
    lora_rank: int | None = None
    """The rank of adapters in all linear layers but the last, the rest frozen; None: no LoRA."""
    dtype = torch.float32
    """Of the weights in ``folder``; bfloat16 takes half the memory, and only frozen ones may be."""
    context = 128
    is_packed = False

    @property
    def max_weight_per_example(self) -> int:
        return self.context

    @cached_property
    def tokenizer(self) -> Any:
        if self.folder is None:
            return byte_tokenizer()
        return AutoTokenizer.from_pretrained(_existing(self.folder), local_files_only=True)

    def new_model(self) -> nn.Module:
        if self.folder is None:
            model = LlamaForCausalLM(small_config(len(self.tokenizer)))
        else:
            model = AutoModelForCausalLM.from_pretrained(
                _existing(self.folder), local_files_only=True, dtype=self.dtype
            )
        _check_head(model)
        if self.lora_rank is not None:
            settings = LoraConfig(
                r=self.lora_rank, lora_alpha=2 * self.lora_rank, target_modules="all-linear"
            )
            model = get_peft_model(model, settings)
        return cast(nn.Module, model)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> list[Tensor]:
        if data is not None:
            return self.examples(texts_in(data))
        train = self.examples(_bundled()[0])
        return train[len(train) * part // num_parts : len(train) * (part + 1) // num_parts]

    def test_examples(self) -> list[Tensor]:
        return self.examples(_bundled()[1])[:NUM_TEST_EXAMPLES]

    def columns(self, examples: Sequence[Tensor]) -> dict[str, list[int]]:
        """Return the number of the bundled text that each example is of."""
        texts = [] if self.is_packed else _bundled()[0]  # packed ones are of several
        numbers = [at for at, text in enumerate(texts) for _ in self.examples([text])]
        return {"text": numbers} if len(numbers) == len(examples) else {}

    def examples(self, texts: Sequence[str]) -> list[Tensor]:
        """Cut texts into examples of at most ``context + 1`` tokens: each predicts all but one.

        Every token of a text is predicted once, and so is the end of each text.
        """
        end = self.tokenizer.eos_token_id
        coded = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        streams = [[end, *tokens, end] for tokens in coded if tokens]
        if self.is_packed and streams:
            streams = [[end, *(token for stream in streams for token in stream[1:])]]
        return [
            torch.tensor(stream[start : start + self.context + 1])
            for stream in streams
            for start in range(0, len(stream) - 1, self.context)
        ]

    def collate(self, examples: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return input tokens [B, T] and targets [B, T], padded on the right."""
        shape = len(examples), max(len(example) for example in examples) - 1
        tokens_BT, targets_BT = torch.zeros(shape, dtype=torch.int64), torch.full(shape, PADDING)
        for row, example in enumerate(examples):
            tokens_BT[row, : len(example) - 1] = example[:-1]
            targets_BT[row, : len(example) - 1] = example[1:]
        return tokens_BT, targets_BT

    def lengths(self, examples: Sequence[Tensor]) -> list[int]:
        """Return the tokens that each example predicts: a micro-batch is padded to its longest."""
        return [len(example) - 1 for example in examples]

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, float]]:
        tokens_BT, targets_BT = batch
        hidden_BTD, head = hidden_and_head(model, tokens_BT)
        loss = headwater.chunked_cross_entropy(
            hidden_BTD, head.weight, targets_BT, bias=head.bias, ignore_index=PADDING
        )
        weight = int((targets_BT != PADDING).sum())
        # Divided by the weight, as every metric is, this is bits per token.
        return loss, weight, {"bits": loss.item() / math.log(2)}

    def export(self, run: str | Path, folder: str | Path) -> None:
        """Write a run's model as a folder of transformers; with LoRA merged, the adapters beside.

        ``AutoModelForCausalLM.from_pretrained`` reads the folder, ``PeftModel.from_pretrained`` its
        subfolder ``adapter``.
        """
        model: Any = headwater.load_model(run, self)
        if self.lora_rank is not None:
            model.save_pretrained(Path(folder) / "adapter")
            model = model.merge_and_unload()
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


class CausalLmLora(CausalLm):
    """The same with adapters of rank 8."""

    lora_rank = 8


def hidden_and_head(model: nn.Module, tokens_BT: Tensor) -> tuple[Tensor, nn.Linear]:
    """Return the last hidden state [B, T, D], and the layer that makes logits of it.

    No mask is needed: padding is on the right and attention is causal, so no real token sees it.

    Raises:
        ValueError: an adapter changes the last layer or the input: weight and hidden state are then
            without it, and it would train on no gradient.
    """
    whole: Any = model
    why = ""
    if isinstance(model, PeftModel):
        if model.active_peft_config.is_prompt_learning:
            raise ValueError(
                "a learned prompt or prefix is no part of the last hidden state: write a loss_sum "
                "of your own, which calls the whole model"
            )
        whole = model.get_base_model()
        why = (
            ", whose weight leaves the adapter out: take the last layer out of target_modules "
            "(modules_to_save trains it whole), or"
        )
    head = whole.get_output_embeddings()
    if not isinstance(head, (nn.Linear, ModulesToSaveWrapper)):
        raise ValueError(
            f"expected nn.Linear as the last layer, found {type(head).__name__} of "
            f"{type(head).__module__}{why or ':'} write your own loss_sum"
        )
    body = getattr(whole, whole.base_model_prefix)
    hidden_BTD = body(input_ids=tokens_BT, use_cache=False).last_hidden_state
    return hidden_BTD, cast(nn.Linear, head)


def small_config(num_tokens: int) -> Any:
    """Return a Llama of about 150,000 parameters; embedding and last layer share their weight."""
    return LlamaConfig(
        vocab_size=num_tokens,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )


def byte_tokenizer() -> Any:
    """Return a tokenizer whose tokens are bytes: the same on all devices, without any training."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {END: 0} | {letter: at for at, letter in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END
    )


def texts_in(path: Path) -> list[str]:
    """Read a file, or all files below a folder in the order of their names.

    Files that are not UTF-8 are left out, and counted in the log.

    Raises:
        FileNotFoundError: nothing is there.
    """
    if not path.exists():
        raise FileNotFoundError(f"expected a folder of texts, there is nothing at {path}")
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    texts = list(_decoded(files))
    if len(texts) < len(files):
        log.warning("%s: %d files are not UTF-8 and were left out", path, len(files) - len(texts))
    return texts


def _decoded(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        try:
            yield file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


@cache
def _bundled() -> tuple[list[str], list[str]]:
    """Return Python's help texts: those to train on, and those to test."""
    texts = [text for _, text in sorted(topics.items())]
    train = [text for at, text in enumerate(texts) if at % TEST_EVERY]
    return train, texts[::TEST_EVERY]


def _existing(folder: str) -> Path:
    """Return a model's folder.

    Raises:
        FileNotFoundError: there is none; transformers would take the name for one of the hub's.
    """
    path = Path(folder).expanduser()
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"expected a model's folder with a config.json, there is none at {path}"
        )
    return path


def _check_head(model: Any) -> None:
    """Check that the logits are the last layer of the last hidden state, and nothing more.

    The last layer's output is enlarged for it: a cap of 30 hardly changes a new model's logits.

    Raises:
        ValueError: the model scales or caps its logits, so ``loss_sum`` would train another one.
    """
    was_training = model.training
    model.eval()
    with torch.no_grad():
        tokens = torch.arange(4)[None]
        hidden, head = hidden_and_head(model, tokens)
        hook = head.register_forward_hook(lambda _, __, logits: 1000 * logits)
        expected = model(input_ids=tokens, use_cache=False).logits
        is_same = torch.allclose(head(hidden), expected, rtol=1e-4, atol=0.1)
        hook.remove()
    model.train(was_training)
    if not is_same:
        raise ValueError(
            f"{type(model).__name__} changes its logits after the last layer: write a loss_sum of "
            "your own, with cross_entropy"
        )
