"""The two engines of the simulator: this process, or Flower's Ray workers, with the same apps."""

from __future__ import annotations

import secrets

import torch

from common.errors import SettingsError
from common.settings import Settings
from server.rounds import OnRound, run
from server.training import Training
from simulation.local_fleet import LocalFleet
from simulation.profiles import with_fleet


def run_engine(settings: Settings, *, on_round: OnRound, resume: bool) -> None:
    """Run the settings on the engine that they name."""
    torch.set_num_threads(settings.threads or 1)
    if settings.simulation.engine == "flower-ray":
        if resume:
            raise SettingsError(
                "Flower's Ray engine keeps the devices' places in its own memory",
                remedy="resume with --engine in-process",
            )
        from simulation.flower_ray import run_on_ray

        run_on_ray(settings, on_round=on_round)
        return
    run_id = secrets.randbits(62)
    if not settings.simulation.wire and settings.secure.aggregation == "off":
        settings = with_fleet(settings)
        training = Training(settings, run_id=run_id)
        fleet = LocalFleet(settings, run_id=run_id)
        run(training, fleet, on_round=on_round, resume=resume)
        return
    _run_on_messages(settings, run_id, on_round=on_round, resume=resume)


def _run_on_messages(settings: Settings, run_id: int, *, on_round: OnRound, resume: bool) -> None:
    """Run the two apps as they are, with every message in process; only here Flower is loaded."""
    from flwr.app import Context, RecordDict

    from client.app import client_app
    from server.app import server_app
    from simulation.fleet import simulated_machine
    from simulation.grid import InProcessGrid

    grid = InProcessGrid(client_app(simulated_machine), settings)
    grid.enter_run(run_id)
    context = Context(
        run_id=run_id,
        node_id=0,
        node_config={},
        state=RecordDict(),
        run_config=settings.to_run_config(),
    )
    server_app(on_round=on_round, resume=resume)(grid, context)
