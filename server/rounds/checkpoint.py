"""The checkpoint: one file, replaced whole after each committed round.

It holds the image, the optimizer's state, the scales of the sum, what each device last had counted
and what was learned of it. It is written beside the old one, forced to disk and renamed over it, so
that at every instant one whole checkpoint is there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headwater.common.errors import CheckpointCorrupt, CheckpointFailed
from headwater.common.model.tensor_file import write_tensors
from headwater.common.system.atomic_file import atomic_writer

FILE = "checkpoint.safetensors"
VERSION = 2
IMAGE = "image"
OPTIMIZER = "optimizer."


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a run stands, beside its tensors."""

    run_id: int
    round: int
    layout_digest: str
    optimizer: str
    largest: list[float] | None
    counted: dict[str, int]
    asked: dict[str, Any] = field(default_factory=dict)
    learned: dict[str, dict[str, Any]] = field(default_factory=dict)
    target: dict[str, float] = field(default_factory=dict)
    secure: dict[str, Any] = field(default_factory=dict)
    simulated: dict[str, Any] = field(default_factory=dict)


def save(
    folder: Path, progress: Progress, *, image_U8: Tensor, optimizer: Mapping[str, Tensor]
) -> None:
    """Replace the checkpoint in ``folder``.

    Raises:
        CheckpointFailed: the disk is full or not writable; the old checkpoint is untouched.
    """
    tensors = {IMAGE: image_U8, **{OPTIMIZER + name: t for name, t in optimizer.items()}}
    # By hand: ``asdict`` would copy what is kept of every device.
    told = json.dumps({one.name: getattr(progress, one.name) for one in fields(progress)})
    metadata = {"version": str(VERSION), "progress": told, "sha256": digest(told, tensors)}
    try:
        with atomic_writer(folder / FILE) as part:
            write_tensors(part, tensors, metadata)
    except (OSError, ValueError) as error:
        raise CheckpointFailed(
            f"round {progress.round} could not be saved in {folder}: {error}"
        ) from error


def load(folder: Path) -> tuple[Progress, Tensor, dict[str, Tensor]] | None:
    """Return progress, image and optimizer tensors, or None if there is no checkpoint.

    Raises:
        CheckpointCorrupt: there is one, but it cannot be read back whole.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("version") != str(VERSION):
            raise CheckpointCorrupt(
                f"{path} is of version {metadata.get('version')}, not {VERSION}"
            )
        if metadata["sha256"] != digest(metadata["progress"], tensors):
            raise CheckpointCorrupt(f"{path}: the SHA-256 of its content is not the one it bears")
        progress = Progress(**json.loads(metadata["progress"]))
        image_U8 = tensors.pop(IMAGE)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error
    return progress, image_U8, {n.removeprefix(OPTIMIZER): t for n, t in tensors.items()}


def digest(told: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over the plain part and every tensor, read where it lies.

    safetensors has no checksum of its own: without this a disk's flipped bit would train on.
    """
    sha = hashlib.sha256(told.encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        sha.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
