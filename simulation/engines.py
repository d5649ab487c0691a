"""The two engines of the simulator: this process, or Flower's Ray workers, with the same apps."""

from __future__ import annotations

import secrets

import torch
from flwr.app import Context, RecordDict

from client.app import client_app
from common.errors import SettingsError
from common.settings import Settings
from server.app import server_app
from server.rounds import OnRound
from simulation.fleet import simulated_machine
from simulation.grid import InProcessGrid


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
    grid = InProcessGrid(client_app(simulated_machine), settings)
    run_id = secrets.randbits(62)
    grid.enter_run(run_id)
    context = Context(
        run_id=run_id,
        node_id=0,
        node_config={},
        state=RecordDict(),
        run_config=settings.to_run_config(),
    )
    server_app(on_round=on_round, resume=resume)(grid, context)
