"""``headwater.serve``: the aggregation server, from a script or a thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from headwater.common.errors import SettingsError
from headwater.common.settings.keywords import Call, GivenSettings, api_function
from headwater.common.settings.sources import default_out
from headwater.common.system.caller_state import caller_state
from headwater.common.system.command_line import check_addresses
from headwater.common.task import Task
from headwater.common.user_code.run_scope import run_scope
from headwater.server.aggregation.server_rule import ServerRule
from headwater.server.operations.progress import show_progress
from headwater.server.rounds.observer import Observers
from headwater.server.run_result import Run, RunRecorder
from headwater.server.serve import serve_run
from headwater.server.tracking.user_observer import GivenObservers, user_observers


@api_function
def serve(
    task: Task | type[Task] | str | Path,
    *,
    rounds: int | None = None,
    min_clients: int | None = None,
    listen: str | None = None,
    optimizer: str | type[torch.optim.Optimizer] | ServerRule | None = None,
    learning_rate: float | None = None,
    effective_batch_size: int | None = None,
    accumulation_steps: int | None = None,
    micro_batch_size: int | None = None,
    local_steps: int | None = None,
    local_learning_rate: float | None = None,
    client_algorithm: str | Path | None = None,
    feature: str | Path | type | list[str | Path | type] | None = None,
    local_parameters: str | None = None,
    cohort_size: int | None = None,
    deadline: float | None = None,
    secure_aggregation: Literal["off", "semi-honest", "active"] | None = None,
    seed: int | None = None,
    threads: int | None = None,
    out: str | Path | None = None,
    settings: GivenSettings = None,
    observer: GivenObservers = (),
    resume: bool = False,
    progress: bool = True,
    **flags: Any,
) -> Run:
    """Serve a run to the clients that connect, as ``headwater-server`` does, until its last round.

    Each keyword is the flag of that name; what is not given has the flag's default. It works in any
    thread. In the main thread Ctrl-C and SIGTERM raise KeyboardInterrupt, and the process's state
    is as before when this returns or raises. Clients wait for a server that stops so, and
    ``resume=True`` with the same ``out`` continues. In another thread, ``headwater-server drain
    --out DIR`` ends it.

    Args:
        task: an object with a task's methods, its class, or ``FILE.py:Class`` as for ``--task``.
        rounds: server steps to take.
        min_clients: fewest clients for a round to start and count.
        listen: HOST:PORT where clients connect; beyond loopback with TLS (``settings``).
        optimizer: class of torch.optim by its name; or your own class, or server rule, as an object
            or by its import path (docs/extend.md).
        learning_rate: of the server optimizer.
        effective_batch_size: examples per round over the whole cohort; the planner divides them.
        accumulation_steps: K, the micro-batches per update; not given: by each client's speed.
        micro_batch_size: examples per micro-batch; not given: by each client's memory.
        local_steps: H, the steps of a client in a round, on average; 1: the exact sum
            (docs/local.md; ``algorithm="fedavg"`` and the others go by name).
        local_learning_rate: of the local steps, and of the parameters that stay on the clients.
        client_algorithm: the name of the client algorithm that the clients were started with.
        feature: a feature of your own, with the classes ``Terms``, ``Server`` and ``Device``, or
            ``FILE.py:CLASS``; or a list of several (docs/extend.md). The clients are started with
            the same.
        local_parameters: those that stay on each client, as the clients were started with.
        cohort_size: clients invited per round; not given: all.
        deadline: seconds after which a round ends with the updates that it has.
        secure_aggregation: hide single updates from the server.
        seed: of the initial model, the order of examples and the cohorts.
        threads: of torch; not given: all usable cores.
        out: folder for model, metrics and checkpoints; not given: runs/TASK-TIME.
        settings: all other settings, by dotted keys as in ``{"tls.ca": "ca.pem"}``
            (docs/settings.md), or the path of a TOML file such as certs/server.toml.
        observer: an object with ``on_round(row)``, a function of a row, or several.
        resume: continue the run in ``out`` with its settings, except those that are given here.
        progress: print the address and the progress.
        flags: every other flag of ``headwater-server``, as in ``aggregation="median"`` and
            ``privacy_epsilon=8`` (``headwater-server --help-all``).

    Raises:
        HeadwaterError: see ``headwater.common.errors``.
    """
    call = Call("serve", locals())  # nothing but the arguments so far
    with caller_state(is_silent=not progress), run_scope(call.objects):
        chosen = call.settings()
        chosen = chosen.model_copy(update={"out": chosen.out or default_out(chosen)})
        if chosen.standby.shared_state is not None:
            raise SettingsError(
                "serve() in Python shares its run with no standby",
                remedy="leave shared_state out, or start the command headwater-server",
            )
        if chosen.server.upstream is not None:
            raise SettingsError(
                "serve() in Python is no aggregator of a server above",
                remedy="leave upstream out, or start the command headwater-server --upstream",
            )
        listen, metrics = chosen.server.listen, chosen.server.metrics
        credentials = check_addresses(chosen, listen, metrics=metrics)
        recorder = RunRecorder()
        observers = [recorder, *user_observers(observer)]
        with show_progress(chosen) as (on_round, display):
            serve_run(
                chosen,
                credentials,
                on_round=on_round,
                resume=resume,
                observer=Observers(display, *observers),
            )
        return recorder.result
