"""Models of transformers that are built without their frozen weights, and sent them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headwater.client.memory.process_limits import MemoryLimit
from headwater.client.memory.stand_ins import built_without_values
from headwater.common.errors import OutOfMemory
from headwater.common.frozen import nf4_weights
from headwater.common.model.layout import is_stand_in, memory_of
from headwater.common.model.parameters import ModelImage

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

COMMON = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:fan_in"
)

KINDS: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen2": COMMON,
    "gemma2": {**COMMON, "pad_token_id": 0},
    "gpt2": {"vocab_size": 2048, "n_embd": 512, "n_layer": 1, "n_head": 4},
}
NO_LIMIT = MemoryLimit(num_bytes=2**60, source="none")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_sent_its_weights_is_the_one_that_built_them(kind: str) -> None:
    chosen = transformers.AutoConfig.for_model(kind, **KINDS[kind])
    lora = peft.LoraConfig(r=4, target_modules="all-linear")

    def new_model() -> Any:
        model = transformers.AutoModelForCausalLM.from_config(chosen, dtype=torch.bfloat16)
        return peft.get_peft_model(model, lora)

    whole = new_model()
    nf4_weights.store(whole)
    bare: Any = built_without_values(
        lambda: NO_LIMIT, new_model, nf4_weights.store, OutOfMemory("it has no room")
    )
    frozen = [memory_of(one) for one in bare.parameters() if not one.requires_grad]
    # Those below a megabyte are as the task makes them.
    missing = sum(one.nbytes for one in frozen if is_stand_in(one))
    assert missing > 0.8 * sum(one.nbytes for one in frozen)
    server, device = ModelImage(whole), ModelImage(bare)
    assert server.layout.digest == device.layout.digest
    device.frozen_buffer()[:] = server.frozen_U8.numpy().data
    device.load(server.buffer())
    assert server.frozen_digest == device.frozen_digest
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        logits, expected = (one.eval()(input_ids=tokens).logits for one in (bare, whole))
    assert torch.equal(logits, expected)
