"""The folder of an owner's model: one private file, which loads as a run's does.

``headwater.load_model`` takes it as it is: what stayed on the device is in the file. Its metadata
is that of the run, and under ``adaptation`` what was found.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from headwater.client.adaptation.start_model import StartModel
from headwater.common.errors import SettingsError, StateError
from headwater.common.model.tensor_file import tensors_of, without_wrappers, write_tensors
from headwater.common.model.trained_model import MODEL, ModelRecord
from headwater.common.system.atomic_file import OWNER_ONLY, atomic_writer, make_private_folder

KEY = "adaptation"
"""The metadata that only the file of an owner's model has."""


def prepare_folder(folder: Path, start: Path) -> None:
    """Make the folder of a model, or check that the one that is there may be written.

    Raises:
        SettingsError: it cannot be written, is in use for something else, or has the model that
            the fine-tuning starts from.
    """
    file = folder / MODEL
    if file.exists() and file.samefile(start):
        raise SettingsError(
            f"--out {folder} has the model that the fine-tuning starts from, which stays as it is",
            remedy="name another folder with --out",
        )
    try:
        make_private_folder(folder)
        others = [path.name for path in folder.iterdir() if path.name != f"{MODEL}.part"]
        if others and (others != [MODEL] or not _is_adapted(file)):
            raise SettingsError(
                f"--out {folder} is in use: {', '.join(sorted(others)[:3])} is in it, and nothing "
                "but a fine-tuned model is replaced",
                remedy="name a folder that is empty, or that is not there yet",
            )
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingsError(
            f"--out {folder} cannot be written: {error.strerror}",
            remedy="name a folder that this user may write",
        ) from error


def _is_adapted(file: Path) -> bool:
    try:
        with safe_open(file, framework="pt") as opened:
            return KEY in (opened.metadata() or {})
    except (OSError, SafetensorError):
        return False


def save_model(folder: Path, start: StartModel, model: nn.Module, found: Mapping[str, Any]) -> Path:
    """Replace the model of a folder; return its file, which only this user may read.

    Raises:
        StateError: the disk is full or not writable; the old file is untouched.
    """
    file = folder / MODEL
    metadata = _record(start.record).to_metadata() | {KEY: json.dumps(found, allow_nan=False)}
    try:
        with atomic_writer(file, mode=OWNER_ONLY) as part:
            write_tensors(part, _tensors(start.record, model), metadata)
    except (OSError, SafetensorError) as error:
        raise StateError(
            f"the model {file} could not be saved: {error}",
            remedy="free space, or name a folder on another disk with --out",
        ) from error
    return file


def _record(record: ModelRecord) -> ModelRecord:
    """Return the run's record without the parameters that stayed on devices: the file has them."""
    settings = dict(record.settings)
    if "model" in settings:
        settings["model"] = {
            key: value for key, value in settings["model"].items() if key != "local_parameters"
        }
    return replace(record, settings=settings, layout_digest=None, best=None)


def _tensors(record: ModelRecord, model: nn.Module) -> dict[str, Tensor]:
    """Return a model's tensors by their names in a file; of an adapter those that train."""
    tensors = tensors_of(model)
    if record.base_digest is not None:
        tensors = {name: one for name, one in model.named_parameters() if one.requires_grad}
    names = without_wrappers(model, tensors)
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        is_alias = tensor.numel() > 0 and tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        plain = tensor.detach()
        found[names[name]] = plain.clone() if is_alias else plain.contiguous()
    return found
