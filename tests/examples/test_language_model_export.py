"""A run's language model as a folder: what plain transformers writes, which GGUF's converter reads.

``convert_hf_to_gguf.py`` of llama.cpp takes ``architectures`` from config.json, the tensors of
safetensors files by the names that the model's class gives them, and the tokenizer's files.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from headwater.simulation.api import simulate
from tests.examples.test_language_model_loss import new_model

pytestmark = [
    pytest.mark.slow,
    # peft 0.21 reads an attribute that transformers 5.23 has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

KINDS = (
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Gemma",
    "Gemma2",
    "Gemma3Text",
    "SmolLM3",
    "Granite",
)


@pytest.fixture(scope="module")
def lm() -> Any:
    """Return the example's module."""
    return import_module("examples.causal_lm")


@pytest.fixture(scope="module")
def transformers() -> Any:
    return import_module("transformers")


def tensors_in(folder: Path) -> dict[str, Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def trained(lm: Any, model: Any, folder: Path, **attributes: Any) -> Any:
    """Train an owner's model for a round; return the task, and its run in ``folder / "run"``."""
    model.save_pretrained(folder / "base")
    lm.byte_tokenizer().save_pretrained(folder / "base")
    (folder / "base" / "tokenizer.model").write_bytes(b"pieces")
    (folder / "text").write_text("abc " * 40)
    task = type("Mine", (lm.CausalLm,), {"folder": str(folder / "base"), **attributes})()
    simulate(
        task,
        clients=1,
        data=str(folder / "text"),
        rounds=3,
        accumulation_steps=1,
        micro_batch_size=2,
        optimizer="adamw",
        learning_rate=0.01,
        out=folder / "run",
        progress=False,
    )
    return task


@pytest.mark.parametrize("lora_rank", [None, 2], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_model_is_exported_as_transformers_itself_writes_it(
    lm: Any, transformers: Any, kind: str, lora_rank: int | None, tmp_path: Path
) -> None:
    task = trained(lm, new_model(transformers, kind), tmp_path, lora_rank=lora_rank)
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()
    ]
    assert losses[2] < losses[0]
    task.export(tmp_path / "run", tmp_path / "lm", dtype=torch.bfloat16)

    fresh = transformers.AutoModelForCausalLM.from_config(new_model(transformers, kind).config)
    fresh.to(torch.bfloat16).save_pretrained(tmp_path / "fresh")
    found, expected = tensors_in(tmp_path / "lm"), tensors_in(tmp_path / "fresh")
    assert {name: (one.shape, one.dtype) for name, one in found.items()} == {
        name: (one.shape, one.dtype) for name, one in expected.items()
    }
    assert fresh.state_dict().keys() - found.keys() == (
        {"lm_head.weight"} if fresh.config.tie_word_embeddings else set()
    )
    config = json.loads((tmp_path / "lm/config.json").read_text())
    assert config == json.loads((tmp_path / "fresh/config.json").read_text())
    assert (config["architectures"], config["dtype"]) == ([type(fresh).__name__], "bfloat16")


def test_the_tokenizer_s_files_are_exported_with_what_transformers_no_longer_writes(
    lm: Any, transformers: Any, tmp_path: Path
) -> None:
    task = trained(lm, new_model(transformers, "Llama"), tmp_path)
    task.export(tmp_path / "run", tmp_path / "lm")
    for name in ("tokenizer.json", "tokenizer.model"):
        assert (tmp_path / "lm" / name).read_bytes() == (tmp_path / "base" / name).read_bytes()
    assert json.loads((tmp_path / "lm/tokenizer_config.json").read_text())["eos_token"] == lm.END


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_exported_weights_are_those_that_were_trained(
    lm: Any, transformers: Any, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    task = trained(lm, new_model(transformers, "Qwen3"), tmp_path)
    task.export(tmp_path / "run", tmp_path / "lm", dtype=dtype)
    with safe_open(tmp_path / "run/model.safetensors", framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors_in(tmp_path / "lm").items():
        assert torch.equal(tensor, weights[name].to(dtype or torch.float32))


def test_a_chat_s_export_has_its_template(lm: Any, transformers: Any, tmp_path: Path) -> None:
    chat = import_module("examples.chat_lm")
    run = tmp_path / "run"
    task = chat.ChatLm()
    simulate(task, clients=2, rounds=1, accumulation_steps=1, out=run, progress=False)
    task.export(run, tmp_path / "lm")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "lm", local_files_only=True)
    assert tokenizer.chat_template == chat.PLAIN_TEMPLATE
