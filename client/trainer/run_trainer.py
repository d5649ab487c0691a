"""The trainer of a run's settings: the task's model, and the trials before the first round.

Every way of running takes its trainer from here: ``headwater-client``, the simulator's processes on
each engine, and SuperNodes. So the task's check and the trial of the client algorithm are one step,
on the first examples that a process opens, and ``check_task`` switches both off.
"""

from __future__ import annotations

from headwater.client.features import algorithm_of, trial_of
from headwater.client.memory.process_limits import MemoryLimits
from headwater.client.trainer.trainer import Trainer
from headwater.common.errors import SettingsError
from headwater.common.settings.schema import AlgorithmSettings, Settings
from headwater.common.user_code.run_scope import cached_in_scope


def run_trainer(settings: Settings) -> Trainer:
    """Return the run's trainer in this process, made at the first call.

    Raises:
        SettingsError: no task is set; or as ``algorithm_of``.
        HeadwaterError: the task cannot be loaded, see ``headwater.common.task.load_task``.
    """
    if settings.task is None:
        raise SettingsError("no task is set", remedy="name it with --task FILE.py:Class")
    return trainer_of(
        settings.task,
        settings.algorithm.model_dump_json(),
        batch_norm=settings.model.batch_norm,
        local_parameters=settings.model.local_parameters,
        frozen_dtype=settings.model.frozen_dtype,
        memory_limit_bytes=settings.client.memory_limit_bytes,
        check_task=settings.check_task,
        seed=settings.seed,
    )


@cached_in_scope()
def trainer_of(
    task: str,
    algorithm_json: str,
    *,
    batch_norm: str | None,
    local_parameters: str | None,
    frozen_dtype: str | None,
    memory_limit_bytes: int | None,
    check_task: bool,
    seed: int,
) -> Trainer:
    """Return the trainer of a task and an algorithm; settings as a whole are no key of a cache."""
    algorithm = algorithm_of(AlgorithmSettings.model_validate_json(algorithm_json))
    return Trainer(
        task,
        batch_norm=batch_norm,
        local_parameters=local_parameters,
        frozen_dtype=frozen_dtype,
        limits=MemoryLimits(memory_limit_bytes),
        check_task=check_task,
        seed=seed,
        trial=trial_of(algorithm),
    )
