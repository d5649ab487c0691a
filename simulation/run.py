"""The engines of the simulator: this process, the real wire, or Flower's Ray workers.

The server's rounds and the devices' code are the same on each.
"""

from __future__ import annotations

import contextlib
import gc
import secrets
from collections.abc import Iterator

import torch

from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings
from headwater.common.system.heap import keep_freed
from headwater.server.operations.round_log import RoundLog
from headwater.server.rounds.run import OnRound, run
from headwater.server.rounds.training import Training
from headwater.simulation.engines.in_process import LocalFleet
from headwater.simulation.fleet.profiles import with_fleet

MOST_NEW_OBJECTS = 500_000


def run_engine(settings: Settings, *, on_round: OnRound, resume: bool) -> None:
    """Run the settings on the engine that they name."""
    torch.set_num_threads(settings.threads or 1)
    is_direct = not settings.simulation.wire and settings.secure.aggregation == "off"
    is_chosen = settings.simulation.workers != 1 or settings.simulation.compile
    if is_chosen and not (settings.simulation.engine == "in-process" and is_direct):
        raise SettingsError(
            "worker processes and compiled passes compute devices for --engine in-process alone, "
            "and not where their updates travel as messages (--wire, masked updates)",
            remedy="leave --workers and --compile out",
        )
    if settings.simulation.engine == "flower-ray":
        if resume:
            raise SettingsError(
                "Flower's Ray engine keeps the devices' places in its own memory",
                remedy="resume with --engine in-process",
            )
        from headwater.simulation.engines.flower_ray import run_on_ray

        run_on_ray(settings, on_round=on_round)
        return
    if settings.simulation.engine == "grpc":
        from headwater.simulation.engines.grpc import run_on_grpc

        run_on_grpc(settings, on_round=on_round, resume=resume)
        return
    run_id = secrets.randbits(62)
    if is_direct:
        settings = with_fleet(settings)
        training = Training(settings, run_id=run_id)
        fleet = LocalFleet(settings, run_id=run_id)
        keep_freed()
        with contextlib.closing(fleet), _rare_collections():
            run(training, fleet, on_round=on_round, resume=resume, observer=RoundLog())
        return
    _run_on_messages(settings, run_id, on_round=on_round, resume=resume)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python look for reference cycles rarely: a round makes objects for each device.

    Those of ten thousand devices had every collection look through all of them: half of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(MOST_NEW_OBJECTS, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.collect()  # of many runs in one process each left its devices' data behind


def _run_on_messages(settings: Settings, run_id: int, *, on_round: OnRound, resume: bool) -> None:
    """Run the two apps as they are, with every message in process; only here Flower is loaded."""
    from flwr.app import Context, RecordDict

    from headwater.client.app import client_app
    from headwater.server.app import server_app
    from headwater.simulation.engines.message_grid import InProcessGrid
    from headwater.simulation.fleet.virtual_hardware import virtual_hardware

    grid = InProcessGrid(client_app(virtual_hardware), settings)
    grid.enter_run(run_id)
    context = Context(
        run_id=run_id,
        node_id=0,
        node_config={},
        state=RecordDict(),
        run_config=settings.to_run_config(),
    )
    server_app(on_round=on_round, resume=resume)(grid, context)
