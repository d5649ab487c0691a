"""Adapter files: the parameters that were trained, without the frozen part that they belong to.

Beside the whole model a run writes ``adapter.safetensors``, if some parameters were frozen: with
low-rank adapters (Hu et al. 2021, LoRA) it is a hundredth of the model. Its metadata is that of a
model file, and the digest of the frozen part, without which the parameters mean nothing. Whoever
loads the file takes the frozen part from the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from headwater.common.errors import FrozenPartMismatch, ModelMismatch
from headwater.common.model.frozen_part import digest_of
from headwater.common.model.layout import layout_of
from headwater.common.model.local_parameters import by_all_names, local_names
from headwater.common.model.tensor_file import tensors_of


def with_base(
    model: nn.Module,
    trained: Mapping[str, Tensor],
    file: Path,
    *,
    base_digest: str,
    local_parameters: str | None = None,
) -> dict[str, Tensor]:
    """Return a model's whole state with the parameters of an adapter file in it.

    Raises:
        ModelMismatch: other parameters train in the model than the file has.
        FrozenPartMismatch: the model's frozen part is not the one that the file was trained on.
    """
    layout = layout_of(model, local_names(model, local_parameters))
    if other := sorted({slot.name for slot in layout.trainable} ^ trained.keys()):
        where = "is not in the file" if other[0] not in trained else "does not train in the model"
        raise ModelMismatch(
            f"the adapter {file} does not fit the task's model: {other[0]} {where}",
            remedy="name the task that it was trained with",
        )
    if (found := digest_of(layout, model)) != base_digest:
        raise FrozenPartMismatch(
            f"the adapter {file} was trained on the frozen part {base_digest:.12}, and the task's "
            f"model has {found:.12}",
            remedy="give the task the weights that the run was started with; or load the whole "
            "model of the run, model.safetensors",
        )
    return {**tensors_of(model), **by_all_names(model, trained)}
