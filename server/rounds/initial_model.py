"""Loads the weights that a run starts from: of a run, of plain PyTorch, or of another library.

A file that torch has pickled is opened with ``weights_only=True``: no code in it is run. Its names
may have what a library puts before them (``module.``, ``model.``), or lack it.
"""

from __future__ import annotations

import logging
import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.common.errors import SettingsError
from headwater.common.model.parameters import ModelImage
from headwater.common.model.tensor_file import tensors_of, with_wrappers
from headwater.common.model.trained_model import (
    MODEL,
    ModelRecord,
    load_state,
    model_file,
    read_model,
    with_base,
)
from headwater.common.model.vectors import all_finite
from headwater.common.parsed_text import json_of
from headwater.common.wording import counted

log = logging.getLogger(__name__)

SHARDS = f"{MODEL}.index.json"  # as ``save_pretrained`` writes it, beside the shards
PICKLED = (".pt", ".pth", ".ckpt", ".bin")
STATES = ("state_dict", "model_state_dict", "model", "module", "net", "weights")
"""The keys under which checkpoints of training scripts and of Lightning have the model's state."""
HOW_TO_SAVE = "save its weights alone: torch.save(model.state_dict(), 'start.pt')"


def load_initial(image: ModelImage, path: Path, *, measures: bool = False) -> None:
    """Overwrite the model with the weights of a file or a folder.

    ``measures``: whether the run gives its task statistics of its own.

    ==============================  ==============================================================
    a run's folder, .safetensors    the names of the model's state_dict, or an adapter's
    .pt, .pth, .ckpt, .bin          a state_dict, or a dictionary that has one, as Lightning writes
    a folder of save_pretrained     model.safetensors or its shards; tied weights are there once
    ==============================  ==============================================================

    Parameters that stay on the devices begin as the task builds them: the file may have them or
    not.

    Raises:
        SettingsError: the file cannot be read, holds no weights, or holds some that are not finite.
        ModelMismatch: names or shapes differ.
        FrozenPartMismatch: the file is an adapter to another frozen part.
    """
    file, record, read = _read(path)
    if record.statistics is not None and not measures:
        raise SettingsError(
            f"{file} was trained with statistics of its run's examples, which its task needs",
            remedy="add --statistics: the run then measures its own examples first",
        )
    _check_finite(file, read)
    own = tensors_of(image.model)
    tensors = with_wrappers(image.model, read)
    if record.base_digest is not None:
        tensors = dict(with_base(image.model, record, tensors, file, image.local_parameters))
    elif record.headwater is None:
        tensors = _with_tied(_renamed(tensors, own, file), own)
    local = {name: value for name, value in own.items() if name in image.local_names}
    load_state(image.model, {**tensors, **local}, file)
    image.fingerprint = None


def _read(path: Path) -> tuple[Path, ModelRecord, dict[str, Tensor]]:
    """Return the file that was found, its record, and its tensors by name."""
    shards = path / SHARDS if path.is_dir() else path
    if shards.name.endswith(".index.json") and shards.is_file():
        return shards, ModelRecord(), _read_shards(shards)
    file = model_file(path)
    if path.is_dir() and not file.exists():
        pickled = [one for one in sorted(path.iterdir()) if one.suffix in PICKLED]
        file = pickled[0] if len(pickled) == 1 else file
    if file.suffix in PICKLED and file.is_file():
        return file, ModelRecord(), _state_in(_unpickled(file), file)
    return file, *read_model(file)


def _read_shards(index: Path) -> dict[str, Tensor]:
    try:
        files = set(json_of(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(
            f"{index} is no index of a model's shards: {type(error).__name__}: {error}",
            remedy="copy the folder of save_pretrained again",
        ) from error
    tensors: dict[str, Tensor] = {}
    for name in sorted(files):
        tensors |= read_model(index.parent / Path(str(name)).name)[1]
    return tensors


def _unpickled(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None and not zipfile.is_zipfile(file):
            raise _unreadable(file, "torch did not write it") from error
        raise SettingsError(
            f"{file} holds more than weights, whose code is not run"
            f"{f': {named[1]}' if named else ''}",
            remedy=f"open it where you trust it, and {HOW_TO_SAVE}",
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise _unreadable(file, next(iter(str(error).splitlines()), "it is cut")) from error


def _unreadable(file: Path, why: str) -> SettingsError:
    return SettingsError(
        f"the model {file} cannot be read: {why}",
        remedy="copy it again: it is incomplete, or torch did not write it",
    )


def _state_in(found: Any, file: Path) -> dict[str, Tensor]:
    """Return the tensors of a state_dict, or of one within a checkpoint."""
    for _ in range(2):  # a checkpoint, and its state
        if not isinstance(found, Mapping):
            break
        tensors = {str(name): one for name, one in found.items() if isinstance(one, Tensor)}
        key = next((key for key in STATES if isinstance(found.get(key), Mapping)), None)
        if key is None:
            if tensors:
                return tensors
            break
        found = found[key]
    keys = f", but {', '.join(map(str, list(found)[:5]))}" if isinstance(found, Mapping) else ""
    raise SettingsError(f"{file} has no weights by name{keys}", remedy=HOW_TO_SAVE)


def _renamed(
    tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], file: Path
) -> dict[str, Tensor]:
    """Return a file's tensors by the model's names, if all differ by what stands before them."""
    if not tensors or own.keys() & tensors.keys():
        return dict(tensors)
    prefix = _prefix(_untied(own), tensors)
    if prefix is not None:  # the file has more before each name
        left = [name for name in tensors if not name.startswith(prefix)]
        if left:
            log.warning(
                "%s: %s not of the model (%s...) and left out, among them %s",
                *(file, f"{counted(len(left), 'tensor')} {'is' if len(left) == 1 else 'are'}"),
                *(prefix, left[0]),
            )
        return {
            name.removeprefix(prefix): one
            for name, one in tensors.items()
            if name.startswith(prefix)
        }
    prefix = _prefix(tensors, own) or ""
    return {prefix + name: one for name, one in tensors.items()}


def _untied(own: Mapping[str, Tensor]) -> list[str]:
    """Return the names whose memory no other name has, which any file of the model holds."""
    number = Counter(_memory(one) for one in own.values())
    return [name for name, one in own.items() if number[_memory(one)] == 1] or list(own)


def _prefix(shorter: Iterable[str], longer: Iterable[str]) -> str | None:
    """Return what stands before every name of ``shorter`` in ``longer``, or None."""
    names, found = set(longer), list(shorter)
    for name in sorted(names):
        prefix = name.removesuffix(found[0])
        if name != prefix and prefix.endswith(".") and all(prefix + one in names for one in found):
            return prefix
    return None


def _with_tied(tensors: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the other names of tied weights, which ``save_pretrained`` writes once."""
    by_memory = {_memory(own[name]): one for name, one in tensors.items() if name in own}
    tied = {
        name: by_memory[_memory(one)]
        for name, one in own.items()
        if name not in tensors and _memory(one) in by_memory
    }
    return tensors | tied


def _memory(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _check_finite(file: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not all_finite(tensor.float()):
            raise SettingsError(
                f"{file}: {name} has values that are NaN or infinite, so that no round could "
                "change the model",
                remedy="start from an earlier checkpoint of that training, from before it diverged",
            )
