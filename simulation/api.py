"""``headwater.simulate``: many clients on this machine, from a notebook or a script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from headwater.client.local_training.local_work import ClientAlgorithm
from headwater.common.errors import SettingsError, remedy_in_traceback
from headwater.common.settings.keywords import Call, GivenSettings, api_function
from headwater.common.settings.schema import Settings
from headwater.common.system.caller_state import caller_state, one_run_at_a_time
from headwater.common.task import Task
from headwater.common.task_of_parts.metrics import Asked
from headwater.common.task_of_parts.task_of_parts import PARTS, TaskOfParts, task_of
from headwater.common.user_code.run_scope import MAIN_GUARD, PREFIX, run_scope
from headwater.server.aggregation.server_rule import ServerRule
from headwater.server.operations.progress import show_progress
from headwater.server.rounds.observer import Observers
from headwater.server.run_result import Run, RunRecorder
from headwater.server.tracking.user_observer import GivenObservers, user_observers
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.run import run_engine


@api_function
def simulate(
    task: Task | type[Task] | str | Path | None = None,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    examples: Any = None,
    loss: Any = None,
    test: Any = None,
    metrics: Asked = None,
    clients: int | None = None,
    data: str | Path | None = None,
    rounds: int | None = None,
    optimizer: str | type[torch.optim.Optimizer] | ServerRule | None = None,
    learning_rate: float | None = None,
    effective_batch_size: int | None = None,
    accumulation_steps: int | None = None,
    micro_batch_size: int | None = None,
    local_steps: int | None = None,
    local_learning_rate: float | None = None,
    client_algorithm: str | Path | ClientAlgorithm | type[ClientAlgorithm] | None = None,
    feature: str | Path | type | list[str | Path | type] | None = None,
    local_parameters: str | None = None,
    cohort_size: int | None = None,
    partition: str | None = None,
    fleet: str | Path | None = None,
    secure_aggregation: Literal["off", "semi-honest", "active"] | None = None,
    engine: Literal["in-process", "ray", "grpc", "flower-ray"] | None = None,
    seed: int | None = None,
    threads: int | None = None,
    out: str | Path | None = None,
    settings: GivenSettings = None,
    observer: GivenObservers = (),
    resume: bool = False,
    progress: bool = True,
    **flags: Any,
) -> Run:
    """Train a task on simulated clients, as ``headwater-simulate`` does, and return the run.

    Each keyword is the flag of that name (``learning_rate`` is ``--learning-rate``); what is not
    given has the flag's default. Torch's threads and random numbers, signal handlers, the log and
    the working folder are as before when this returns or raises. Ctrl-C raises KeyboardInterrupt;
    with ``out`` the committed rounds are kept there, and ``resume=True`` continues after them.

    Args:
        task: an object with a task's methods, its class, or ``FILE.py:Class`` as for ``--task``.
        model: of a task made of parts, in the place of ``task`` (``headwater.Task``): a function
            that builds it, or the module.
        examples: the data set, or arrays as in (X, y), dealt out to the clients; or a list of data
            sets, one for each.
        loss: one of torch's, as in ``nn.CrossEntropyLoss()`` or ``"cross_entropy"``.
        test: a data set to test on, or arrays.
        metrics: names, as in ``"accuracy"``, or functions by name.
        clients: number of simulated clients.
        data: one file or folder a client, as in ``devices/*.csv``; not given: parts of the task's.
        rounds: server steps to take.
        optimizer: class of torch.optim by its name; or your own class, or server rule, as an object
            or by its import path (docs/extend.md).
        learning_rate: of the server optimizer.
        effective_batch_size: examples per round over the whole cohort; the planner divides them.
        accumulation_steps: K, the micro-batches per update; not given: by each client's speed.
        micro_batch_size: examples per micro-batch; not given: by each client's memory.
        local_steps: H, the steps of a client in a round, on average; 1: the exact sum
            (docs/local.md; ``algorithm="fedavg"`` and the others go by name).
        local_learning_rate: of the local steps, and of the parameters that stay on the clients.
        client_algorithm: how a client makes its vector: an object with ``train(work)``, its class,
            or ``FILE.py:CLASS`` (docs/extend.md); not given: the exact sum, or local steps.
        feature: a feature of your own, with the classes ``Terms``, ``Server`` and ``Device``, or
            ``FILE.py:CLASS``; or a list of several (docs/extend.md).
        local_parameters: those that stay on each client, as in ``head.*`` (docs/extend.md).
        cohort_size: clients invited per round; not given: all.
        partition: how to split one data set: iid, dirichlet:0.3, labels:2 ... (docs/data.md).
        fleet: TOML file of the clients' speed, memory and links (docs/fleet.md).
        secure_aggregation: hide single updates from the server.
        engine: in-process, on a Ray cluster, or client processes over gRPC or on Flower's Ray: all
            but the first need the task as a path.
        seed: of the initial model, the partition, the order of examples and the cohorts.
        threads: of torch; not given: 1.
        out: folder for model, metrics and checkpoints; not given: nothing is written.
        settings: all other settings, by dotted keys as in ``{"plan.precision": "bfloat16"}``
            (docs/settings.md), or the path of a TOML file.
        observer: an object with ``on_round(row)``, a function of a row, or several.
        resume: continue the run in ``out`` with its settings, except those that are given here.
        progress: print the progress.
        flags: every other flag of ``headwater-simulate``, as in ``aggregation="median"`` and
            ``privacy_epsilon=8`` (``headwater-simulate --help-all``).

    Raises:
        HeadwaterError: see ``headwater.common.errors``.
    """
    arguments = locals()  # nothing but the arguments so far
    _check_data(data)
    parts = {name: arguments.pop(name) for name in PARTS}
    chosen_task = task_of(task, parts, is_elsewhere=resume or settings is not None)
    if clients is None and isinstance(chosen_task, TaskOfParts):
        arguments["clients"] = chosen_task.num_data_sets
    call = Call("simulate", {**arguments, "task": chosen_task})
    with (
        one_run_at_a_time(),
        caller_state(is_silent=not progress),
        run_scope(call.objects),
    ):
        chosen = with_fleet(call.settings())
        chosen = chosen.model_copy(update={"threads": chosen.threads or 1})
        _check_objects(chosen)
        recorder = RunRecorder()
        observers = [recorder, *user_observers(observer)]
        with show_progress(chosen) as (on_round, display):
            run_engine(
                chosen, on_round=on_round, resume=resume, observer=Observers(display, *observers)
            )
        return recorder.result


@remedy_in_traceback()
def _check_data(data: object) -> None:
    """Check that ``data`` is a path.

    Raises:
        SettingsError: it is something else, such as a data set.
    """
    if data is not None and not isinstance(data, str | Path):
        raise SettingsError(
            f"data is a path, as in data='clients/*.csv', and a {type(data).__name__} is given",
            remedy="give a data set as examples=",
        )


def _is_object(name: str) -> bool:
    return name.startswith(PREFIX)


def _check_objects(settings: Settings) -> None:
    """Check that no other process would need a Python object of this one.

    Raises:
        SettingsError: naming the engine, and the object that it cannot load.
    """
    chosen = settings.simulation
    named = {"task": settings.task, "client algorithm": settings.algorithm.name}
    named |= {"feature": next(filter(_is_object, settings.feature.names), None)}
    if chosen.engine == "flower-ray":
        named["optimizer"] = settings.optimizer.name
    given = [key for key, name in named.items() if name is not None and _is_object(name)]
    if not given or (chosen.engine == "in-process" and chosen.workers == 1):
        return
    how = f"engine={chosen.engine!r}" if chosen.engine != "in-process" else "simulation.workers"
    raise SettingsError(
        f"the {given[0]} is a Python object, and {how} computes in other processes, which load it "
        "from a file",
        remedy="save it in a file, and name it as in task='my_task.py:MyTask'; a script that names "
        f"itself starts the run under `{MAIN_GUARD}`. Or leave {how.partition('=')[0]} out",
    )
