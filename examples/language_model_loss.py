"""The loss of any causal model of transformers, without the logits of a whole vocabulary at once.

``headwater.chunked_cross_entropy`` computes the last layer's logits in chunks. For that it must be
known what a model makes of them: most take them as they are, some scale or cap them.
``check_logits`` compares this with the model itself, and names the way out for a model or an
adapter that does something else: the model's own logits. ``causal_lm.py`` and ``chat_lm.py`` train
with this loss; try it on your device::

    headwater-client check --task examples/causal_lm.py:CausalLm

Legend: B texts, T tokens, D features, V words of the vocabulary.
"""

from typing import Any, cast

import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.nn import functional

import headwater

PADDING = -100  # as a target: the loss leaves it out
OWN_LOGITS = "set own_logits = True in the task: all logits of a micro-batch then exist at once"


def loss_of_head(model: nn.Module, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the summed loss, of the last layer's logits in chunks.

    Raises:
        ValueError: see ``hidden_and_head``.
    """
    hidden_BTD, head = hidden_and_head(model, tokens_BT)
    scale, cap = scale_and_cap(model)
    bias: Tensor | None = head.bias
    if scale != 1:
        hidden_BTD = hidden_BTD * scale
        bias = None if bias is None else bias * scale
    return headwater.chunked_cross_entropy(
        hidden_BTD, head.weight, targets_BT, bias=bias, ignore_index=PADDING, cap=cap
    )


def loss_of_own_logits(model: nn.Module, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the summed loss of the model's own logits, which exist all at once."""
    logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
    logits_BTV = logits_BTV[:, -tokens_BT.shape[1] :]  # a learned prompt stands before the tokens
    return functional.cross_entropy(
        logits_BTV.flatten(0, 1).float(),
        targets_BT.flatten(),
        ignore_index=PADDING,
        reduction="sum",
    )


def hidden_and_head(model: nn.Module, tokens_BT: Tensor) -> tuple[Tensor, nn.Linear]:
    """Return the last hidden state [B, T, D], and the layer that makes logits of it.

    No mask is needed: padding is on the right and attention is causal, so no real token sees it.

    Raises:
        ValueError: an adapter changes the last layer or the input: weight and hidden state are then
            without it, and it would train on no gradient.
    """
    whole, why = _plain(model), ""
    if isinstance(model, PeftModel):
        if model.active_peft_config.is_prompt_learning:
            raise ValueError(
                f"a learned prompt or prefix is no part of the last hidden state: {OWN_LOGITS}"
            )
        why = (
            ", whose weight leaves the adapter out: take the last layer out of target_modules "
            "(modules_to_save trains it whole), or"
        )
    head = whole.get_output_embeddings()
    if not isinstance(head, (nn.Linear, ModulesToSaveWrapper)):
        raise ValueError(
            f"expected nn.Linear as the last layer, found {type(head).__name__} of "
            f"{type(head).__module__}{why or ':'} {OWN_LOGITS}"
        )
    body = getattr(whole, whole.base_model_prefix)
    hidden_BTD = body(input_ids=tokens_BT, use_cache=False).last_hidden_state
    return hidden_BTD, cast(nn.Linear, head)


def scale_and_cap(model: nn.Module) -> tuple[float, float | None]:
    """Return what the last layer's output is multiplied by, and the soft cap of the result.

    Granite divides by ``logits_scaling``, Cohere multiplies by ``logit_scale``, and Gemma 2 has the
    cap ``final_logit_softcapping``. ``check_logits`` compares with what the model does.
    """
    config = _plain(model).config.get_text_config()
    scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    return scale, getattr(config, "final_logit_softcapping", None)


def check_logits(model: Any) -> None:
    """Check that ``loss_of_head`` computes the model's own logits.

    What the model makes of the last layer's output is compared on numbers of -1,000 to 1,000: a cap
    of 30 hardly changes the small logits of a new model.

    Raises:
        ValueError: it makes something else, so that the loss would be another model's; or a weight
            is not finite.
    """
    found: list[Tensor] = []

    def numbers_instead(head: Any, given: tuple[Tensor, ...], logits_1TV: Tensor) -> Tensor:
        found.extend([given[0], torch.linspace(-1000, 1000, logits_1TV.shape[-1])])
        return found[1].expand(logits_1TV.shape)

    was_training = model.training
    model.eval()
    with torch.no_grad():
        tokens_1T = torch.arange(4)[None]
        hidden, head = hidden_and_head(model, tokens_1T)
        hook = head.register_forward_hook(numbers_instead)
        logits = model(input_ids=tokens_1T, use_cache=False).logits
        hook.remove()
    model.train(was_training)
    if not torch.isfinite(hidden).all():
        spoiled = [name for name, one in model.named_parameters() if not one.isfinite().all()]
        raise ValueError(
            f"{type(model).__name__} has weights that are not finite: {', '.join(spoiled[:3])}"
            if spoiled
            else f"{type(model).__name__} gives no finite numbers, with weights that are finite"
        )
    scale, cap = scale_and_cap(model)
    expected = found[1] * scale if cap is None else cap * torch.tanh(found[1] * scale / cap)
    is_same = torch.equal(found[0], hidden) and torch.allclose(expected, logits.float(), rtol=1e-5)
    if not is_same:
        raise ValueError(
            f"{type(model).__name__} changes its logits after the last layer: {OWN_LOGITS}"
        )


def _plain(model: nn.Module) -> Any:
    """Return the model of transformers, with its adapters where it has some."""
    return model.get_base_model() if isinstance(model, PeftModel) else model
