"""The checkpoint: one file, replaced as a whole after each committed round.

It holds the trained parameters, the optimizer's state, the scales of the cohort sum, for each
client the last round that included its update and its estimate, and an entry of each feature that
is on. The frozen part of the model does not change: it has a file of its own, written once, and the
checkpoint has its digest. The new checkpoint is written next to the old one, flushed to disk and
renamed over it, so that there is a complete one at every instant.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headwater.common.errors import (
    CheckpointCorrupt,
    CheckpointFailed,
    FrozenPartMismatch,
    system_remedy,
)
from headwater.common.model import frozen_part
from headwater.common.model.parameters import ModelImage
from headwater.common.model.tensor_file import write_tensors
from headwater.common.model.trained_model import CHECKPOINT_KEY
from headwater.common.parsed_text import json_of
from headwater.common.system.atomic_file import atomic_writer
from headwater.common.wording import bytes_text

FILE = "checkpoint.safetensors"
FROZEN = "frozen.safetensors"
VERSION = 3
READ_VERSIONS = ("2", "3")
IMAGE = "image"
OPTIMIZER = "optimizer."
FEATURE = "feature."


Number = Annotated[int, Field(ge=0, lt=2**64)]
Size = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What a checkpoint holds."""

    progress: Progress
    image_U8: Tensor
    optimizer: dict[str, Tensor]
    features: dict[str, dict[str, Tensor]]
    """By feature the tensors that it stores, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A run's state other than its tensors; the names are the keys in the file."""

    run_id: Number
    round: Number
    layout_digest: str
    optimizer: str
    largest: list[Size] | None
    counted: dict[str, Number]
    layout: str = ""
    largest_median_norm: Size | None = None
    asked: dict[str, Any] = field(default_factory=dict)
    learned: dict[str, dict[str, Any]] = field(default_factory=dict)
    target: dict[str, float] = field(default_factory=dict)
    held_back: dict[str, Any] = field(default_factory=dict)
    """The clients that sit out some rounds, and why (``planning.exclusions``)."""
    simulated: dict[str, Any] = field(default_factory=dict)
    features: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By feature what it stores in addition to its tensors (``RunFeature.to_json``)."""
    frozen_digest: str = ""
    """Of the frozen part of the model, which is not in the file but beside it, once."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Those of the round (``common.settings.changes``); none in a file of an earlier version."""


def corrupt(folder: Path, error: Exception) -> CheckpointCorrupt:
    """Return the error that says that a field of the checkpoint in ``folder`` cannot be used."""
    return CheckpointCorrupt(
        f"{folder / FILE} has a field that cannot be used: {type(error).__name__}: {error}"
    )


def save(
    folder: Path,
    progress: Progress,
    *,
    image_U8: Tensor,
    optimizer: Mapping[str, Tensor],
    features: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({}),
) -> None:
    """Replace the checkpoint in ``folder``; ``features`` are their tensors, by feature and name.

    Raises:
        CheckpointFailed: the disk is full or not writable; the old checkpoint is untouched.
    """
    tensors = {IMAGE: image_U8, **{OPTIMIZER + name: t for name, t in optimizer.items()}}
    for feature, stored in features.items():
        tensors |= {f"{FEATURE}{feature}.{name}": tensor for name, tensor in stored.items()}
    # Not by ``asdict``, which would copy the estimates of all clients.
    plain = json.dumps({one.name: getattr(progress, one.name) for one in fields(progress)})
    metadata = {
        "version": str(VERSION),
        CHECKPOINT_KEY: plain,
        "sha256": digest(f"{VERSION} {plain}", tensors),
    }
    try:
        with atomic_writer(folder / FILE) as part:
            write_tensors(part, tensors, metadata)
    except (OSError, ValueError) as error:
        raise _failed(f"round {progress.round} could not be saved in {folder}: {error}") from error


SPARE_BYTES = 64 << 10
"""What else a round writes into the folder, at least."""


def check_space(folder: Path, *, num_parameters: int) -> None:
    """Check that the next checkpoint has room beside the last one, before a round begins.

    For rounds that a run cannot repeat without a loss.

    Raises:
        CheckpointFailed: it has none.
    """
    try:
        needed, free = 4 * num_parameters, shutil.disk_usage(folder).free
        if (folder / FILE).exists():
            needed = (folder / FILE).stat().st_size
    except OSError:  # the checkpoint says what is wrong with the folder
        return
    if free < needed + SPARE_BYTES:
        raise _failed(
            f"the next round is not begun: its checkpoint takes {bytes_text(needed)}, and "
            f"{bytes_text(free)} are free in {folder} (No space left on device)"
        )


def _failed(message: str) -> CheckpointFailed:
    cause = system_remedy(message) or "free space under --out"
    remedy = f"{cause}; then go on with --resume: the last committed round is kept"
    return CheckpointFailed(message, remedy=remedy)


def load(folder: Path) -> Saved | None:
    """Return what the folder's checkpoint holds, or None if there is none.

    Raises:
        CheckpointCorrupt: the file is incomplete or damaged.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        version = metadata.get("version")
        if version not in READ_VERSIONS:
            raise CheckpointCorrupt(
                f"{path} has version {version}, and this version of headwater reads "
                f"{' and '.join(READ_VERSIONS)}"
            )
        plain = metadata[CHECKPOINT_KEY]
        checked = plain if version == "2" else f"{version} {plain}"
        if metadata["sha256"] != digest(checked, tensors):
            raise CheckpointCorrupt(f"{path}: the SHA-256 of its content is not the stored one")
        row = json_of(plain)
        if version == "2":
            _bring_up_to_date(row, tensors)
        # Whoever sends a checkpoint may have computed its digest.
        progress = TypeAdapter(Progress).validate_json(json.dumps(row), strict=True)
        image_U8 = tensors.pop(IMAGE)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error
    optimizer: dict[str, Tensor] = {}
    features: dict[str, dict[str, Tensor]] = {name: {} for name in progress.features}
    for name, tensor in tensors.items():
        if name.startswith(FEATURE):
            feature, _, at = name.removeprefix(FEATURE).partition(".")
            features.setdefault(feature, {})[at] = tensor
        else:
            optimizer[name.removeprefix(OPTIMIZER)] = tensor
    return Saved(progress=progress, image_U8=image_U8, optimizer=optimizer, features=features)


def _bring_up_to_date(row: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Rename, in place, what stands elsewhere in a checkpoint of version 2."""
    secure, version = row.pop("secure", {}), row.pop("broadcast_version", None)
    row["held_back"] = secure.pop("culprits", {})
    features = {"secagg": secure} | {name: row.pop(name, {}) for name in ("privacy", "selection")}
    if "broadcast" in tensors:
        features["compression"] = {"version": version}
        tensors[f"{FEATURE}compression.held"] = tensors.pop("broadcast")
    row["features"] = {name: state for name, state in features.items() if state}


def keep_frozen(folder: Path, image: ModelImage) -> None:
    """Write the model's frozen part beside the checkpoint, unless it is there.

    Raises:
        CheckpointFailed: the disk is full or not writable.
    """
    path = folder / FROZEN
    if not image.layout.num_frozen_bytes or _digest_in(path, image) == image.frozen_digest:
        return
    try:
        with atomic_writer(path) as part:
            frozen_part.write(part, image.layout, image.frozen_U8)
    except (OSError, ValueError) as error:
        text = f"the model's frozen part could not be saved in {folder}: {error}"
        raise _failed(text) from error


def check_frozen(folder: Path, image: ModelImage, progress: Progress) -> None:
    """Check that the task's model has the frozen part that the run was trained on.

    Raises:
        FrozenPartMismatch: it has another one; names the first tensor that differs, if known.
    """
    if progress.frozen_digest == image.frozen_digest:
        return
    where = ""
    if _digest_in(folder / FROZEN, image) == progress.frozen_digest and image.fingerprint:
        saved_U8 = frozen_part.read(folder / FROZEN, image.layout)
        name = frozen_part.first_change(image.layout, saved_U8, image.fingerprint)
        where = "" if name is None else f": {name} differs"
    raise FrozenPartMismatch(
        f"the run in {folder} was trained on the frozen part {progress.frozen_digest:.12}, and "
        f"the task's model has {image.frozen_digest:.12}{where}",
        remedy=f"give the task the weights that the run was started with: {folder / FROZEN} has "
        "them by name",
    )


def _digest_in(path: Path, image: ModelImage) -> str | None:
    """Return the digest of the frozen part in a file; None if it cannot be read."""
    try:
        return frozen_part.fingerprint_of(image.layout, frozen_part.read(path, image.layout)).digest
    except (OSError, ValueError):
        return None


def run_position(folder: Path | None, *, resume: bool) -> tuple[int, int]:
    """Return the resumed run's id, by which devices recognise it, and its last round.

    A new run has a random id and round 0.

    Raises:
        CheckpointCorrupt: the file is incomplete or damaged.
    """
    if resume and folder is not None:
        loaded = load(folder)
        if loaded is not None:
            return loaded.progress.run_id, loaded.progress.round
    return secrets.randbits(62), 0


def saved_round(folder: Path) -> int | None:
    """Return the round of a folder's checkpoint, from its metadata; None if it cannot be read."""
    try:
        with safe_open(folder / FILE, framework="pt") as file:
            return int(json_of((file.metadata() or {})[CHECKPOINT_KEY])["round"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def digest(plain: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over the plain part and every tensor, read in place.

    safetensors has no checksum of its own: a bit that flips on the disk would go unnoticed.
    """
    sha = hashlib.sha256(plain.encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        sha.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
