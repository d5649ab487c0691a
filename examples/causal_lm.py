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

``--data`` takes a folder of texts, or one file; ``chat_lm.py`` beside takes conversations. A text
is cut into examples of at most ``context`` tokens; ``collate`` pads them to the longest of a
micro-batch. With ``is_packed`` a device's texts are joined first, and only its last example is
shorter. The loss is a sum over tokens, the weight is their number, and padding is in neither. The
logits of a large vocabulary never exist at once (``headwater.chunked_cross_entropy``), also where a
model scales or caps them.

A run's model as a folder for plain transformers, and its adapters as one for peft::

    headwater-simulate --task examples/causal_lm.py:CausalLmLora --clients 4 --out runs/lora
    python -c "from headwater.examples.causal_lm import *; CausalLmLora().export('runs/lora', 'lm')"
"""

import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, cast

import torch
from torch import Tensor, nn

import headwater

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by transformers when it is imported

from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from headwater.examples.language_model_loss import (
    PADDING,
    check_logits,
    loss_of_head,
    loss_of_own_logits,
)

END = "<|end|>"  # between texts
TEST_EVERY = 10  # of the bundled texts
NUM_TEST_EXAMPLES = 64
NUM_SAMPLE_TOKENS = 48
SAMPLE_SECONDS = 60.0  # a sample of a model that needs longer is shorter
PIECES = "tokenizer.model"

log = logging.getLogger(__name__)


class TokenExamples(list[Tensor]):
    """Examples [2, T]: tokens over targets; a target is the next token, or ``PADDING``.

    ``text`` has the number of the text that each example is of, for ``--partition column:text`` and
    ``--held-out group:text``; packed examples are of several, and have none.
    """

    def __init__(self, examples: Iterable[Tensor] = (), text: Sequence[int] | None = None) -> None:
        super().__init__(examples)
        if text is not None:
            self.text = text

    def between(self, start: int, stop: int) -> "TokenExamples":
        """Return the examples from ``start`` to before ``stop``."""
        text = getattr(self, "text", None)
        return TokenExamples(self[start:stop], None if text is None else text[start:stop])


class CausalLm:
    """The tokens so far in, the next token out."""

    folder: str | None = None
    """A model and its tokenizer as ``save_pretrained`` writes them; None makes a small model.

    A device needs no weights in it beside ``config.json`` and the tokenizer: the server sends what
    trains each round, and the frozen rest once.
    """
    lora_rank: int | None = None
    """The rank of adapters in all linear layers but the last, the rest frozen; None: no LoRA."""
    dtype = torch.float32
    """Of the weights in ``folder``; bfloat16 takes half the memory, and only frozen ones may be."""
    context = 128
    is_packed = False
    test_data: str | None = None
    """What the server tests on, as ``--data`` of a device; None: help texts for the small model,
    and nothing for one in ``folder`` (``--evaluate-on-devices`` tests it on the devices)."""
    prompt: str | None = "The "
    """What the model continues in the sample of its text; None: no sample."""
    own_logits = False
    """Whether the loss takes the model's own logits, all of a micro-batch's at once."""

    @property
    def max_weight_per_example(self) -> int:
        return self.context

    @cached_property
    def tokenizer(self) -> Any:
        """Return the tokenizer.

        Raises:
            ValueError: it has no end token.
        """
        if self.folder is None:
            return byte_tokenizer()
        found = AutoTokenizer.from_pretrained(_existing(self.folder), local_files_only=True)
        if found.eos_token_id is None:
            raise ValueError(
                f"the tokenizer in {self.folder} has no end token: name one as eos_token in its "
                "tokenizer_config.json"
            )
        return found

    def new_model(self) -> nn.Module:
        if self.folder is None:
            model = LlamaForCausalLM(small_config(len(self.tokenizer)))
        elif _has_weights(folder := _existing(self.folder)):
            model = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, dtype=self.dtype
            )
        else:
            log.warning("%s has no weights: they are random until a server sends its own", folder)
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        if not self.own_logits:
            check_logits(model)
        if self.lora_rank is not None:
            settings = LoraConfig(
                r=self.lora_rank, lora_alpha=2 * self.lora_rank, target_modules="all-linear"
            )
            model = get_peft_model(model, settings)
        return cast(nn.Module, model)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TokenExamples:
        if data is not None:
            return self.read(data)
        train = self.bundled[0]
        return train.between(len(train) * part // num_parts, len(train) * (part + 1) // num_parts)

    def test_examples(self) -> TokenExamples:
        if self.test_data is not None:
            return self.read(Path(self.test_data).expanduser())
        if self.folder is not None:
            return TokenExamples()
        return self.bundled[1].between(0, NUM_TEST_EXAMPLES)

    def read(self, path: Path) -> TokenExamples:
        """Return the examples of a file or folder."""
        return self.examples(texts_in(path))

    @cached_property
    def bundled(self) -> tuple[TokenExamples, TokenExamples]:
        """Return the examples that every device has: those to train on, and those to test."""
        train, test = help_texts()
        return self.examples(train), self.examples(test)

    def examples(self, texts: Sequence[str]) -> TokenExamples:
        """Cut texts into examples of at most ``context`` tokens, each of which predicts the next.

        Every token of a text is predicted once, and so is the end of each text.
        """
        end, start = self.tokenizer.eos_token_id, self.tokenizer.bos_token_id
        coded = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        first = end if start is None else start
        streams = [[first, *tokens, end] for tokens in coded if tokens]
        if self.is_packed and streams:
            joined = [first, *(token for stream in streams for token in stream[1:])]
            return TokenExamples(cut(joined, [True] * len(joined), self.context))
        pieces = [cut(stream, [True] * len(stream), self.context) for stream in streams]
        return TokenExamples(
            (piece for of_text in pieces for piece in of_text),
            text=[number for number, of_text in enumerate(pieces) for _ in of_text],
        )

    def collate(self, examples: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return input tokens [B, T] and targets [B, T], padded on the right."""
        shape = len(examples), max(self.lengths(examples))
        tokens_BT, targets_BT = torch.zeros(shape, dtype=torch.int64), torch.full(shape, PADDING)
        for row, (tokens, targets) in enumerate(examples):
            tokens_BT[row, : len(tokens)] = tokens
            targets_BT[row, : len(targets)] = targets
        return tokens_BT, targets_BT

    def lengths(self, examples: Sequence[Tensor]) -> list[int]:
        """Return the tokens of each example: a micro-batch is padded to its longest."""
        return [example.shape[1] for example in examples]

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, float]]:
        tokens_BT, targets_BT = batch
        loss = (loss_of_own_logits if self.own_logits else loss_of_head)(
            model, tokens_BT, targets_BT
        )
        weight = int((targets_BT != PADDING).sum())
        # Divided by the weight, as every metric is, this is bits per token.
        return loss, weight, {"bits": loss.item() / math.log(2)}

    def sample(self, model: nn.Module) -> str | None:
        """Return ``prompt`` with what the model makes of it."""
        if self.prompt is None:
            return None
        return self.prompt + self.continuation(model, self.coded_prompt(self.prompt))

    def continuation(self, model: nn.Module, tokens: list[int]) -> str:
        """Return what follows some tokens, if the likeliest token is taken each time."""
        given_1T, generating = torch.tensor([tokens]), cast(Any, model)
        found_1T = generating.generate(
            input_ids=given_1T,
            attention_mask=torch.ones_like(given_1T),
            max_new_tokens=NUM_SAMPLE_TOKENS,
            max_time=SAMPLE_SECONDS,
            do_sample=False,
            pad_token_id=self.tokenizer.eos_token_id,
        )
        told = self.tokenizer.decode(found_1T[0, len(tokens) :], skip_special_tokens=True)
        return cast(str, told)

    def coded_prompt(self, prompt: str) -> list[int]:
        """Return the tokens of the prompt, as a text begins."""
        start, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        tokens = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return [end if start is None else start, *tokens]

    def export(
        self, run: str | Path, folder: str | Path, *, dtype: torch.dtype | None = None
    ) -> None:
        """Write a run's model as a folder of transformers; with LoRA merged, the adapters beside.

        ``AutoModelForCausalLM.from_pretrained`` reads the folder, ``PeftModel.from_pretrained`` its
        subfolder ``adapter``, and llama.cpp's ``convert_hf_to_gguf.py`` makes a GGUF file of it.
        ``dtype`` is that of the folder's weights; None: as they were trained.
        """
        model: Any = headwater.load_model(run, self)
        if self.lora_rank is not None:
            model.save_pretrained(Path(folder) / "adapter")
        if dtype is not None:
            model = model.to(dtype)
        if self.lora_rank is not None:
            model = model.merge_and_unload()
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        # Of SentencePiece: transformers no longer writes it, and the GGUF of a Gemma needs it.
        if self.folder is not None and (pieces := _existing(self.folder) / PIECES).is_file():
            shutil.copyfile(pieces, Path(folder) / PIECES)


class CausalLmLora(CausalLm):
    """The same with adapters of rank 8."""

    lora_rank = 8


def cut(stream: Sequence[int], is_target: Sequence[bool], context: int) -> list[Tensor]:
    """Cut a stream of tokens into examples [2, T] of at most ``context`` tokens.

    Each token but the first is predicted once, from those before it in its example; one that is no
    target has ``PADDING`` for it.
    """
    tokens, is_known = torch.tensor(stream), torch.tensor(is_target)
    targets = tokens.masked_fill(~is_known, PADDING)
    pieces = torch.split(torch.stack([tokens[:-1], targets[1:]]), context, dim=1)
    return [piece.clone() for piece in pieces]  # a view would be stored with the whole stream


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
            yield file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            continue


@cache
def help_texts() -> tuple[list[str], list[str]]:
    """Return Python's help texts: those to train on, and those to test."""
    texts = [text for _, text in sorted(topics.items())]
    train = [text for at, text in enumerate(texts) if at % TEST_EVERY]
    return train, texts[::TEST_EVERY]


def _has_weights(folder: Path) -> bool:
    return any(any(folder.glob(kind)) for kind in ("*.safetensors", "pytorch_model*.bin"))


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
