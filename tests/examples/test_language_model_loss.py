"""The loss of a language model: plain transformers' own, for every architecture and its adapters.

transformers is imported by the tests themselves: it takes seconds, and quick tests do not need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwater.client.memory.activation_checkpointing import switch_off, switch_on

pytestmark = [
    pytest.mark.slow,
    # peft 0.21 reads an attribute that transformers 5.23 has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

SMALL: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
# As their owners have them: what changes the logits, and heads that are wider than the model's.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Qwen2": {},
    "Qwen3": {"head_dim": 24},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "final_logit_softcapping": 0.05, "sliding_window": 4},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 4},
    "SmolLM3": {},
    "Granite": {"logits_scaling": 8.0},
    "Cohere": {"logit_scale": 0.0625},
    "Olmo2": {},
    "Phi3": {},
}


@pytest.fixture(scope="module")
def lm() -> Any:
    """Return the example's module."""
    return import_module("examples.causal_lm")


@pytest.fixture(scope="module")
def of_loss() -> Any:
    return import_module("headwater.examples.language_model_loss")


@pytest.fixture(scope="module")
def transformers() -> Any:
    return import_module("transformers")


def new_model(transformers: Any, kind: str, **settings: Any) -> Any:
    """Return a small model whose logits are far from zero, so that a cap or a scale shows."""
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**SMALL | ARCHITECTURES[kind] | settings)
    return transformers.AutoModelForCausalLM.from_config(config)


def task_of(lm: Any, transformers: Any, kind: str, path: Path, **attributes: Any) -> Any:
    new_model(transformers, kind).save_pretrained(path)
    lm.byte_tokenizer().save_pretrained(path)
    return type("Mine", (lm.CausalLm,), {"folder": str(path), **attributes})()


def own_loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the loss that transformers computes of labels: a mean, times its tokens.

    ``shift_labels`` are targets that stand below their tokens already.
    """
    weight = (targets != -100).sum()
    found: Tensor = model(
        input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False
    ).loss
    return found * weight


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    trained = [each for each in model.parameters() if each.requires_grad]
    return list(torch.autograd.grad(loss, trained))


def check_equal(model: nn.Module, found: Tensor, expected: Tensor) -> None:
    """Check that loss and gradients are the same to float32's rounding of some hundred terms."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    for one, other in zip(gradients(found, model), gradients(expected, model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lora_rank", [None, 4], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_loss_and_gradients_are_those_of_plain_transformers(
    lm: Any, transformers: Any, kind: str, lora_rank: int | None, tmp_path: Path
) -> None:
    task = task_of(lm, transformers, kind, tmp_path, lora_rank=lora_rank)
    model = task.new_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero in the beginning
                parameter.normal_(std=0.1)
    tokens, targets = task.collate(task.examples(["abc", "a longer text"]))
    found, weight, _ = task.loss_sum(model, (tokens, targets))
    assert weight == 4 + 14  # each text's tokens, and its end
    check_equal(model, found, own_loss(model, tokens, targets))


@pytest.mark.parametrize("kind", ["Gemma2", "Granite"])
def test_the_model_s_own_logits_give_the_same_loss(
    lm: Any, transformers: Any, kind: str, tmp_path: Path
) -> None:
    task = task_of(lm, transformers, kind, tmp_path, own_logits=True)
    model = task.new_model()
    batch = task.collate(task.examples(["abc", "a longer text"]))
    check_equal(model, task.loss_sum(model, batch)[0], own_loss(model, *batch))


def change(model: Any, how: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model's class change its logits after the last layer."""
    forward = type(model).forward

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = forward(self, *args, **kwargs)
        answer.logits = how(answer.logits)
        return answer

    monkeypatch.setattr(type(model), "forward", changed)


@pytest.mark.parametrize(
    "how",
    [lambda logits: logits / 2, lambda logits: 30 * torch.tanh(logits / 30)],
    ids=["scale", "cap"],
)
def test_a_change_of_the_logits_that_no_setting_names_is_refused_and_its_remedy_works(
    lm: Any,
    transformers: Any,
    how: Callable[[Tensor], Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = task_of(lm, transformers, "Llama", tmp_path)
    change(task.new_model(), how, monkeypatch)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM changes .* set own_logits = True"):
        task.new_model()
    task = task_of(lm, transformers, "Llama", tmp_path, own_logits=True)
    model = task.new_model()
    tokens, targets = task.collate(task.examples(["a text"]))
    logits = model(input_ids=tokens, use_cache=False).logits
    expected = nn.functional.cross_entropy(logits[0], targets[0], reduction="sum")
    check_equal(model, task.loss_sum(model, (tokens, targets))[0], expected)


def test_a_weight_that_is_not_finite_is_named(lm: Any, transformers: Any, tmp_path: Path) -> None:
    """Its NaN is in every logit, and no setting would mend that."""
    model = task_of(lm, transformers, "Llama", tmp_path).new_model()
    with torch.no_grad():
        model.model.norm.weight[3] = math.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"weights that are not finite: model\.norm\.weight"):
        type("Mine", (lm.CausalLm,), {"folder": str(tmp_path)})().new_model()


@pytest.mark.parametrize(
    "options",
    [{"target_modules": ["q_proj", "lm_head"]}, {"trainable_token_indices": [3, 5]}],
    ids=["LoRA", "tokens of a tied layer"],
)
def test_an_adapter_of_the_last_layer_is_refused_and_trains_with_its_own_logits(
    lm: Any, of_loss: Any, transformers: Any, options: dict[str, Any]
) -> None:
    is_tied = "target_modules" not in options
    base = new_model(transformers, "Llama", tie_word_embeddings=is_tied)
    model = lm.get_peft_model(base, lm.LoraConfig(r=2, **options))
    task = lm.CausalLm()
    batch = task.collate(task.examples(["abc", "a longer text"]))
    with pytest.raises(ValueError, match="the adapter out: take the last layer out"):
        task.loss_sum(model, batch)
    task.own_logits = True
    check_equal(model, task.loss_sum(model, batch)[0], own_loss(model, *batch))


def test_a_learned_prompt_is_refused_and_trains_with_its_own_logits(lm: Any) -> None:
    settings = import_module("peft").PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    task = lm.CausalLm()
    model = lm.get_peft_model(task.new_model(), settings)
    batch = task.collate(task.examples(["abc", "a longer text"]))
    with pytest.raises(ValueError, match="a learned prompt or prefix"):
        task.loss_sum(model, batch)
    task.own_logits = True
    loss = task.loss_sum(model, batch)[0]
    [gradient] = gradients(loss, model)
    assert loss.isfinite()
    assert gradient.shape == (2, 64)
    assert gradient.norm() > 0


def test_a_last_layer_of_modules_to_save_trains_as_with_the_model_s_own_logits(
    lm: Any, transformers: Any
) -> None:
    base = new_model(transformers, "Llama")
    settings = lm.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = lm.get_peft_model(base, settings)
    task = lm.CausalLm()
    batch = task.collate(task.examples(["abc", "a longer text"]))
    check_equal(model, task.loss_sum(model, batch)[0], own_loss(model, *batch))


@pytest.mark.parametrize("kind", ["Gemma2", "Qwen3"])
def test_recomputed_blocks_give_the_same_gradient(
    lm: Any, transformers: Any, kind: str, tmp_path: Path
) -> None:
    task = task_of(lm, transformers, kind, tmp_path)
    model = task.new_model()
    batch = task.collate(task.examples(["a text"]))
    expected = gradients(task.loss_sum(model, batch)[0], model)
    assert switch_on(model)
    found = gradients(task.loss_sum(model, batch)[0], model)
    switch_off(model)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
