"""The server as a Flower ServerApp; it runs on the simulator's, our gRPC and Flower's own grid."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp

from headwater.common.errors import remedy_in_traceback
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import from_run_config
from headwater.server.features import grid_fleet, observers
from headwater.server.operations.round_log import RoundLog
from headwater.server.operations.run_lock import locked_without_server
from headwater.server.rounds.features import round_runner, trackers
from headwater.server.rounds.observer import Observer, Observers
from headwater.server.rounds.round_loop import NO_OBSERVER, OnRound, run
from headwater.server.rounds.round_row import RoundRow
from headwater.server.rounds.run_folder import check_beginning
from headwater.server.rounds.run_state import Training
from headwater.server.same_data.same_data import SameData

# Flower's engines show only the loggers that descend from Flower's own.
flower_log = logging.getLogger("flwr.headwater")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedRun:
    """What a run needs of the user's code and files: task, model, optimizer, trackers."""

    training: Training
    trackers: list[Observer]


def load_run(settings: Settings, *, run_id: int, resume: bool) -> LoadedRun:
    """Load a run, before any client connects.

    Raises:
        HeadwaterError: see ``trackers``, ``Training`` and ``check_beginning``.
    """
    loaded = LoadedRun(trackers=trackers(settings), training=Training(settings, run_id=run_id))
    if settings.out is not None:
        check_beginning(loaded.training, settings.out, resume=resume)
    return loaded


def server_app(
    *,
    on_round: OnRound,
    resume: bool = False,
    observer: Observer = NO_OBSERVER,
    loaded: LoadedRun | None = None,
    locks_folder: bool = False,
) -> ServerApp:
    """Return a ServerApp that calls ``on_round`` per committed round and ``observer`` per event.

    It loads the run when it starts, from the settings in its context, unless ``loaded`` has it.
    With ``locks_folder`` it locks the run's folder, which no caller has locked.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        with remedy_in_traceback():
            settings = from_run_config(context.run_config)
            if settings.threads is not None:
                torch.set_num_threads(settings.threads)
            with locked_without_server(settings.out if locks_folder else None):
                own = loaded or load_run(settings, run_id=context.run_id, resume=resume)
                fleet = grid_fleet(grid, own.training)
                own_observers = [RoundLog(), SameData(settings.task), *observers(own.training)]
                run(
                    own.training,
                    fleet,
                    on_round=on_round,
                    resume=resume,
                    observer=Observers(*own_observers, *own.trackers, observer),
                    run_round=round_runner(settings, fleet),
                )

    return app


def server_context(settings: Settings, *, run_id: int) -> Context:
    """Return the context in which a ServerApp runs these settings."""
    return Context(
        run_id=run_id,
        node_id=0,
        node_config={},
        state=RecordDict(),
        run_config=settings.to_run_config(),
    )


def log_round(row: RoundRow) -> None:
    """Log one line about a committed round."""
    flower_log.info(
        "round %d: %s, weight %d from %d clients, K %d to %d, %.2f s %s",
        row.round,
        row.loss_text(".4f"),
        row.weight,
        row.num_clients,
        *row.k_range,
        row.seconds,
        {name: round(value, 4) for name, value in row.metrics.items()},
    )


app = server_app(on_round=log_round, locks_folder=True)
