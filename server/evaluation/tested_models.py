"""The models of a test: a run's folder, a checkpoint, or a file of weights, loaded one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from headwater.common.errors import FrozenPartMismatch, SettingsError
from headwater.common.model.layout import ModelLayout
from headwater.common.model.mismatch import mismatch_error
from headwater.common.model.parameters import ModelImage
from headwater.common.model.trained_model import MODEL, model_file, read_record
from headwater.common.model.vectors import all_finite
from headwater.server.rounds import checkpoint
from headwater.server.rounds.initial_model import SHARDS, load_initial


@dataclass(frozen=True, kw_only=True, slots=True)
class TestedModel:
    """A model as devices are sent it (``SentModel``), and where it came from."""

    __test__ = False  # pytest, it is no test

    path: Path
    round: int | None
    """The rounds that it was trained for; None if its file does not say."""
    layout: ModelLayout
    digest: bytes
    frozen_digest: str
    values_P: Tensor = field(repr=False)

    def difference_from(self, held_id: str) -> None:
        """Return None: it is sent whole."""

    def buffer(self) -> memoryview:
        """Return the memory of the trainable parameters."""
        return self.values_P.view(torch.uint8).numpy().data


def load_tested(image: ModelImage, path: Path) -> TestedModel:
    """Load a model into ``image``, and return it; of a run's folder, its model or its checkpoint.

    Raises:
        SettingsError: there is no model, it cannot be read, or it was trained with statistics.
        ModelMismatch, FrozenPartMismatch: it is not of the task's model.
        CheckpointCorrupt: a checkpoint cannot be read.
    """
    folder = _folder_of_checkpoint(path)
    if folder is None:
        found, round_number = model_file(path), None
        if found.suffix == ".safetensors" and found.is_file():
            record = read_record(found)
            _check_statistics(found, bool(record.statistics))
            round_number = record.rounds
        load_initial(image, path)
    else:
        found, round_number = folder / checkpoint.FILE, _load_checkpoint(image, folder)
    return TestedModel(
        path=found,
        round=round_number,
        layout=image.layout,
        digest=image.digest,
        frozen_digest=image.frozen_digest,
        values_P=image.values_P.clone(),
    )


def check_same_frozen(model: TestedModel, other: TestedModel) -> None:
    """Check that two models differ in what is trained alone.

    Raises:
        FrozenPartMismatch: they do not.
    """
    if model.frozen_digest != other.frozen_digest:
        raise FrozenPartMismatch(
            f"{model.path} and {other.path} have unlike frozen parts, and devices hold one",
            remedy="test the two models one after the other",
        )


def _folder_of_checkpoint(path: Path) -> Path | None:
    """Return the folder of a run whose checkpoint is meant; None if a model is."""
    if path.name == checkpoint.FILE and path.is_file():
        return path.parent
    has_model = any((path / name).exists() for name in (MODEL, SHARDS))
    is_run = path.is_dir() and (path / checkpoint.FILE).exists()
    return path if is_run and not has_model else None


def _load_checkpoint(image: ModelImage, folder: Path) -> int:
    saved = checkpoint.load(folder)
    assert saved is not None  # the caller has seen it
    progress = saved.progress
    if progress.layout_digest != image.layout.digest:
        raise mismatch_error(
            f"the checkpoint in {folder} belongs to another model",
            image.layout.rows,
            progress.layout,
            here="the task's model",
            there="the checkpoint",
            remedy="name the task that the run was started with",
        )
    checkpoint.check_frozen(folder, image, progress)
    _check_statistics(folder, bool(progress.features.get("statistics")))
    image.bytes_U8.copy_(saved.image_U8)
    if not all_finite(image.values_P):
        raise SettingsError(
            f"the checkpoint in {folder} has values that are NaN or infinite",
            remedy="test an earlier model",
        )
    return progress.round


def _check_statistics(path: Path, has_statistics: bool) -> None:
    if has_statistics:
        raise SettingsError(
            f"{path} was trained with statistics of its run's examples, which a test does not send",
            remedy="test it on examples of this machine, headwater-server evaluate --data PATH, or "
            "in its run with --evaluate-on-devices",
        )
