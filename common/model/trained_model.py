"""Reads a saved model: its tensors, and the record of the run that made it.

The file is a plain safetensors file: the state_dict by the model's own names, and the record as
metadata (``safetensors.safe_open(file, "pt").metadata()``). To read it runs no code of the file's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from headwater.common.errors import (
    LocalParametersMissing,
    ModelMismatch,
    SettingsError,
    UnknownTask,
    remedy_in_traceback,
)
from headwater.common.model.batch_norm import GroupNormArguments, replay
from headwater.common.model.bfloat16_weights import stored_frozen
from headwater.common.model.local_parameters import by_all_names, local_names
from headwater.common.model.local_state import device_tensors
from headwater.common.model.mismatch import first_difference, rows_of
from headwater.common.model.parameters import seeded
from headwater.common.model.tensor_file import load_tensors, tensors_of, with_wrappers
from headwater.common.parsed_text import json_of
from headwater.common.system.atomic_file import regular
from headwater.common.task import Task, built_model, load_task
from headwater.common.user_code.bundled_examples import expanded
from headwater.common.user_code.named_objects import part_of
from headwater.common.user_code.run_scope import forget_changed_modules
from headwater.common.user_code.task_spec import is_below
from headwater.common.wording import in_shell

MODEL = "model.safetensors"
BEST = "best.safetensors"
ADAPTER = "adapter.safetensors"
"""The parameters that were trained, of a model with a frozen part (``common.frozen.adapter``)."""
BASE_KEY = "base_digest"
"""The metadata that an adapter file has beyond those of a model file."""
CHECKPOINT_KEY = "progress"
"""The metadata of a checkpoint (``server.rounds.checkpoint``) that a model file does not have."""
_LAYERS = TypeAdapter(dict[str, GroupNormArguments])


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRecord:
    """The run that made a model, as the file's metadata tells it."""

    task: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings that shaped the training; no addresses or secrets, and no path but of code."""
    rounds: int | None = None
    headwater: str | None = None
    torch: str | None = None
    replaced_layers: dict[str, GroupNormArguments] = field(default_factory=dict)
    layout_digest: str | None = None
    best: dict[str, Any] | None = None
    """The metric, its value and its round, if the file holds the best round's model."""
    base_digest: str | None = None
    """Of the frozen part, if the file is an adapter: it has the trained parameters alone."""
    statistics: dict[str, Any] | None = None
    """What the run measured before training, which its task needs (``common.statistics``)."""

    @property
    def frozen_dtype(self) -> str | None:
        """The dtype of the run's frozen weights; None if it was the task's own."""
        dtype = self.settings.get("model", {}).get("frozen_dtype")
        return dtype if isinstance(dtype, str) else None

    @property
    def local_parameters(self) -> str | None:
        """The patterns of the parameters that stayed on the devices, and are not in the file."""
        patterns = self.settings.get("model", {}).get("local_parameters")
        return None if patterns is None else str(patterns)

    def to_metadata(self) -> dict[str, str]:
        """Return the record as safetensors metadata: texts, of which some hold JSON."""
        metadata = {
            "format": "pt",  # by which other libraries know the file as a state_dict of PyTorch
            "settings": json.dumps(self.settings),
            "replaced_layers": json.dumps(
                {name: asdict(layer) for name, layer in self.replaced_layers.items()}
            ),
        }
        optional = {
            "task": self.task,
            "rounds": self.rounds,
            "headwater": self.headwater,
            "torch": self.torch,
            "layout_digest": self.layout_digest,
            "best": json.dumps(self.best) if self.best is not None else None,
            BASE_KEY: self.base_digest,
            "statistics": json.dumps(self.statistics) if self.statistics is not None else None,
        }
        return metadata | {key: str(value) for key, value in optional.items() if value is not None}

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, str]) -> ModelRecord:
        """Read a record; that of an older file, or of another program, is empty.

        Raises:
            ValueError: a value is malformed.
        """
        if "headwater" not in metadata:
            return cls()
        best, rounds = metadata.get("best"), metadata.get("rounds")
        statistics = metadata.get("statistics")
        return cls(
            task=metadata.get("task"),
            settings=dict(json_of(metadata.get("settings", "{}"))),
            rounds=None if rounds is None else int(rounds),
            headwater=metadata.get("headwater"),
            torch=metadata.get("torch"),
            replaced_layers=_LAYERS.validate_json(metadata.get("replaced_layers", "{}")),
            layout_digest=metadata.get("layout_digest"),
            best=None if best is None else dict(json_of(best)),
            base_digest=metadata.get(BASE_KEY),
            statistics=None if statistics is None else dict(json_of(statistics)),
        )


@remedy_in_traceback()
def load_model(
    path: str | Path, task: Task | str | Path | None = None, *, local: str | Path | None = None
) -> nn.Module:
    """Return a trained model: the task's plain ``nn.Module``, in eval mode.

    Args:
        path: a run's folder, of which ``model.safetensors`` is read, or a file. With an adapter
            file, ``adapter.safetensors``, the rest of the model comes from the task.
        task: the task object, or its name as in ``--task``. Without it the file's own record names
            the task. As loading a task runs its code, the record is then believed only if it names
            an installed module or a file below the working folder.
        local: after a run with ``--local-parameters``: the file in which a device kept its own.

    The layers that ``--batch-norm group`` replaced are replaced again. The caller's random state
    is left as it was.

    Raises:
        SettingsError: the file is missing, incomplete or no safetensors file.
        UnknownTask: there is no such task, none is named, or the record names one elsewhere.
        TaskFailed: the task's ``new_model`` raised an exception.
        ModelMismatch: the task's model has other tensors; names the first one that differs.
        FrozenPartMismatch: an adapter was trained on another frozen part than the task builds.
        LocalParametersMissing: some parameters stayed on the devices, and ``local`` names no file.
        StateError: the file of a device cannot be read.
    """
    forget_changed_modules()
    file = model_file(Path(path))
    record, state = read_model(file)
    device_file = None if local is None else expanded(local)
    return load_module(task_of(task, record, file), record, state, file, local=device_file)


def load_module(
    task: Task,
    record: ModelRecord,
    state: Mapping[str, Tensor],
    file: Path,
    *,
    local: Path | None = None,
) -> nn.Module:
    """Return the task's model with the recorded layers and the tensors of a file, in eval mode.

    ``local`` is the file of a device with the parameters that stayed on it. The task is given the
    statistics that the model was trained with, if there are some.

    Raises:
        TaskError: the task measures other statistics than those of the file.
        TaskFailed: the task's ``new_model`` raised an exception.
        ModelMismatch: the task's model has other tensors; names the first one that differs.
        FrozenPartMismatch, LocalParametersMissing, StateError: see ``load_model``.
    """
    patterns = record.local_parameters
    if patterns is not None and local is None:
        raise LocalParametersMissing(
            f"{file} has no {patterns}: these parameters stayed on the devices, each of which has "
            "its own"
        )
    if patterns is None and local is not None:
        raise ModelMismatch(
            f"{file} has all parameters of its model, and {local} would replace some",
            remedy="leave out the device's file: no parameters stayed on the devices",
        )
    if record.statistics is not None:
        part_of("headwater.common.statistics.columns").give_recorded(task, record.statistics)
    with torch.random.fork_rng(devices=[]), seeded(int(record.settings.get("seed", 0))):
        model = built_model(task)
    state = with_wrappers(model, state)
    replay(model, record.replaced_layers)
    dtype = record.frozen_dtype if record.base_digest is not None else None
    with nullcontext() if dtype is None else stored_frozen(model, dtype):
        state = with_base(model, record, state, file, patterns)
    if local is not None:
        own = device_tensors(local, layout_digest=record.layout_digest, rounds=record.rounds)
        names = local_names(model, patterns)
        if own.keys() != {name for name, _ in model.named_parameters() if name in names}:
            raise ModelMismatch(f"{local} has {', '.join(own)}, and not what {patterns} names")
        state = {**state, **_built(model, names), **by_all_names(model, own)}
    load_state(model, state, file)
    return model.eval()


def model_file(path: Path) -> Path:
    """Return a folder's model.safetensors; a file is returned as it is."""
    return path / MODEL if path.is_dir() else path


def read_model(file: Path) -> tuple[ModelRecord, dict[str, Tensor]]:
    """Read a file's record and its tensors by name.

    Raises:
        SettingsError: the file is missing, incomplete or no safetensors file.
    """
    with _opened(file) as opened:
        metadata = opened.metadata() or {}
        if CHECKPOINT_KEY in metadata:
            raise _is_checkpoint(file)
        record = ModelRecord.of_metadata(metadata)
        return record, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _is_checkpoint(file: Path) -> SettingsError:
    """Return the error of a checkpoint in a model's place."""
    model = file.with_name(MODEL)
    return SettingsError(
        f"{file} is a run's checkpoint, which --resume reads, and no model",
        remedy=f"name the model beside it: {model}"
        if model.exists()
        else f"continue the run with --resume --out {in_shell(file.parent)}: it writes {MODEL} at "
        "its end, also if it is stopped",
    )


def read_record(file: Path) -> ModelRecord:
    """Read a file's record alone; raises as ``read_model``."""
    with _opened(file) as opened:
        return ModelRecord.of_metadata(opened.metadata() or {})


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(regular(file), framework="pt") as opened:
            yield opened
    except FileNotFoundError as error:
        raise SettingsError(
            f"there is no model at {file}", remedy="name a run's folder, or a .safetensors file"
        ) from error
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise SettingsError(
            f"the model {file} cannot be read: {error}",
            remedy="copy it again: it is incomplete, or no safetensors file",
        ) from error


def with_base(
    model: nn.Module,
    record: ModelRecord,
    state: Mapping[str, Tensor],
    file: Path,
    local_parameters: str | None,
) -> Mapping[str, Tensor]:
    """Return a file's tensors, with the model's own beside those of an adapter.

    Raises:
        ModelMismatch, FrozenPartMismatch: the adapter is not of this model.
    """
    base = record.base_digest
    if base is None:
        return state
    found: Mapping[str, Tensor] = part_of("headwater.common.frozen.adapter").with_base(
        model, state, file, base_digest=base, local_parameters=local_parameters
    )
    return found


def _built(model: nn.Module, names: Set[str]) -> dict[str, Tensor]:
    """Return the tensors of these names that a model has now."""
    return {name: value for name, value in tensors_of(model).items() if name in names}


def load_state(model: nn.Module, state: Mapping[str, Tensor], file: Path) -> None:
    """Load a file's tensors into a model.

    Raises:
        ModelMismatch: names or shapes differ.
    """
    try:
        load_tensors(model, state)
    except RuntimeError as error:
        difference = first_difference(rows_of(tensors_of(model)), rows_of(state), there="the file")
        raise ModelMismatch(
            f"{file} does not fit the task's model: {difference}",
            remedy="name the task that it was trained with; docs/model.md has more",
        ) from error


def task_of(task: Task | str | Path | None, record: ModelRecord, file: Path) -> Task:
    """Return a task as it is, load it by its name, or load the one that a file's record names.

    Raises:
        UnknownTask: there is no such task, none is named, or the record names one elsewhere.
        TaskError: see ``load_task``.
    """
    if task is not None:
        return named_task(str(task)) if isinstance(task, str | Path) else task
    if record.task is None:
        raise UnknownTask(
            f"{file} does not say which task built its model",
            remedy=f"name it: {_HOW}; or give the module itself",
        )
    if not is_below(record.task, Path.cwd()):
        raise UnknownTask(
            f"{file} names the task {record.task}, which is outside of the working folder: a file "
            "does not choose the code that is run",
            remedy=f"if it is your own, name it yourself: {_HOW}",
        )
    return named_task(record.task)


def lacks_statistics(task: Task) -> bool:
    """Return whether a task uses statistics, and was given none: its model may need them."""
    found: bool = part_of("headwater.common.statistics.columns").lacks_statistics(task)
    return found


def named_task(spec: str) -> Task:
    """Load a task by its name, also that of a signed bundle's file.

    Raises:
        UnknownTask, TaskError, TaskBundleRefused: see ``load_task`` and ``signed_bundle``.
    """
    if spec.endswith(".task"):
        spec = part_of("headwater.common.task_bundles.signed_bundle").opened_task(spec)
    return load_task(spec)


_HOW = "load_model(path, task='my_task.py:MyTask'), or --task"
