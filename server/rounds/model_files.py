"""Writes a run's models: model.safetensors when the run ends, best.safetensors at its best round.

If some parameters are frozen, adapter.safetensors has the trained ones alone, at the run's end.

Each is a plain safetensors file with the record of the run as metadata. The record holds no time
and no run id, so that equal runs give equal bytes, simulated or over a network. As the file is made
to be handed on, the record holds no address, no secret, and no path but those that name code: the
task, an optimizer and a client algorithm are recorded as the user gave them. A task that is a
Python object has no name by which it could be loaded, and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater import __version__
from headwater.common.errors import StateError
from headwater.common.model.parameters import ModelImage, state_dict
from headwater.common.model.tensor_file import without_wrappers, write_tensors
from headwater.common.model.trained_model import ADAPTER, ModelRecord
from headwater.common.settings.schema import Settings
from headwater.common.system.atomic_file import atomic_writer
from headwater.common.user_code.named_objects import part_of
from headwater.common.user_code.run_scope import PREFIX
from headwater.common.user_code.task_spec import bundle_folder

# The settings by which a server gets this model and no other, on every way of running.
RECORDED: dict[str, Any] = {
    **dict.fromkeys(("seed", "optimizer", "schedule", "plan", "local", "algorithm", "model"), True),
    **dict.fromkeys(("compression", "asynchronous"), True),
    "cohort": {"size", "weighting"},
    "secure": {"aggregation", "ring_bits"},
    "evaluation": {"on_devices", "held_out_fraction", "held_out"},
}


def save_model(
    file: Path,
    image: ModelImage,
    settings: Settings,
    *,
    round_number: int,
    best: dict[str, Any] | None = None,
) -> None:
    """Replace a file by the model after a committed round; ``best`` is recorded if it is given.

    Raises:
        StateError: the disk is full or not writable; the old file is untouched.
    """
    record = _record(image, settings, round_number=round_number, best=best)
    _write(file, state_dict(image), record)


def save_adapter(folder: Path, image: ModelImage, settings: Settings, *, round_number: int) -> None:
    """Write the trained parameters alone, for a model of which a part is frozen.

    Raises:
        StateError: the disk is full or not writable; the old file is untouched.
    """
    record = _record(image, settings, round_number=round_number)
    names = without_wrappers(image.model, (slot.name for slot in image.layout.trainable))
    trained = {names[s.name]: s.view_of(image.bytes_U8) for s in image.layout.trainable}
    _write(folder / ADAPTER, trained, replace(record, base_digest=image.frozen_digest))


def _record(
    image: ModelImage,
    settings: Settings,
    *,
    round_number: int,
    best: dict[str, Any] | None = None,
) -> ModelRecord:
    task = settings.task
    if task is not None and not task.startswith(PREFIX) and bundle_folder(task) is not None:
        task = part_of("headwater.common.task_bundles.signed_bundle").bundle_of(task).file_name
    names = without_wrappers(image.model, image.replaced_layers)
    return ModelRecord(
        task=None if task is None or task.startswith(PREFIX) else task,
        settings=recorded_settings(settings),
        rounds=round_number,
        headwater=__version__,
        torch=str(torch.__version__),
        replaced_layers={names[name]: layer for name, layer in image.replaced_layers.items()},
        layout_digest=image.layout.digest,
        best=best,
        **image.recorded,
    )


def _write(file: Path, tensors: Mapping[str, Tensor], record: ModelRecord) -> None:
    try:
        with atomic_writer(file) as part:
            write_tensors(part, tensors, record.to_metadata())
    except Exception as error:
        raise StateError(
            f"the model {file} could not be saved: {error}",
            remedy="free space and go on with --resume: the checkpoint holds the model",
        ) from error


def recorded_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that shaped the training, without paths and those that are not set.

    The server optimizer has the name and rate that it has in the run, also if it was not named.
    An optimizer or a client algorithm of the user's own keeps its name, which may hold a path.
    """
    chosen = settings.model_copy(update={"optimizer": settings.server_optimizer})
    tree = chosen.model_dump(include=RECORDED, exclude_none=True)
    if not settings.evaluation.on_devices:  # no device held examples out
        del tree["evaluation"]
    return _without_paths(tree)


def _without_paths(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_paths(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if not isinstance(value, Path)
    }
