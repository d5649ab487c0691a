"""The model that fine-tuning starts from: a run's file, with what stayed on this device in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path

from torch import nn

from headwater.client.memory.model_room import built_within
from headwater.client.memory.process_limits import MemoryLimit
from headwater.common.errors import LocalParametersMissing, ModelMismatch, StateError
from headwater.common.model.batch_norm import freeze_statistics, refuse_batch_dependent
from headwater.common.model.local_state import device_tensors
from headwater.common.model.trained_model import (
    ModelRecord,
    load_module,
    model_file,
    read_model,
    task_of,
)
from headwater.common.system.heap import restore_mmap_threshold
from headwater.common.task import Task, tell_round


@dataclass(frozen=True, kw_only=True, slots=True)
class StartModel:
    """A released model, its task, and what the file says of its run."""

    file: Path
    record: ModelRecord
    task: Task
    module: nn.Module
    local: Path | None
    """The file with the parameters that stayed on this device; None if none did."""


def start_model(
    path: Path,
    task: Task | str | Path | None,
    *,
    local: Path | None,
    states: Path,
    name: str,
    limit: Callable[[], MemoryLimit],
) -> StartModel:
    """Load a released model; normalisation that has running statistics keeps them.

    After a run with parameters of the device's own, these are taken from ``local``, or from the
    one file in the folder ``states`` that the device ``name`` wrote in such a run.

    Raises:
        OutOfMemory: ``limit`` has no room for the model and its gradient.
        BatchDependentLayer: a layer mixes the examples of a batch, and has no statistics.
        HeadwaterError: see ``load_module`` and ``task_of``.
    """
    file = model_file(path)
    record, state = read_model(file)
    chosen = task_of(task, record, file)
    if record.local_parameters is not None and local is None:
        local = own_file(states, name, record)
    load = partial(load_module, chosen, record, state, file, local=local)
    module = built_within(limit, load)
    restore_mmap_threshold()
    freeze_statistics(module)
    refuse_batch_dependent(module)
    tell_round(chosen, record.rounds or 1)
    return StartModel(file=file, record=record, task=chosen, module=module, local=local)


def own_file(states: Path, name: str, record: ModelRecord) -> Path:
    """Return the file in which a device kept its own parameters in runs of this model.

    Raises:
        LocalParametersMissing: the folder has none of this name and model, or several.
    """
    found = []
    for path in sorted(states.glob(f"{escape(name)}-*.local.safetensors")):
        try:
            device_tensors(path, layout_digest=record.layout_digest, rounds=record.rounds)
        except (ModelMismatch, StateError):
            continue
        found.append(path)
    if len(found) == 1:
        return found[0]
    which = f"{record.local_parameters} stayed on the devices, and {states} has"
    if not found:
        raise LocalParametersMissing(
            f"{which} no file of the device {name} that fits the model",
            remedy="name the device as in the run with --name, its folder with --state, or the "
            "file with --local FILE",
        )
    raise LocalParametersMissing(
        f"{which} {len(found)} files of the device {name} that fit the model: "
        f"{', '.join(path.name for path in found)}",
        remedy="name that of the run with --local FILE",
    )
