"""The language model of Hugging Face: additive, exact on ragged text, and plain where it ends.

transformers is imported by the tests themselves: it takes seconds, and quick tests do not need it.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from headwater.client.memory.activation_checkpointing import switch_off, switch_on
from headwater.common.data.columns import column_of
from headwater.common.errors import (
    EmptyDataset,
    MissingColumn,
    MissingData,
    TaskError,
    UnsupportedModel,
)
from headwater.common.model.bfloat16_weights import stored_frozen
from headwater.common.model.parameters import ModelImage, build_model
from headwater.common.settings.sources import load
from headwater.common.task import load_task, open_train_examples
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.api import simulate
from headwater.simulation.run import run_engine
from tests.additivity import check_additive

if TYPE_CHECKING:
    from examples.causal_lm import CausalLm

pytestmark = [
    pytest.mark.slow,
    # peft 0.21 reads an attribute that transformers 5.23 has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

PADDING = -100
SPECS = {
    "whole": "examples/causal_lm.py:CausalLm",
    "lora": "examples/causal_lm.py:CausalLmLora",
}


@pytest.fixture(scope="module")
def lm() -> Any:
    """Return the example's module."""
    return import_module("examples.causal_lm")


@pytest.fixture(scope="module")
def transformers() -> Any:
    return import_module("transformers")


SMALL: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def model_folder(lm: Any, path: Path, *, is_tied: bool = True, seed: int = 5) -> Path:
    """Write a model and a tokenizer, as their owner has them."""
    torch.manual_seed(seed)
    tokenizer = lm.byte_tokenizer()
    settings = lm.small_config(len(tokenizer))
    settings.tie_word_embeddings = is_tied
    lm.LlamaForCausalLM(settings).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def of_folder(lm: Any, path: Path, **attributes: Any) -> CausalLm:
    task: CausalLm = type("Mine", (lm.CausalLm,), {"folder": str(path), **attributes})()
    return task


def texts(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("Grüße\n" * 40)
    (folder / "b.txt").write_text("short")
    (folder / "c.bin").write_bytes(b"\xff\xfe\x00")
    (folder / "empty.txt").write_text("")
    return folder


def plain_loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
    return functional.cross_entropy(
        logits, targets.flatten(), ignore_index=PADDING, reduction="sum"
    )


def packed(lm: Any) -> CausalLm:
    task: CausalLm = type("Packed", (lm.CausalLm,), {"is_packed": True})()
    return task


@pytest.mark.parametrize("kind", SPECS)
def test_the_task_is_additive_on_its_sample(kind: str) -> None:
    task = load_task(SPECS[kind])
    examples = task.train_examples(data=None, part=1, num_parts=30)
    check_additive(task, ModelImage(task.new_model()).model, examples)


def test_packed_texts_of_its_owner_are_additive(lm: Any, tmp_path: Path) -> None:
    task = packed(lm)
    examples = task.train_examples(data=texts(tmp_path / "texts"), part=0, num_parts=1)
    check_additive(task, ModelImage(task.new_model()).model, examples)


@pytest.mark.parametrize("kind", SPECS)
def test_the_loss_falls_in_the_simulator(kind: str, tmp_path: Path) -> None:
    rows: list[RoundRow] = []
    overrides: dict[str, Any] = {
        "task": SPECS[kind],
        "rounds": 2,
        "threads": 1,
        "simulation.clients": 3,
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 0.01,
        "plan.accumulation_steps": 2,
        "plan.micro_batch_size": 4,
        "out": tmp_path,
    }
    run_engine(load(None, overrides), on_round=rows.append, resume=False)
    assert rows[-1].loss < rows[0].loss


def test_the_loss_is_that_of_the_model_s_own_logits(lm: Any) -> None:
    task = lm.CausalLm()
    model = task.new_model()
    tokens, targets = task.collate(task.examples(["abc", "a longer text"]))
    loss, weight, metrics = task.loss_sum(model, (tokens, targets))
    assert weight == 4 + 14  # each text's tokens, and its end
    assert torch.isclose(loss, plain_loss(model, tokens, targets), rtol=1e-5)
    assert metrics["bits"] == pytest.approx(float(loss.detach()) / 0.6931472)


def test_padding_does_not_reach_the_loss(lm: Any) -> None:
    task = lm.CausalLm()
    model = task.new_model()
    tokens, targets = task.collate(task.examples(["abc", "a longer text"]))
    before = task.loss_sum(model, (tokens, targets))[0]
    tokens[targets == PADDING] = 77
    assert task.loss_sum(model, (tokens, targets))[0].item() == before.item()


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_every_token_and_the_end_of_every_text_is_predicted_once(lm: Any, is_packed: bool) -> None:
    task = packed(lm) if is_packed else lm.CausalLm()
    examples = task.examples(["x" * 300, "", "yz"])
    predicted = task.tokenizer.decode(torch.cat([example[1] for example in examples]))
    assert predicted == "x" * 300 + lm.END + "yz" + lm.END
    assert task.lengths(examples) == ([128, 128, 48] if is_packed else [128, 128, 45, 3])


def test_the_byte_tokenizer_returns_any_text_as_it_was(lm: Any) -> None:
    text = "Grüße, 你好\n\tx  y"
    assert lm.byte_tokenizer().decode(lm.byte_tokenizer()(text)["input_ids"]) == text


def test_the_parts_of_the_sample_are_disjoint_and_complete(lm: Any) -> None:
    task = lm.CausalLm()
    parts = [task.train_examples(data=None, part=part, num_parts=3) for part in range(3)]
    whole = task.train_examples(data=None, part=0, num_parts=1)
    together = [example for part in parts for example in part]
    assert len(together) == len(whole)
    assert all(torch.equal(*pair) for pair in zip(together, whole, strict=True))
    assert len(whole.text) == len(whole)


def test_the_texts_of_an_owner_are_held_out_whole(lm: Any, tmp_path: Path) -> None:
    task = lm.CausalLm()
    examples = task.train_examples(data=texts(tmp_path / "texts"), part=0, num_parts=1)
    column = column_of(task, examples, "text")
    assert column.codes_E.tolist() == [0, 0, 0, 1]  # 321 tokens of one text, 6 of another
    with pytest.raises(MissingColumn):
        column_of(packed(lm), packed(lm).read(tmp_path / "texts"), "text")


def test_the_server_tests_on_the_texts_it_was_given_and_no_others(lm: Any, tmp_path: Path) -> None:
    folder = model_folder(lm, tmp_path / "base")
    assert of_folder(lm, folder).test_examples() == []
    task = of_folder(lm, folder, test_data=str(texts(tmp_path / "texts")))
    assert task.lengths(task.test_examples()) == [128, 128, 65, 6]
    assert len(lm.CausalLm().test_examples()) == lm.NUM_TEST_EXAMPLES


def test_a_text_begins_with_the_tokenizer_s_own_start(lm: Any, tmp_path: Path) -> None:
    task = of_folder(lm, model_folder(lm, tmp_path / "base"))
    task.tokenizer.bos_token = "a"
    tokens, targets = task.examples(["b"])[0]
    assert task.tokenizer.decode(tokens) == "ab"
    assert task.tokenizer.decode(targets) == "b" + lm.END


def test_a_tokenizer_without_an_end_is_named(lm: Any, tmp_path: Path) -> None:
    folder = model_folder(lm, tmp_path / "base")
    tokenizer = lm.byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="has no end token: name one as eos_token"):
        of_folder(lm, folder).examples(["text"])


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_a_run_s_model_loads_in_plain_transformers(
    lm: Any, transformers: Any, is_tied: bool, tmp_path: Path
) -> None:
    task = of_folder(lm, model_folder(lm, tmp_path / "base", is_tied=is_tied))
    run = simulate(task, clients=2, rounds=1, out=tmp_path / "run", accumulation_steps=1)
    task.export(tmp_path / "run", tmp_path / "exported")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", local_files_only=True
    )
    trained = run.model.state_dict()
    assert all(torch.equal(trained[name], value) for name, value in loaded.state_dict().items())
    start = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", local_files_only=True
    )
    assert not torch.equal(start.lm_head.weight, loaded.lm_head.weight)
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        tmp_path / "exported", local_files_only=True
    )
    assert tokenizer("ab")["input_ids"] == task.tokenizer("ab")["input_ids"]


def test_adapters_load_in_peft_and_merged_in_plain_transformers(
    lm: Any, transformers: Any, tmp_path: Path
) -> None:
    task = of_folder(lm, model_folder(lm, tmp_path / "base"), lora_rank=4)
    run = simulate(task, clients=2, rounds=1, out=tmp_path / "run", accumulation_steps=1)
    task.export(tmp_path / "run", tmp_path / "exported")
    tokens = torch.arange(1, 9)[None]

    def logits(model: Any) -> Tensor:
        with torch.no_grad():
            found: Tensor = model.eval()(input_ids=tokens).logits
        return found

    def base() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", local_files_only=True
        )

    adapted = import_module("peft").PeftModel.from_pretrained(
        base(), tmp_path / "exported" / "adapter"
    )
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", local_files_only=True
    )
    assert torch.equal(logits(adapted), logits(run.model))
    assert torch.allclose(logits(merged), logits(run.model), atol=1e-5)
    assert not torch.allclose(logits(base()), logits(run.model), atol=1e-5)


def test_adapters_on_four_bits_load_in_peft_on_the_decoded_base(
    lm: Any, transformers: Any, tmp_path: Path
) -> None:
    task = of_folder(lm, model_folder(lm, tmp_path / "base"), lora_rank=4)
    run = simulate(
        task,
        clients=2,
        rounds=1,
        out=tmp_path / "run",
        accumulation_steps=1,
        frozen_dtype="nf4",
    )
    task.export(tmp_path / "run", tmp_path / "exported")
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", local_files_only=True
    )
    with stored_frozen(base.requires_grad_(False), "nf4"):
        pass
    adapted = import_module("peft").PeftModel.from_pretrained(
        base, tmp_path / "exported" / "adapter"
    )
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        found, expected = (one.eval()(input_ids=tokens).logits for one in (adapted, run.model))
    assert torch.equal(found, expected)


def test_only_adapters_are_trained_and_sent_in_each_round(lm: Any) -> None:
    image = ModelImage(lm.CausalLmLora().new_model())
    assert {slot.name.split(".")[-3] for slot in image.layout.trainable} == {"lora_A", "lora_B"}
    assert image.layout.num_bytes == 4 * image.layout.num_parameters


def test_frozen_weights_may_be_bfloat16_and_adapters_are_float32(lm: Any, tmp_path: Path) -> None:
    folder = model_folder(lm, tmp_path / "base")
    task = of_folder(lm, folder, lora_rank=4, dtype=torch.bfloat16)
    model = ModelImage(task.new_model()).model
    loss, _, _ = task.loss_sum(model, task.collate(task.examples(["some text"])))
    loss.backward()  # type: ignore[no-untyped-call]
    dtypes = {(one.requires_grad, one.dtype) for one in model.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    assert loss.dtype == torch.float32
    whole = of_folder(lm, folder, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModel, match="bfloat16; updates are float32"):
        ModelImage(whole.new_model())


@pytest.mark.parametrize("frozen_dtype", [None, "nf4"])
def test_a_device_needs_no_weights_of_a_model_that_the_server_sends(
    lm: Any, frozen_dtype: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = model_folder(lm, tmp_path / "server")
    bare = model_folder(lm, tmp_path / "device")
    (bare / "model.safetensors").unlink()
    server, device = (
        build_model(of_folder(lm, one, lora_rank=4), seed=0, frozen_dtype=frozen_dtype)
        for one in (whole, bare)
    )
    assert f"{bare} has no weights" in caplog.text
    assert f"{whole} has no weights" not in caplog.text
    assert server.layout.digest == device.layout.digest
    assert server.frozen_digest != device.frozen_digest


def test_a_folder_without_a_model_is_named_and_not_looked_up(lm: Any, tmp_path: Path) -> None:
    task = of_folder(lm, tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config.json, there is none at .*nowhere"):
        task.new_model()


def test_missing_texts_are_named(lm: Any, tmp_path: Path) -> None:
    task = lm.CausalLm()
    with pytest.raises(MissingData, match=r"there is nothing at .*nowhere"):
        open_train_examples(task, data=tmp_path / "nowhere", part=0, num_parts=1)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(EmptyDataset):
        open_train_examples(task, data=tmp_path, part=0, num_parts=1)


def test_files_that_are_not_utf_8_are_counted_in_the_log(
    lm: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lm.CausalLm().train_examples(data=texts(tmp_path / "texts"), part=0, num_parts=1)
    assert "1 files are not UTF-8" in caplog.text


def test_a_cache_in_recomputed_blocks_is_an_error_whose_remedy_works(
    lm: Any, transformers: Any
) -> None:
    settings = transformers.LlamaConfig(**SMALL, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(settings)
    tokens = torch.arange(8)[None]
    assert switch_on(model)
    with pytest.raises(TaskError) as caught:
        model(input_ids=tokens).logits.sum().backward()
    assert "use_cache=False" in str(caught.value.remedy)
    model.zero_grad()
    model(input_ids=tokens, use_cache=False).logits.sum().backward()
    found = model.lm_head.weight.grad.clone()
    switch_off(model)
    model.zero_grad()
    model(input_ids=tokens).logits.sum().backward()
    assert torch.equal(found, model.lm_head.weight.grad)
